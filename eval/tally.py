"""Sums over tokens, kept per slice and cluster: all that is ever stored of a pass over the text.

A slice is a share of the tokens ("all", "numeric", "file:a.txt", "position:512-1023"). A cluster is one window of one
document; the bootstrap later resamples documents, or windows where there are few documents. Memory does not grow with
the vocabulary or the number of tokens, only (64 bytes a slice) with the number of windows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from glm5_quant.eval.divergence import TokenScores

FIELDS = ("tokens", "nll_source", "nll", "kl", "flips", "right_source", "right", "lost")
COLUMN = {name: index for index, name in enumerate(FIELDS)}

Cluster = tuple[int, int]
Floats = NDArray[np.float64]


def token_columns(scores: TokenScores) -> Floats:
    """[S, 8] per-token contributions in the order of FIELDS.

    flips: top-1 differs from the source's; right: top-1 is the true token; lost: source right and export wrong.
    """
    right_source = scores.top1_source == scores.targets
    right = scores.top1 == scores.targets
    columns = (
        np.ones(len(scores.targets)),
        scores.nll_source,
        scores.nll,
        scores.kl,
        scores.top1 != scores.top1_source,
        right_source,
        right,
        right_source & ~right,
    )
    return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)


class Histogram:
    """Counts of values >= 0 on a logarithmic grid: percentiles of any number of tokens within 1.2%, in fixed memory."""

    LOW, PER_DECADE, DECADES = 1e-9, 100, 12

    def __init__(self) -> None:
        self.counts = np.zeros(self.PER_DECADE * self.DECADES + 1, dtype=np.int64)
        self.largest = 0.0

    def add(self, values: Floats) -> None:
        """Count values; those at or below 1e-9 share the lowest bin, which stands for 0."""
        if not len(values):
            return
        steps = np.log10(np.maximum(values, self.LOW) / self.LOW) * self.PER_DECADE
        bins = np.clip(np.ceil(steps), 0, len(self.counts) - 1).astype(np.int64)
        self.counts += np.bincount(bins, minlength=len(self.counts))
        self.largest = max(self.largest, float(values.max()))

    def percentile(self, share: float) -> float:
        """The value below which `share` (0..1) of the counted values lie."""
        total = int(self.counts.sum())
        if not total:
            return float("nan")
        index = int(np.searchsorted(np.cumsum(self.counts), share * total))
        if index == 0:
            return 0.0
        middle = self.LOW * 10 ** ((index - 0.5) / self.PER_DECADE)
        return float(min(middle, self.largest))


@dataclass
class Tally:
    """Sums of FIELDS by slice and cluster, and the spread of KL for all and for numeric tokens."""

    sums: dict[str, dict[Cluster, Floats]] = field(default_factory=lambda: defaultdict(dict))
    spread: dict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))

    def add(self, cluster: Cluster, columns: Floats, slices: Mapping[str, NDArray[np.bool_] | None]) -> None:
        """Add tokens [S, 8] of one window. A slice's mask picks its tokens; None means all of them."""
        for name, mask in slices.items():
            chosen = columns if mask is None else columns[mask]
            if not len(chosen):
                continue
            clusters = self.sums[name]
            total = chosen.sum(axis=0)
            clusters[cluster] = clusters[cluster] + total if cluster in clusters else total
            if name in ("all", "numeric"):
                self.spread[name].add(chosen[:, COLUMN["kl"]])

    def clusters(self, name: str, unit: str) -> Floats:
        """[C, 8] sums of one slice by "document" or "window"; [0, 8] where the slice is empty."""
        found = self.sums.get(name, {})
        if not found:
            return np.zeros((0, len(FIELDS)))
        if unit == "window":
            return np.stack(list(found.values()))
        grouped: dict[int, Floats] = {}
        for (document, _), total in found.items():
            grouped[document] = grouped.get(document, 0.0) + total
        return np.stack(list(grouped.values()))

    def documents(self) -> int:
        """How many documents gave scored tokens."""
        return len({document for document, _ in self.sums.get("all", {})})


def position_band(edges: Iterable[int], positions: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """Masks of positions by band: "position:0-127", ..., "position:8192+"; empty bands are left out."""
    bands: dict[str, NDArray[np.bool_]] = {}
    limits = list(edges)
    for low, high in zip(limits, [*limits[1:], None], strict=True):
        mask = positions >= low if high is None else (positions >= low) & (positions < high)
        if mask.any():
            bands[f"position:{low}+" if high is None else f"position:{low}-{high - 1}"] = mask
    return bands
