"""One feed-forward network over its tokens: what is written to both streams, and what its statistics are of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.ffn import Network, Streams, Tokens, solve_network
from glm5_quant.model.families import Linear

TOKENS, HIDDEN, INNER, HELD_FROM = 90, 8, 6, 70
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "gate_up": (2 * INNER, HIDDEN)}


@dataclass
class Found:
    """Outputs that were watched, by token, and a copy of the evidence that each group was solved on."""

    seen: list[tuple[Any, Tensor, Tensor | None]]
    evidence: list[Evidence]


def linear_of(role: str) -> Linear:
    n, k = SHAPES[role]
    return Linear(role, 0, role, 0, False, n, k, role, (None, 0, n), role, "mlp.experts")


def solved(weights: dict[str, Tensor], tokens: Tokens, streams: Streams) -> Found:
    """The solver makes weights 1.25 times as large."""
    found = Found([], [])

    def solve(items: list[Linear], matrices: list[Tensor], given: Evidence) -> list[Tensor]:
        found.evidence.append(given)
        return [1.25 * matrix for matrix in matrices]

    def evidence(k: int, total: int, writes: int = 0) -> Evidence:
        return Evidence.empty(k, tokens=total, held_from=HELD_FROM, gap=True, device="cpu", writes=writes)

    solve_network(
        Network(
            inputs=[linear_of(role) for role in weights if role != "down"],
            down=linear_of("down"),
            read=lambda item: weights[item.name],
            activation=silu,
        ),
        tokens,
        streams,
        solve=solve,
        evidence=evidence,
        pool=None,
        chunk_tokens=7,
        scratch=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        dtype=torch.float32,
        watch=lambda down, index, out, scale: found.seen.append((index, out.clone(), scale)),
    )
    return found


def outputs(x: Tensor, weights: dict[str, Tensor], times: float = 1.0) -> tuple[Tensor, Tensor]:
    """Hidden activations and outputs in float64, of weights so many times as large."""
    real = {role: times * weight.double() for role, weight in weights.items()}
    gate, up = (real["gate"], real["up"]) if "gate" in real else real["gate_up"].chunk(2)
    hidden = silu(x.double() @ gate.T) * (x.double() @ up.T)
    return hidden, hidden @ real["down"].T


@pytest.mark.parametrize("kind", ["dense", "fused", "shared", "routed", "all experts"])
def test_outputs_and_statistics_are_those_of_the_tokens_a_network_sees(kind: str) -> None:
    torch.manual_seed(len(kind))
    roles = ("gate_up", "down") if kind == "fused" else ("gate", "up", "down")
    weights = {role: torch.randn(*SHAPES[role]) / 2 for role in roles}
    x, weight_T, stream_T = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS) + 0.5, torch.rand(TOKENS) + 0.5
    # In a model with experts the source stream is followed from the first token on.
    start = 20 if kind in ("dense", "fused") else 0
    source_x = x[start:] + 0.3 * torch.randn(TOKENS - start, HIDDEN)
    before, source_before = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS - start, HIDDEN)
    lack = torch.randn(TOKENS - start, HIDDEN)
    own, scale = torch.arange(TOKENS), torch.ones(TOKENS)
    tokens = Tokens(weight_T=weight_T)
    if kind in ("routed", "all experts"):
        own = torch.randperm(TOKENS)[:50].sort().values
        scale = torch.rand(50) + 0.2
        everything = kind == "all experts"
        mine = weight_T if everything else weight_T[own]
        tokens = Tokens(index_T=own, scale_T=scale, weight_T=mine, all_seen=everything)
    streams = Streams(x=x, out=before.clone(), source_x=source_x, source_out=source_before.clone(), source_from=start)
    streams = replace(streams, added=kind != "dense", lack=lack, weight_T=stream_T)
    assert streams.source_out is not None
    found = solved(weights, tokens, streams)

    hidden, out = outputs(x, weights, 1.25)
    source_hidden, source_out = outputs(source_x, weights)
    expected = before.double() if streams.added else torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    expected[own] += out[own] * scale[:, None].double()
    torch.testing.assert_close(streams.out.double(), expected, rtol=1e-4, atol=1e-5)
    followed = own[own >= start] - start
    there = source_before.double() if streams.added else torch.zeros_like(source_out)
    there[followed] += source_out[followed] * scale[own >= start, None].double()
    torch.testing.assert_close(streams.source_out.double(), there, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([y for _, y, _ in found.seen]).double(), out[own], rtol=1e-4, atol=1e-5)

    counted = torch.arange(TOKENS) if kind == "all experts" else own
    cases = ((x, source_x, weight_T), (hidden.float(), source_hidden.float(), weight_T * stream_T))
    for given, (values, source_values, weights_T) in zip(found.evidence, cases, strict=True):
        (part,) = given.parts
        for moments, rows in ((part.fit, counted[counted < HELD_FROM]), (part.held, counted[counted >= HELD_FROM])):
            w, v = weights_T[rows].double(), values[rows].double()
            exact = (v.T * w) @ v / w.sum()
            torch.testing.assert_close(moments.hessian_KK.double(), exact, rtol=1e-4, atol=1e-5)
            rows = rows[rows >= start]
            w, v, apart = weights_T[rows].double(), values[rows].double(), source_values[rows - start] - values[rows]
            assert moments.gap_KK is not None
            exact = (apart.double().T * w) @ v / w.sum()
            torch.testing.assert_close(moments.gap_KK.double(), exact, rtol=1e-3, atol=1e-4)
    assert found.evidence[1].wants_lack == (kind != "all experts")
    assert not found.evidence[0].wants_lack
