"""Texts to token windows: every token but the first is scored exactly once, whatever window, stride, batch or padding.

A window holds the prefix, some context tokens that an earlier window already scored, and new tokens. Windows after the
first keep at least one true context token, so no token is ever guessed from the prefix alone in the middle of a text.
With a prefix the first token of a text is scored too (the prefix is what it follows); the prefix itself never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from glm5_quant.eval.documents import Encoded
from glm5_quant.model.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Window:
    """Token ids (prefix first), the index of the first scored one, and where that one stands in its document."""

    ids: NDArray[np.int64]
    first_scored: int
    position: int
    index: int
    encoded: Encoded
    critical: NDArray[np.bool_] | None = None

    @property
    def scored(self) -> int:
        """How many tokens this window scores."""
        return len(self.ids) - self.first_scored


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Padded windows: ids int64 [B, T], mask int64 [B, T] (1 = real), offsets of the first real token per row."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    offsets: tuple[int, ...]
    windows: tuple[Window, ...]

    def rows_and_targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch row and position of each scored token; its logits stand at position - 1. Both int64 [S]."""
        rows, positions = [], []
        for row, (offset, window) in enumerate(zip(self.offsets, self.windows, strict=True)):
            positions.append(torch.arange(offset + window.first_scored, offset + len(window.ids)))
            rows.append(torch.full_like(positions[-1], row))
        return torch.cat(rows), torch.cat(positions)


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Window length and stride in tokens, checked against the prefix and the model's positions."""

    window: int
    stride: int
    prefix: tuple[int, ...]

    @property
    def context(self) -> int:
        """True tokens before the first scored one in every window but the first."""
        return self.window - len(self.prefix) - self.stride


def plan_windows(window: int, stride: int | None, prefix: tuple[int, ...], max_positions: int | None) -> WindowPlan:
    """Check window and stride; stride None means the largest that keeps one token of context.

    Raises UserError when the window has no room, the stride leaves no context, or the window is longer than the model's
    `max_position_embeddings` (positions past it have never been trained).
    """
    room = window - len(prefix)
    if room < 2:
        raise UserError("the window has no room for text", item="window", found=window, expected=len(prefix) + 2)
    chosen = room - 1 if stride is None else stride
    if not 1 <= chosen <= room - 1:
        raise UserError("the stride leaves no context", item="stride", found=stride, expected=f"1 to {room - 1}")
    if max_positions is not None and window > max_positions:
        raise UserError(
            "the window is longer than the model's max_position_embeddings",
            item="window",
            found=window,
            expected=f"at most {max_positions}",
        )
    return WindowPlan(window=window, stride=chosen, prefix=prefix)


def cut(encoded: Iterable[Encoded], plan: WindowPlan, limit: int | None = None) -> Iterator[Window]:
    """Windows of all documents in order, at most `limit`; a document that is not needed is not asked for."""
    if limit == 0:
        return
    made = 0
    for document in encoded:
        for first, start, end in _spans(len(document.ids), plan):
            yield _window(document, plan, made, first, start, end)
            made += 1
            if made == limit:
                return


def _spans(length: int, plan: WindowPlan) -> Iterator[tuple[int, int, int]]:
    """(first scored, start of input, end of input) in document positions."""
    end = min(length, plan.window - len(plan.prefix))
    yield (0 if plan.prefix else 1), 0, end
    while end < length:
        first, end = end, min(length, end + plan.stride)
        yield first, first - plan.context, end


def _window(document: Encoded, plan: WindowPlan, index: int, first: int, start: int, end: int) -> Window:
    head = np.asarray(plan.prefix, dtype=np.int64)
    critical = None
    if document.critical is not None:
        critical = np.concatenate([np.zeros(len(head), dtype=np.bool_), document.critical[start:end]])
    return Window(
        ids=np.concatenate([head, document.ids[start:end]]),
        first_scored=len(head) + first - start,
        position=first,
        index=index,
        encoded=document,
        critical=critical,
    )


def batches(windows: Iterable[Window], batch_size: int, padding_side: str = "right") -> Iterator[Batch]:
    """Padded batches. Windows of like length meet in one batch, within a bounded look-ahead of 8 batches."""
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side must be 'left' or 'right', found {padding_side!r}")
    waiting: list[Window] = []
    for window in windows:
        waiting.append(window)
        if len(waiting) == 8 * batch_size:
            yield from _flush(waiting, batch_size, padding_side)
            waiting = []
    yield from _flush(waiting, batch_size, padding_side)


def _flush(waiting: list[Window], batch_size: int, padding_side: str) -> Iterator[Batch]:
    ordered = sorted(waiting, key=lambda window: (-len(window.ids), window.index))
    for start in range(0, len(ordered), batch_size):
        yield _pad(ordered[start : start + batch_size], padding_side)


def _pad(windows: list[Window], side: str) -> Batch:
    width = max(len(window.ids) for window in windows)
    ids = torch.zeros(len(windows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    offsets = []
    for row, window in enumerate(windows):
        offset = width - len(window.ids) if side == "left" else 0
        span = slice(offset, offset + len(window.ids))
        ids[row, span] = torch.from_numpy(window.ids)
        mask[row, span] = 1
        offsets.append(offset)
    whole = bool(mask.all())
    return Batch(ids=ids, mask=None if whole else mask, offsets=tuple(offsets), windows=tuple(windows))
