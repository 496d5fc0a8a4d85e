"""From sums to figures: slices with intervals, percentiles, and the verdict on drift."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm5_quant.eval.result import SliceResult
from glm5_quant.eval.statistics import Equivalence, Resampled, Statistic, equivalence
from glm5_quant.eval.tally import COLUMN, Tally

Floats = NDArray[np.float64]
MIN_DOCUMENTS = 8


def share(top: str, bottom: str = "tokens") -> Statistic:
    """Statistic: total of one field over the total of another."""
    return lambda totals: np.asarray(totals[..., COLUMN[top]] / totals[..., COLUMN[bottom]])


def perplexity(name: str) -> Statistic:
    """Statistic: exp of the token-weighted mean negative log-likelihood."""
    return lambda totals: np.asarray(np.exp(share(name)(totals)))


def nll_difference(totals: Floats) -> Floats:
    """Statistic: mean NLL of the export minus the source's, nats per token."""
    found: Floats = (totals[..., COLUMN["nll"]] - totals[..., COLUMN["nll_source"]]) / totals[..., COLUMN["tokens"]]
    return found


def perplexity_ratio(totals: Floats) -> Floats:
    """Statistic: perplexity of the export over the source's."""
    return np.asarray(np.exp(nll_difference(totals)))


def cluster_unit(tally: Tally) -> str:
    """Documents are resampled where there are at least 8; fewer say too little, so windows are."""
    return "document" if tally.documents() >= MIN_DOCUMENTS else "window"


def summarize_slice(name: str, sums: Floats, draws: int, seed: int) -> SliceResult:
    """All figures of one slice from its cluster sums [C, 8]."""
    figure = Resampled(sums, draws, seed).estimate
    return SliceResult(
        name=name,
        tokens=int(sums[:, COLUMN["tokens"]].sum()) if len(sums) else 0,
        clusters=len(sums),
        source_perplexity=figure(perplexity("nll_source")),
        perplexity=figure(perplexity("nll")),
        perplexity_ratio=figure(perplexity_ratio),
        kl=figure(share("kl")),
        flips=figure(share("flips")),
        source_accuracy=figure(share("right_source")),
        accuracy=figure(share("right")),
        lost=figure(share("lost")),
    )


def summarize(tally: Tally, unit: str, draws: int, seed: int) -> tuple[SliceResult, ...]:
    """Every slice of a tally, "all" first, then numeric and critical, then the rest as they were met."""
    first = [name for name in ("all", "numeric", "critical") if name in tally.sums]
    names = first + sorted((name for name in tally.sums if name not in first), key=_slice_order)
    return tuple(summarize_slice(name, tally.clusters(name, unit), draws, seed) for name in names)


def _slice_order(name: str) -> tuple[str, int, str]:
    group, _, rest = name.partition(":")
    digits = rest.split("-")[0].rstrip("+")
    return group, int(digits) if digits.isdigit() else 0, rest


def percentiles(tally: Tally) -> dict[str, dict[str, float]]:
    """KL at the 50th to 99.9th percentile and at its largest, for all and for numeric tokens."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
    return {
        name: {label: spread.percentile(value) for label, value in shares.items()} | {"max": spread.largest}
        for name, spread in tally.spread.items()
    }


def drift_verdict(tally: Tally, unit: str, margin: float, draws: int, seed: int) -> Equivalence:
    """Is the export's NLL within +-margin nats per token of the source's?"""
    sums = tally.clusters("all", unit)
    quantity = "mean NLL difference, nats per token"
    return equivalence(sums, nll_difference, quantity=quantity, margin=margin, draws=draws, seed=seed)
