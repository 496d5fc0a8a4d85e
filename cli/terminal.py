"""What a person sees: data on stdout, talk on stderr, tables, the next command to type."""

from __future__ import annotations

import json
import math
import resource
import shlex
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from glm5_quant.model.errors import human_bytes as human_bytes


def say(message: str) -> None:
    """Talk to the person at the terminal; never part of the data on stdout."""
    print(message, file=sys.stderr, flush=True)


def say_next(command: str, argument: str | Path | None = None, **options: Any) -> None:
    """Name the command to type next, with the options that differ from their defaults.

    None and False leave an option out, True gives it without a value, a list gives it several times.
    """
    words = ["glm5-quant", command] + ([] if argument is None else [str(argument)])
    for name, value in options.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if one is not None and one is not False:
                words += [f"--{name.replace('_', '-')}"] + ([] if one is True else [str(one)])
    say(f"Next: {shlex.join(words)}")


def warn(messages: Iterable[str]) -> None:
    for message in messages:
        say(f"warning: {message}")


def human_time(seconds: float) -> str:
    """`0:41`, `12:05`, `3:02:07`, or `2 d 03:10` for what takes days."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, fold: bool = False) -> str:
    """Aligned columns: text to the left, numbers to the right. Chinese letters count two columns, as terminals do.

    `fold` breaks a long text in the last column into lines that fit the terminal.
    """
    body = [["" if cell is None else str(cell) for cell in row] for row in rows]
    right = [all(_is_number(row[i]) for row in body) and bool(body) for i in range(len(headers))]
    if fold:
        body = _folded(headers, body)
    widths = [max(map(_width, column)) for column in zip(headers, *body, strict=True)]
    lines = [list(headers), ["-" * width for width in widths], *body]
    return "\n".join(
        "  ".join(
            _pad(cell, width, at_right) for cell, width, at_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def errors(error: float | None, plain: float | None) -> tuple[str, str, str]:
    """An error, round-to-nearest's, and their ratio, as text; dashes for None."""
    if error is None or plain is None:
        return "-", "-", "-"
    return f"{error:.4f}", f"{plain:.4f}", f"{error / plain:.0%}" if plain else "-"


def ablation(worths: Iterable[Any]) -> str:
    """What each part of the method was worth on held-out tokens, put to those before it."""
    rows = [
        (w.part, w.matrices, f"{w.of_rtn:.1%}", f"{w.gain:.1%} +- {w.gain_error:.1%}" if number else "")
        for number, w in enumerate(worths)
    ]
    return table(("part", "matrices", "of round-to-nearest", "gain"), rows)


def histogram(bins: Iterable[Any]) -> str:
    """Experts by tokens seen: a line a bin, with a bar."""
    bins = list(bins)
    most = max(one.experts for one in bins)
    rows = [
        (
            f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}",
            one.experts,
            "#" * -(-30 * one.experts // most),
        )
        for one in bins
    ]
    return table(("tokens an expert", "experts", ""), rows)


def facts(*lines: tuple[str, object]) -> str:
    """Names and values below each other; values that are None are left out."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines if value is not None)


def json_text(value: object) -> str:
    """Any result dataclass as JSON. What is not finite becomes null: bare NaN is not JSON."""
    return json.dumps(_plain(value), ensure_ascii=False, indent=2, allow_nan=False)


def memory_bytes() -> int:
    """Resident memory of this process now, or its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _folded(headers: Sequence[str], body: list[list[str]]) -> list[list[str]]:
    before = sum(max(map(_width, column)) + 2 for column in list(zip(headers, *body, strict=True))[:-1])
    width = max(shutil.get_terminal_size((100, 24)).columns - before, 24)
    lines = []
    for *cells, last in body:
        first, *more = textwrap.wrap(last, width, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append([*cells, first])
        lines += [[*("" for _ in cells), line] for line in more]
    return lines


def _is_number(cell: str) -> bool:
    head = cell.split(" ")[0].rstrip("%")
    return head in ("", "-") or head.replace(",", "").replace(".", "").lstrip("+-").replace("e-", "").isdigit()


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _pad(text: str, width: int, right: bool) -> str:
    fill = " " * (width - _width(text))
    return fill + text if right else text + fill


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
