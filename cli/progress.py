"""Bars for long work: one bar on a terminal, plain lines where stderr goes to a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from glm5_quant.cli.terminal import human_bytes, human_time, memory_bytes, say

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_EVERY_S = 10.0


class _Bar:
    """What all share: a tqdm bar made when first needed and closed at the end, and whether there is a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._tty = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _move(self, done: int, total: int | None, **settings: Any) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, file=sys.stderr, dynamic_ncols=True, **settings)
        self._bar.update(done - self._bar.n)


class LayerProgress(_Bar):
    """A calibration: layers done, time left, memory, worst relative error so far.

    Time left is reckoned from the layers of this run alone: an earlier run may have had another machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self._worst = 0.0
        self._seconds: list[float] = []

    def layer_done(self, layer: int, layers: int, *, seconds: float, error: float | None, where: str = "") -> None:
        """Layer number `layer` (from 0) of `layers` is on disk; `error` is the worst relative error in it."""
        self._seconds.append(seconds)
        self._worst = max(self._worst, error or 0.0)
        left = human_time(sum(self._seconds) / len(self._seconds) * (layers - layer - 1))
        memory = human_bytes(memory_bytes())
        if self._tty:
            form = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} layers{postfix}"
            self._move(layer, layers, initial=layer, mininterval=0, bar_format=form)
            assert self._bar is not None
            self._bar.set_postfix_str(f"{left} left, {memory}, worst error {self._worst:.4f}", refresh=False)
            self._bar.update(1)
        else:
            shown = "" if error is None else f"  worst error {error:.4f}{' ' + where if where else ''}"
            say(f"layer {layer + 1}/{layers}  {seconds:.1f} s  left {left}  memory {memory}{shown}")


class ByteProgress(_Bar):
    """An export: bytes written, or read back. Nothing in a log file."""

    def advance(self, done: int, total: int, name: str) -> None:
        """`done` of `total` bytes are through; `name` is the file in work."""
        if self._tty:
            self._move(done, total, unit="B", unit_scale=True, unit_divisor=1024, leave=False)
            assert self._bar is not None
            self._bar.set_description_str(name, refresh=False)


class StageProgress(_Bar):
    """An evaluation: one bar a stage; in a log file a line when a stage begins and then every ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._stage = ""
        self._said = 0.0

    def advance(self, stage: str, done: int, total: int | None) -> None:
        """`done` of `total` steps of `stage`; `total` is None where nobody knows it beforehand."""
        changed = stage != self._stage
        self._stage = stage
        if self._tty:
            if changed:
                self._close()
            self._move(done, total, desc=stage, unit=" step", leave=False)
        elif changed or time.monotonic() - self._said >= _LINE_EVERY_S or done == total:
            self._said = time.monotonic()
            say(f"{stage}  {done}{'' if total is None else f' of {total}'}")
