"""Whole numbers in text, and how one number was misread as another.

A number is digits with separators and a point, an optional sign, and an optional percent sign. Full-width digits and
signs count as their plain forms. The kinds of misreading follow from value and digits alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import SequenceMatcher

NUMBER = re.compile(
    r"(?<![A-Za-z0-9_])(?P<sign>[-−](?=[$€£¥￥]?\d))?[$€£¥]?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?)"
    r"(?P<percent>\s?%|\s?percent\b|\s?per cent\b)?"
)

EQUAL = "equal"
KINDS = (
    "digit changed",
    "digit dropped",
    "digit added",
    "point shifted",
    "percent sign lost",
    "percent sign added",
    "sign changed",
    "other number",
    "missing",
    "extra",
)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number as written: value, digits without point or separators, and whether it is a percentage."""

    value: Decimal
    digits: str
    percent: bool

    @property
    def key(self) -> tuple[Decimal, bool]:
        """What has to be equal for two numbers to be the same."""
        return self.value.normalize(), self.percent

    @property
    def significant(self) -> tuple[int, ...]:
        """Digits without zeros at either end."""
        return self.value.normalize().as_tuple().digits

    @property
    def is_whole(self) -> bool:
        """Whether the value has no fraction."""
        return self.value == self.value.to_integral_value()


def find_numbers(text: str) -> list[Number]:
    """All numbers of a text in order."""
    plain = unicodedata.normalize("NFKC", text)
    # 百分之12.5 is 12.5%: bring it into the one form the pattern knows.
    plain = re.sub(r"百分之(\d+(?:\.\d+)?)", r"\1%", plain)
    found = []
    for match in NUMBER.finditer(plain):
        digits = match["digits"].replace(",", "")
        value = Decimal(digits) * (-1 if match["sign"] else 1)
        found.append(Number(value=value, digits=digits.replace(".", ""), percent=match["percent"] is not None))
    return found


def misread(wanted: Number, got: Number) -> str:
    """EQUAL, or the kind of misreading. Percent before value: "12.5%" read as "12.5" lost its sign."""
    if wanted.value == got.value:
        if wanted.percent == got.percent:
            return EQUAL
        return "percent sign lost" if wanted.percent else "percent sign added"
    if wanted.value == -got.value:
        return "sign changed"
    one, other = wanted.digits.lstrip("0"), got.digits.lstrip("0")
    if one == other or (wanted.significant == got.significant and not (wanted.is_whole and got.is_whole)):
        return "point shifted"
    if len(wanted.digits) == len(got.digits):
        few = _differing(wanted.digits, got.digits) * 2 <= len(wanted.digits) + 1
        return "digit changed" if few else "other number"
    if len(other) < len(one) and _within(other, one):
        return "digit dropped"
    if len(other) > len(one) and _within(one, other):
        return "digit added"
    return "other number"


def _differing(one: str, other: str) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def _within(short: str, long: str) -> bool:
    rest = iter(long)
    return len(short) > 0 and all(digit in rest for digit in short)


def compare_numbers(wanted: Sequence[Number], got: Sequence[Number]) -> dict[str, int]:
    """How often each kind occurs when `got` is aligned with `wanted`; EQUAL counts the right ones."""
    counts: dict[str, int] = {}

    def count(kind: str, times: int = 1) -> None:
        if times:
            counts[kind] = counts.get(kind, 0) + times

    keys = [[number.key for number in numbers] for numbers in (wanted, got)]
    matcher = SequenceMatcher(a=keys[0], b=keys[1], autojunk=False)
    for tag, start, end, low, high in matcher.get_opcodes():
        if tag == "equal":
            count(EQUAL, end - start)
            continue
        for one, other in zip(wanted[start:end], got[low:high], strict=False):
            count(misread(one, other))
        count("missing", max(0, (end - start) - (high - low)))
        count("extra", max(0, (high - low) - (end - start)))
    return counts


def same_numbers(wanted: Sequence[Number], got: Sequence[Number]) -> bool:
    """Whether both hold the same numbers in the same order."""
    return [number.key for number in wanted] == [number.key for number in got]
