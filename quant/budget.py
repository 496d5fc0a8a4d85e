"""One byte budget for the whole model's shadows: what to buy first (EAMPQ step 7).

A matrix offers its columns in the order of `shadow.best_columns`; an expert may also be offered whole (a super expert).
Gains of different matrices are made comparable by rho, the KL that one unit of relative error costs at that layer and
projection, and by how often the expert is chosen.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What can be bought for one matrix: columns of equal size in a fixed order, gain = drop * weight.

    matrix        its name; equal gains per byte are decided by name order
    drops         error drop of each further column
    column_bytes  bytes of one column
    weight        rho * routing frequency / tr(W H W^T)
    expert        name of the expert it belongs to, when that may be bought whole
    """

    matrix: str
    drops: Sequence[float]
    column_bytes: int
    weight: float = 1.0
    expert: str | None = None


@dataclass(frozen=True)
class Purchase:
    """columns bought of each matrix (only those above 0), whole experts bought, and the bytes spent."""

    columns: dict[str, int]
    experts: tuple[str, ...]
    spent_bytes: int


def spend(offers: Sequence[Offer], budget_bytes: int, whole_experts: Mapping[str, int] | None = None) -> Purchase:
    """Whole experts first, in the order given, while they fit; then columns by gain per byte until nothing fits.

    whole_experts: bytes of a full copy of each super expert, strongest first. The columns of a bought one are
    not offered any more.
    """
    left = budget_bytes
    bought_experts: list[str] = []
    for expert, size in (whole_experts or {}).items():
        if size <= left:
            bought_experts.append(expert)
            left -= size
    open_offers = sorted((o for o in offers if o.expert not in bought_experts), key=lambda offer: offer.matrix)
    queue = [(-_rate(offer, 0), i, 0) for i, offer in enumerate(open_offers) if offer.drops]
    heapq.heapify(queue)
    columns: dict[str, int] = {}
    while queue:
        rate, i, taken = heapq.heappop(queue)
        offer = open_offers[i]
        # Columns only come in order: a matrix that no longer fits is out, smaller ones may still go on.
        if rate >= 0 or offer.column_bytes > left:
            continue
        left -= offer.column_bytes
        columns[offer.matrix] = taken + 1
        if taken + 1 < len(offer.drops):
            heapq.heappush(queue, (-_rate(offer, taken + 1), i, taken + 1))
    return Purchase(columns=columns, experts=tuple(bought_experts), spent_bytes=budget_bytes - left)


def _rate(offer: Offer, position: int) -> float:
    return offer.drops[position] * offer.weight / offer.column_bytes
