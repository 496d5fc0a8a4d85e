"""Tables of strings, and how figures are written in them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from glm5_quant.eval.statistics import Estimate

MISSING = "-"
INTERVALS = "± is the wider side of a 95% {kind}, [low, high] the interval itself where one side is twice the other"
"""How `with_interval` writes intervals, for the reader."""
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Line breaks, control characters, and halves of characters (a file name that is not UTF-8)."""


def one_line(text: str) -> str:
    """A text that cannot leave its line or steer a terminal: what is unprintable in it becomes U+FFFD."""
    return UNPRINTABLE.sub("\ufffd", text)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A titled table of strings; the first column is the label."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def number(value: float | None, percent: bool = False) -> str:
    """Four significant digits, or a percentage with as many as it needs; "-" for what is missing."""
    if value is None or not math.isfinite(value):
        return MISSING
    if percent:
        return f"{100 * value:.2f}%" if abs(value) < 0.1 else f"{100 * value:.1f}%"
    if value == 0:
        return "0"
    return f"{value:.3e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4g}"


def with_interval(estimate: Estimate | None, percent: bool = False) -> str:
    """`value ± wider side of the 95% interval`, the side in as many digits as matter; no ± where it is 0.

    `value [low, high]` where one side is more than twice the other: 1297 ± 143687 would be no perplexity at all.
    """
    if estimate is None or estimate.value is None:
        return MISSING
    value = number(estimate.value, percent)
    half = estimate.half_width
    if not half or estimate.low is None or estimate.high is None:
        return value
    if half > 2 * min(estimate.high - estimate.value, estimate.value - estimate.low):
        return f"{value} [{number(estimate.low, percent)}, {number(estimate.high, percent)}]"
    half *= 100 if percent else 1
    width = f"{half:.0f}" if half >= 10 else f"{half:.2g}"
    return f"{value} ± {width}{'%' if percent else ''}"
