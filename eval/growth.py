"""From sums by turn to drift figures: ratio at chosen turns, growth, and the slope of the logarithm of the ratio.

All figures are paired and resampled by dialogue. Turns count from 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from glm5_quant.eval.drift import Drift
from glm5_quant.eval.result import DialogueResult, DialogueSums, TurnPoint
from glm5_quant.eval.statistics import Estimate, Resampled, Statistic, equivalence
from glm5_quant.eval.summary import nll_difference, perplexity_ratio, summarize
from glm5_quant.eval.tally import COLUMN, FIELDS

Floats = NDArray[np.float64]


def marks(turns: int) -> tuple[int, ...]:
    """The turns a report names: first, a quarter, half, last (1, 50, 100, 200 for 200)."""
    return tuple(sorted({1, max(1, turns // 4), max(1, turns // 2), turns}))


def band(turn: int, turns: int) -> slice:
    """Turns averaged for the figure "at turn t": the twentieth of the dialogue that ends there (the first for turn
    1)."""
    width = max(1, turns // 20)
    end = max(turn, width)
    return slice(end - width, end)


def tenths(turns: int) -> tuple[slice, slice]:
    """The first and the last tenth of the turns."""
    width = max(1, turns // 10)
    return slice(0, width), slice(turns - width, turns)


def _mean(totals: Floats, name: str, turns: slice) -> Floats:
    part = totals[:, turns].sum(axis=1)
    found: Floats = part[:, COLUMN[name]] / part[:, COLUMN["tokens"]]
    return found


def ratio_in(turns: slice) -> Statistic:
    """Statistic of [D, N, 8] totals: perplexity ratio over some turns."""
    return lambda totals: perplexity_ratio(totals[:, turns].sum(axis=1))


def growth_of(name: str, turns: int) -> Statistic:
    """Statistic: perplexity of the last tenth over that of the first tenth, minus 1."""
    first, last = tenths(turns)
    return lambda totals: np.asarray(np.exp(_mean(totals, name, last) - _mean(totals, name, first)) - 1.0)


def relative_growth(turns: int) -> Statistic:
    """Statistic: how much more the export's perplexity grew than the source's on the same words.

    (ratio to the source in the last tenth) / (ratio in the first tenth) - 1: 0 means no drift, whatever the text does.
    """
    first, last = tenths(turns)
    return lambda totals: np.asarray(
        np.exp(nll_difference(totals[:, last].sum(axis=1)) - nll_difference(totals[:, first].sum(axis=1))) - 1.0
    )


def slope(totals: Floats) -> Floats:
    """Statistic: least-squares slope of log(perplexity ratio) against the turn, per 100 turns, weighted by tokens."""
    tokens = totals[..., COLUMN["tokens"]]
    gap = totals[..., COLUMN["nll"]] - totals[..., COLUMN["nll_source"]]
    turn = np.arange(totals.shape[1], dtype=np.float64)
    weight = tokens / tokens.sum(axis=1, keepdims=True)
    centred = turn - (weight * turn).sum(axis=1, keepdims=True)
    mean_gap = gap / tokens.sum(axis=1, keepdims=True)
    found: Floats = 100 * (centred * mean_gap).sum(axis=1) / (weight * centred**2).sum(axis=1)
    return found


def summarize_drift(drift: Drift, draws: int, seed: int, margin: float) -> DialogueResult:
    """All figures of one model over its dialogues (by_turn [D, N, 8])."""
    sums = np.stack(drift.by_turn)
    turns = drift.turns
    drawn = Resampled(sums, draws, seed)
    whole = sums.sum(axis=1)
    quantity = "mean NLL difference over answers, nats per token"

    def over_turns(statistic: Statistic) -> Estimate:
        """A single turn has no growth: 0 would look like the absence of drift."""
        return drawn.estimate(statistic) if turns > 1 else Estimate(value=None)

    return DialogueResult(
        turns=turns,
        dialogues=len(sums),
        points=tuple(_point(drift, turn, drawn) for turn in range(turns)),
        ratio_at={str(turn): drawn.estimate(ratio_in(band(turn, turns))) for turn in marks(turns)},
        source_growth=over_turns(growth_of("nll_source", turns)),
        growth=over_turns(growth_of("nll", turns)),
        relative_growth=over_turns(relative_growth(turns)),
        slope_per_100_turns=over_turns(slope),
        slices=summarize(drift.tally, "document", draws, seed),
        equivalence=equivalence(whole, nll_difference, quantity=quantity, margin=margin, draws=draws, seed=seed),
        sums=_sums(sums, np.stack(drift.numeric_by_turn)),
    )


def _sums(every: Floats, numeric: Floats) -> DialogueSums:
    first, last = tenths(every.shape[1])

    def rows(part: Floats) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(row) for row in part.sum(axis=1).tolist())

    return DialogueSums(
        fields=FIELDS,
        first=rows(every[:, first]),
        last=rows(every[:, last]),
        whole=rows(every),
        numeric=rows(numeric),
    )


def _point(drift: Drift, turn: int, drawn: Resampled) -> TurnPoint:
    total = drawn.total[0, turn]
    numeric = np.stack(drift.numeric_by_turn)[:, turn].sum(axis=0)
    tokens = total[COLUMN["tokens"]]

    def mean(name: str) -> float | None:
        return float(total[COLUMN[name]] / tokens) if tokens else None

    numbers = numeric[COLUMN["tokens"]]
    return TurnPoint(
        turn=turn + 1,
        tokens=int(tokens),
        source_nll=mean("nll_source"),
        nll=mean("nll"),
        kl=mean("kl"),
        flips=mean("flips"),
        numeric_flips=float(numeric[COLUMN["flips"]] / numbers) if numbers else None,
        ratio=drawn.estimate(ratio_in(slice(turn, turn + 1))),
        numeric_tokens=int(numbers),
    )
