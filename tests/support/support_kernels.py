"""Packed matrices to test with, and what they compute in float64, written independently of the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from glm5_quant.kernels.layout import PackedMatrix, Shadow, from_codes


def random_parts(
    n: int, k: int, lead: tuple[int, ...] = (), seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero of a matrix (or a stack) with scales around 0.02."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-k // 64)
    codes = torch.randint(0, 16, (*lead, n, k), dtype=torch.uint8, generator=generator)
    scale = torch.rand(*lead, n, blocks, generator=generator).add_(0.5).mul_(0.02).to(dtype)
    zero = torch.randint(4, 12, (*lead, n, blocks), dtype=torch.uint8, generator=generator)
    return codes, scale, zero


def random_tokens(tokens: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal inputs [T, K], the same every time."""
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed + 31)).to(dtype)


def random_shadow(n: int, k: int, counts: list[int], seed: int = 0, int8: bool = False) -> Shadow:
    """Shadow columns for each expert (one count for a single matrix)."""
    generator = torch.Generator().manual_seed(seed + 1)
    columns = torch.cat([torch.randperm(k, generator=generator)[:count] for count in counts]).to(torch.int32)
    residual = torch.randn(sum(counts), n, generator=generator).mul_(0.02)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    if not int8:
        return Shadow(columns, residual.half(), offsets)
    scale = residual.abs().amax(-1).clamp_min(1e-6) / 127
    return Shadow(columns, (residual / scale[:, None]).round().to(torch.int8), offsets, scale)


def random_packed(
    n: int, k: int, experts: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32, shadow: Shadow | None = None
) -> tuple[PackedMatrix, Tensor]:
    """A packed matrix and its weights with the shadow added, float64 [(E,) N, K]."""
    lead = (experts,) if experts else ()
    codes, scale, zero = random_parts(n, k, lead, seed, dtype)
    block = torch.arange(k) // 64
    weight = (codes.double() - zero[..., block].double()) * scale[..., block].double()
    stack = weight if experts else weight[None]
    for e in range(stack.shape[0] if shadow is not None else 0):
        for row in range(int(shadow.offsets[e]), int(shadow.offsets[e + 1])):
            factor = 1.0 if shadow.scale is None else float(shadow.scale[row])
            stack[e, :, int(shadow.columns[row])] += shadow.residual[row].double() * factor
    return from_codes(codes, scale, zero, shadow=shadow), weight


def experts_float64(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A SwiGLU MoE layer token by token and choice by choice, [T, D] float64; index E is skipped."""
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for t in range(x.shape[0]):
        for a in range(index.shape[1]):
            e = int(index[t, a])
            if e == gate_up.shape[0]:
                continue
            both = gate_up[e] @ x[t].double()
            half = both.shape[0] // 2
            hidden = both[:half] * torch.sigmoid(both[:half]) * both[half:]
            out[t] += float(weight[t, a]) * (down[e] @ hidden)
    return out


def random_routing(tokens: int, experts: int, top: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Distinct random experts for each token, and weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed + 7)
    index = torch.rand(tokens, experts, generator=generator).topk(top, dim=-1).indices
    weight = torch.rand(tokens, top, generator=generator).add_(0.1)
    return index, weight / weight.sum(-1, keepdim=True)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expectation; NaN anywhere gives NaN, which no bound accepts."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote reads as NaN (-1 for integers), so a value a kernel forgot to store cannot pass."""
    for owner, name in ((torch, "empty"), (Tensor, "new_empty")):
        real = getattr(owner, name)

        def poisoned(*args: Any, real: Any = real, **kwargs: Any) -> Tensor:
            made: Tensor = real(*args, **kwargs)
            return made.fill_(float("nan") if made.is_floating_point() else -1)

        monkeypatch.setattr(owner, name, poisoned)
