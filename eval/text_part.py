"""The text part of an evaluation: windows, one pass of every model, figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from glm5_quant.eval.documents import Document, Encoder, as_documents
from glm5_quant.eval.routing import RoutingDrift, RoutingWatch
from glm5_quant.eval.score import Pass, live_source, score
from glm5_quant.eval.session import Session
from glm5_quant.eval.stress import stress_documents
from glm5_quant.eval.windows import Batch, Window, WindowPlan, batches, cut, plan_windows
from glm5_quant.model.errors import UserError

HEAD = 1000
"""Characters (or ids) of a text that are looked at before any model is loaded."""


@dataclass
class TextPart:
    """Windows to read and what was found: the source's pass, and the exports' by index. `empty_rows`: rows that the
    reader of the data passed over as empty, which are not among `rows`. `seen`, `empty`: texts that a whole pass read,
    stress shapes not counted, and those of them without a token to score."""

    session: Session
    rows: list[Any]
    plan: WindowPlan
    encoder: Encoder
    empty_rows: int = 0
    seen: int = 0
    empty: int = 0
    base: Pass | None = None
    passes: dict[int, Pass] = field(default_factory=dict)
    routing: dict[int, RoutingDrift] = field(default_factory=dict)

    def documents(self) -> Iterator[Document]:
        """The texts, and the stress shapes made of them where wanted."""
        yield from as_documents(self.rows, self.session.tokenizer)
        if self.session.config.stress:
            yield from stress_documents(as_documents(self.rows, self.session.tokenizer), self.session.config.seed)

    @property
    def passed_over(self) -> int:
        """`empty_rows` where the whole text was read; of a part of it nobody knows how many lay in there."""
        return self.empty_rows if self.seen >= len(self.rows) else 0

    def batches(self) -> Iterator[Batch]:
        """Batches from the start; the same ones every time."""
        return self._batches(self._windows())

    def _windows(self) -> Iterator[Window]:
        self.encoder.empty = self.encoder.seen = self.encoder.shapes = 0
        return cut(self.encoder(self.documents()), self.plan, self.session.config.num_windows)

    def _batches(self, windows: Iterable[Window]) -> Iterator[Batch]:
        return batches(windows, self.session.config.batch_size, self.session.config.padding_side)

    def run(self, group: list[int]) -> None:
        """Read all windows with the source (or its kept answers) and a group of exports."""
        session, done = self.session, 0
        windows: Iterable[Window] = self._windows()
        total = None
        if session.config.num_windows is not None:
            # A text may give fewer than were asked for. Without a limit it is not cut before it is read.
            windows = list(windows)
            total = len(windows)

        def seen(count: int) -> None:
            nonlocal done
            done += count
            session.progress("windows", done, total)

        reader = live_source(session.source, session.kept("windows"))
        exports = [session.export(index) for index in group]
        watch = RoutingWatch(session.source.model if session.source else None, [export.model for export in exports])
        try:
            self.base, passes = score(reader, exports, self._batches(windows), session.marker, seen, watch)
        finally:
            watch.close()
        self.seen, self.empty = self.encoder.seen - self.encoder.shapes, self.encoder.empty
        self.routing.update(zip(group, watch.drifts, strict=True))
        self.passes.update(zip(group, passes, strict=True))


def text_part(session: Session, rows: list[Any], empty_rows: int = 0) -> TextPart:
    """Plan the windows of a text; UserError when they cannot be made, or when there is nothing to score."""
    config = session.config
    plan = plan_windows(config.window, config.stride, session.prefix.ids, session.max_positions)
    encoder = Encoder(session.tokenizer, session.prefix, session.words, session.vocab_size)
    part = TextPart(session, rows, plan, encoder, empty_rows)
    # The heads of texts nearly always tell, and a long text takes long to encode.
    heads = (replace(document, text=document.text[:HEAD]) for document in part.documents())
    if next(encoder(heads), None) is None and next(part.batches(), None) is None:
        raise UserError(
            "nothing to score: every text is empty or a single token",
            item="texts",
            found=f"{encoder.empty} of {encoder.seen} skipped",
        )
    return part
