"""One pass over the text: the source on a batch, each export on the same batch, compare, drop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from glm5_quant.eval.divergence import SourceScores, TokenScores, compare, score_source
from glm5_quant.eval.result import Invalid
from glm5_quant.eval.routing import RoutingWatch
from glm5_quant.eval.runner import Runner
from glm5_quant.eval.source_cache import SourceCache, TopK, compare_top_k
from glm5_quant.eval.tally import Tally, position_band, token_columns
from glm5_quant.eval.windows import Batch, Window

POSITION_BANDS = (0, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
Scores = SourceScores | TopK


@dataclass
class Pass:
    """What a pass over the text found for one model."""

    name: str
    tally: Tally = field(default_factory=Tally)
    invalid: Invalid | None = None


class Marker:
    """Which slices a scored token belongs to."""

    def __init__(self, numeric: NDArray[np.bool_] | None, bands: Sequence[int] = POSITION_BANDS) -> None:
        self.numeric, self.bands = numeric, bands

    def is_numeric(self, targets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [S]: the token to be predicted is a numeric one (ids past the table are not)."""
        if self.numeric is None:
            return np.zeros(len(targets), dtype=np.bool_)
        inside = targets < len(self.numeric)
        return inside & self.numeric[np.where(inside, targets, 0)]

    def slices(self, window: Window, targets: NDArray[np.int64]) -> dict[str, NDArray[np.bool_] | None]:
        """Slice masks of the scored tokens of one window; position counts tokens the model has before it."""
        numeric = self.is_numeric(targets)
        found: dict[str, NDArray[np.bool_] | None] = {"all": None, "numeric": numeric}
        if window.critical is not None:
            found["critical"] = window.critical[window.first_scored :]
        document = window.encoded.document
        for group, value in (("file", document.file), ("language", document.language), ("stress", document.kind)):
            if value:
                found[f"{group}:{value}"] = None
        positions = np.arange(window.first_scored, len(window.ids))
        for name, mask in position_band(self.bands, positions).items():
            found[name] = mask
            found[f"numeric {name}"] = mask & numeric
        return found


def score(
    source: Callable[[int, Batch], Scores],
    exports: Sequence[Runner],
    batches: Iterable[Batch],
    marker: Marker,
    seen: Callable[[int], None] = lambda _: None,
    watch: RoutingWatch | None = None,
) -> tuple[Pass, list[Pass]]:
    """Run the source's scorer and every export over all batches. Returns the source's pass and the exports'.

    A model whose figures are not finite is marked invalid at its first bad token and not run again; a broken source
    ends the pass. `seen` is told the number of windows after each batch; `watch` sees what the routers chose.
    """
    base, passes = Pass("source"), [Pass(export.name) for export in exports]
    for number, batch in enumerate(batches):
        rows, positions = batch.rows_and_targets()
        reference = source(number, batch)
        if watch is not None:
            watch.source_ran()
        if not np.isfinite(reference.nll).all():
            base.invalid = _invalid(base.name, batch, rows, int(np.argmin(np.isfinite(reference.nll))))
            break
        _add(base, batch, against_itself(reference), rows, marker)
        for index, (export, outcome) in enumerate(zip(exports, passes, strict=True)):
            if outcome.invalid is None:
                scores = compare_with(reference, export.logits(batch.ids, batch.mask), rows, positions)
                if watch is not None:
                    watch.export_ran(index, batch.mask)
                bad = scores.first_bad()
                if bad is None:
                    _add(outcome, batch, scores, rows, marker)
                else:
                    outcome.invalid = _invalid(outcome.name, batch, rows, bad)
        seen(len(batch.windows))
        # The next batch's probabilities should not have to share memory with this one's.
        del reference
    return base, passes


def live_source(runner: Runner | None, cache: SourceCache | None) -> Callable[[int, Batch], Scores]:
    """Score the source by running it; with a cache, keep its answers and read those already kept."""

    def scored(number: int, batch: Batch) -> Scores:
        if cache is not None and cache.has(number):
            return cache.read(number, batch.ids)
        if runner is None:
            raise ValueError(f"batch {number} was not kept, and the source is gone")
        rows, positions = batch.rows_and_targets()
        scores = score_source(runner.logits(batch.ids, batch.mask), batch.ids[rows, positions], rows, positions)
        return scores if cache is None else cache.write(number, batch.ids, scores)

    return scored


def compare_with(reference: Scores, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> TokenScores:
    if isinstance(reference, TopK):
        return compare_top_k(reference, logits, rows, positions)
    return compare(reference, logits, rows, positions)


def against_itself(reference: Scores) -> TokenScores:
    """The source against itself, without running anything: same NLL, no divergence."""
    top1 = reference.top1 if isinstance(reference, SourceScores) else reference.ids[:, 0].long().numpy()
    zeros = np.zeros(len(reference.nll))
    return TokenScores(
        targets=reference.targets.numpy(),
        nll_source=reference.nll,
        nll=reference.nll,
        kl=zeros,
        top1_source=top1,
        top1=top1,
    )


def _windows_of(batch: Batch, rows: torch.Tensor) -> Iterator[tuple[Window, NDArray[np.bool_]]]:
    row_numbers = rows.numpy()
    for row, window in enumerate(batch.windows):
        yield window, row_numbers == row


def _add(outcome: Pass, batch: Batch, scores: TokenScores, rows: torch.Tensor, marker: Marker) -> None:
    columns = token_columns(scores)
    for window, mine in _windows_of(batch, rows):
        slices = marker.slices(window, scores.targets[mine])
        outcome.tally.add((window.encoded.index, window.index), columns[mine], slices)


def _invalid(name: str, batch: Batch, rows: torch.Tensor, bad: int) -> Invalid:
    row = int(rows[bad])
    window = batch.windows[row]
    inside = bad - int((rows < row).sum())
    return Invalid(
        model=name,
        document=window.encoded.index,
        file=window.encoded.document.file,
        position=window.position + inside,
        reason="the logits give a figure that is not finite",
    )
