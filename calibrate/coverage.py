"""Which tokens each expert saw, and what that means for trusting its statistics.

Dimensions: T tokens, E experts, top_k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Tokens of each expert: `index[e]` ascending token indices, `scale[e]` the router's weights for them."""

    index: list[Tensor]
    scale: list[Tensor]

    @property
    def counts(self) -> list[int]:
        return [len(index) for index in self.index]


def by_expert(chosen_TK: Tensor, scale_TK: Tensor, experts: int) -> Routed:
    """Sort token-expert pairs by expert. Ids outside 0..experts-1 mean "no expert" and are left out.

    Args:
        chosen_TK: integer [T, top_k] expert ids; scale_TK: float [T, top_k] router weights.
    """
    flat = chosen_TK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat.clamp(0, experts), minlength=experts + 1)[:experts]
    start = int((flat < 0).sum())
    parts = torch.split(order[start : start + int(counts.sum())], counts.tolist())
    top_k = chosen_TK.shape[1]
    return Routed(index=[part // top_k for part in parts], scale=[scale_TK.reshape(-1)[part] for part in parts])


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Coverage of all MoE layers: experts that saw nothing or fewer tokens than the target, least and mean counts."""

    layers: int
    experts: int
    unseen: int
    below_target: int
    target: int
    least: int
    mean: float

    @property
    def line(self) -> str:
        """One line for people."""
        if not self.layers:
            return "no routed experts"
        return (
            f"{self.experts} experts in {self.layers} layers saw {self.mean:.0f} tokens on average, the least "
            f"{self.least}; {self.unseen} saw 0 tokens, {self.below_target} fewer than {self.target}"
        )


def summarize(counts: list[list[int]], target: int) -> Coverage:
    """Summary over layers. `counts` has one list of token counts a MoE layer."""
    flat = [count for layer in counts for count in layer]
    return Coverage(
        layers=len(counts),
        experts=len(flat),
        unseen=sum(count == 0 for count in flat),
        below_target=sum(count < target for count in flat),
        target=target,
        least=min(flat, default=0),
        mean=sum(flat) / len(flat) if flat else 0.0,
    )
