"""Uncertainty of paired comparisons: clustered percentile bootstrap and an equivalence test.

Tokens of one document are not independent, so whole clusters (documents, dialogues, windows) are resampled. Both models
are summed over the same resampled clusters, which makes every difference a paired one (Efron & Tibshirani 1993, ch.
13).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]

DRAWS = 2000
CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure with its interval. None where it cannot be had: no tokens, or fewer than two clusters."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """The larger distance from the value to an end of its interval."""
        if self.value is None or self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low)


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Verdict of the test: "equivalent" (interval inside +-margin), "different" (interval excludes 0) or
    "undecided"."""

    quantity: str
    margin: float
    confidence: float
    low: float | None
    high: float | None
    verdict: str


def resample(sums: Floats, draws: int = DRAWS, seed: int = 0) -> Floats:
    """[draws, ...] sums over clusters drawn with replacement from `sums` [C, ...].

    The same C, draws and seed pick the same clusters, so two calls are paired with each other.
    """
    count = len(sums)
    flat = sums.reshape(count, -1)
    generator = np.random.default_rng([seed, count])
    step = max(1, CHUNK // max(1, count))
    parts = []
    for start in range(0, draws, step):
        picks = generator.multinomial(count, np.full(count, 1.0 / count), size=min(step, draws - start))
        parts.append(picks.astype(np.float64) @ flat)
    return np.concatenate(parts).reshape(draws, *sums.shape[1:])


class Resampled:
    """Cluster sums `[C, ...]` with their bootstrap draws, made once and shared by every figure of a slice."""

    def __init__(self, sums: Floats, draws: int = DRAWS, seed: int = 0) -> None:
        self.sums = sums
        self.total = sums.sum(axis=0, keepdims=True)
        self.drawn = resample(sums, draws, seed) if len(sums) > 1 else None

    def estimate(self, statistic: Statistic, confidence: float = 0.95) -> Estimate:
        """`statistic` of the total, with its percentile interval.

        statistic maps [D, ...] totals to [D] values. Draws in which it has no value (no token of the slice was drawn)
        are left out.
        """
        if not len(self.sums):
            return Estimate(value=None)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            value = float(statistic(self.total)[0])
            if not np.isfinite(value):
                return Estimate(value=None)
            drawn = np.zeros(0) if self.drawn is None else statistic(self.drawn)
        drawn = drawn[np.isfinite(drawn)]
        if not len(drawn):
            return Estimate(value=value)
        tail = (1.0 - confidence) / 2
        low, high = np.quantile(drawn, [tail, 1.0 - tail])
        return Estimate(value=value, low=float(low), high=float(high))


def estimate(
    sums: Floats, statistic: Statistic, *, draws: int = DRAWS, seed: int = 0, confidence: float = 0.95
) -> Estimate:
    """One figure from cluster sums float64 [C, ...]; see `Resampled.estimate`."""
    return Resampled(sums, draws, seed).estimate(statistic, confidence)


def equivalence(
    sums: Floats,
    statistic: Statistic,
    *,
    quantity: str,
    margin: float,
    confidence: float = 0.90,
    draws: int = DRAWS,
    seed: int = 0,
) -> Equivalence:
    """Two one-sided tests by interval: "no drift" holds when the 90% interval lies inside +-margin (5% level)."""
    found = estimate(sums, statistic, draws=draws, seed=seed, confidence=confidence)
    if found.low is None or found.high is None:
        verdict = "undecided"
    elif -margin < found.low and found.high < margin:
        verdict = "equivalent"
    elif found.low > 0 or found.high < 0:
        verdict = "different"
    else:
        verdict = "undecided"
    return Equivalence(
        quantity=quantity, margin=margin, confidence=confidence, low=found.low, high=found.high, verdict=verdict
    )
