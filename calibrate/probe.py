"""What errors at the outputs of an attention's linears do to what the attention returns, by random probes.

Dimensions: W windows, T tokens, N outputs of a linear.
A gradient g of expectation 0 and covariance I at the attention's output comes back to a linear as J^T g, whose second
moments are J^T J: how far each error there, and each pair of them, moves the output (Hutchinson). No gradient of the
whole model is needed, and none of its layers but the one at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.calibrate.taps import Tap
from glm5_quant.model.families import Linear
from glm5_quant.quant.rows import OutputMoments

# Outputs that belong to no head are taken in groups of so many rows at most.
MOST_ROWS = 1024


class Probe(nn.Module):
    """Stands in for an attention: runs it on some windows, and sends random gradients back from its output.

    `weight_WT`: what the squared error of each token's output weighs; None for ones. Each window has a seed of its own,
    so that how many go through together changes nothing.
    """

    def __init__(self, attention: nn.Module, weight_WT: Tensor | None, seeds: Sequence[int]) -> None:
        super().__init__()
        self.attention, self.weight_WT, self.seeds = attention, weight_WT, seeds

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            returned = self.attention(*args, **kwargs)
        first, *rest = returned if isinstance(returned, tuple) else (returned,)
        draws = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        gradient = torch.stack([torch.randn(first.shape[1:], generator=one) for one in draws]).to(first.device)
        if self.weight_WT is not None:
            gradient *= self.weight_WT.sqrt()[..., None]
        torch.autograd.backward(first, gradient.to(first.dtype))
        return (first.detach(), *rest) if isinstance(returned, tuple) else first.detach()


class Prober:
    """Handler of taps (taps.py): computes, and adds the gradients that come back to the moments of each linear's
    outputs, by name. Linears without moments are computed and no more."""

    def __init__(self, moments: Mapping[str, OutputMoments], dtype: torch.dtype) -> None:
        self.moments, self.dtype = moments, dtype

    def __call__(self, tap: Tap, x: Tensor) -> Tensor:
        out = tap.apply_weight(x, self.dtype)
        moments = self.moments.get(tap.name)
        if moments is None:
            return out
        first = not out.requires_grad
        out.requires_grad_().register_hook(partial(_add, moments))  # type: ignore[no-untyped-call]
        # Some attentions clip in place, which autograd forbids where a gradient ends.
        return out.clone() if first else out


def _add(moments: OutputMoments, gradient: Tensor) -> None:
    moments.add(gradient.flatten(0, -2))


def groups_of(linear: Linear, config: Any) -> tuple[int, int]:
    """Groups of rows that touch each other, and rows in each: a linear's heads where its outputs belong to heads, by
    the model's config; else as few groups as hold MOST_ROWS at most."""
    role, heads = linear.module.rpartition(".")[2], int(getattr(config, "num_attention_heads", 0) or 1)
    size = 0
    if role in ("q_proj", "q_b_proj"):
        size = linear.n // heads
    elif role in ("k_proj", "v_proj"):
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if not size or linear.n % size:
        size = next(n for n in range(min(linear.n, MOST_ROWS), 0, -1) if linear.n % n == 0)
    return linear.n // size, size
