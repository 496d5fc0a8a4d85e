"""Which tokens each expert saw, and what that means for trusting its statistics.

Dimensions: T tokens, E experts, top_k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

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
    # Counted from one below the first expert to one beyond the last, where everything outside falls.
    start, *counts, _ = torch.bincount(flat.clamp(-1, experts) + 1, minlength=experts + 2).tolist()
    parts = torch.split(order[start : start + sum(counts)], counts)
    top_k = chosen_TK.shape[1]
    return Routed(index=[part // top_k for part in parts], scale=[scale_TK.reshape(-1)[part] for part in parts])


@dataclass(frozen=True, kw_only=True)
class Bin:
    """How many experts saw `low` to `high` tokens, both included."""

    low: int
    high: int
    experts: int


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Coverage of all MoE layers: experts that saw nothing or fewer tokens than the target, least and mean counts, and
    a histogram whose bins double from the target up and halve from it down."""

    layers: int
    experts: int
    unseen: int
    below_target: int
    target: int
    least: int
    mean: float
    histogram: list[Bin] = field(default_factory=list)

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
        histogram=histogram(flat, target),
    )


def histogram(counts: list[int], target: int) -> list[Bin]:
    """Bins 0, 1 to .., up to the largest count; empty ones at either end are left out."""
    if not counts:
        return []
    edges = [max(target, 1)]
    while edges[0] > 1:
        edges.insert(0, edges[0] // 2)
    while edges[-1] <= max(counts):
        edges.append(2 * edges[-1])
    bins = [
        Bin(low=low, high=high - 1, experts=sum(low <= count < high for count in counts))
        for low, high in pairwise([0, *edges])
    ]
    filled = [number for number, one in enumerate(bins) if one.experts]
    return bins[filled[0] : filled[-1] + 1]
