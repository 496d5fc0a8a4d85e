"""What experts that few tokens reach are solved on: their own moments, and what all tokens of the layer add."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.ffn import Network, Pool, Streams, Tokens, solve_network
from glm5_quant.model.families import Linear

# The last 50 tokens are held out.
TOKENS, POOLED, HIDDEN, INNER = 600, 550, 32, 16


def evidence(k: int, tokens: int, writes: int = 0, *, pooled: bool = False) -> Evidence:
    return Evidence.empty(k, tokens=tokens, held_from=TOKENS, gap=False, device="cpu")


def solved_on(own_T: Tensor, kappa: float, x_TD: Tensor, weights: dict[str, Tensor]) -> list[tuple[Tensor, float]]:
    """H and effective tokens that gate and up, then down, are solved on; the solver leaves weights as they are."""
    seen: list[tuple[Tensor, float]] = []

    def solve(items: Sequence[Linear], matrices: list[Tensor], given: Evidence) -> list[Tensor]:
        seen.append((given.parts[0].fit.hessian_KK.clone(), given.parts[0].fit.n_eff))
        return matrices

    inputs = evidence(HIDDEN, POOLED)
    inputs.add(x_TD[:POOLED], None, 0, weights["tokens"][:POOLED])
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    linears = {
        role: Linear(
            name=role,
            layer=0,
            role=role,
            expert=0,
            shared=False,
            n=n,
            k=k,
            source=role,
            slice=(None, 0, n),
            group=role,
            module="mlp.experts",
        )
        for role, (n, k) in shapes.items()
    }
    solve_network(
        Network(
            inputs=[linears["gate"], linears["up"]],
            down=linears["down"],
            read=lambda item: weights[item.name],
            activation=silu,
        ),
        Tokens(index_T=own_T, scale_T=torch.ones(len(own_T)), weight_T=weights["tokens"][own_T]),
        Streams(x=x_TD, out=torch.zeros(TOKENS, HIDDEN), added=True),
        solve=solve,
        evidence=evidence,
        pool=Pool(inputs=inputs, tokens=POOLED, kappa=kappa, weight_T=weights["tokens"]),
        chunk_tokens=100,
        scratch=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        dtype=torch.float32,
    )
    return seen


def moments(x_TK: Tensor, weight_T: Tensor) -> tuple[Tensor, float]:
    x, weight = x_TK.double(), weight_T.double()
    return (x.T * weight) @ x / weight.sum(), float(weight.sum() ** 2 / weight.square().sum())


@pytest.mark.parametrize("count", [0, 1, 40, 63, 64, 127, 128])
def test_moments_are_those_of_its_own_tokens_and_of_kappa_others_for_each_input_below_4_an_input(count: int) -> None:
    torch.manual_seed(count)
    x = torch.randn(TOKENS, HIDDEN) * torch.rand(HIDDEN).add(0.2)
    weights = {role: torch.randn(INNER, HIDDEN) / 6 for role in ("gate", "up")}
    weights |= {"down": torch.randn(HIDDEN, INNER), "tokens": 1 + 2 * (torch.rand(TOKENS) < 0.2).float()}
    own = torch.randperm(TOKENS)[:count].sort().values
    hidden = silu(x @ weights["gate"].T) * (x @ weights["up"].T)
    # 64 tokens are run through the expert for 16 inputs: every eighth of 550.
    cases = ((x, torch.arange(POOLED), HIDDEN), (hidden, torch.arange(0, POOLED, 8), INNER))
    for (found, effective), (values, pool, k) in zip(solved_on(own, 0.5, x, weights), cases, strict=True):
        whole, _ = moments(values[pool], weights["tokens"][pool])
        mine, n = moments(values[own], weights["tokens"][own]) if count else (torch.zeros_like(whole), 0.0)
        added = 0.5 * k if count < 4 * k else 0.0
        expected = (n * mine + added * whole) / (n + added)
        assert effective == pytest.approx(n + added, rel=1e-6)
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.diagonal().mean()))
