"""Whole numbers in text, and how one number was misread as another.

A number is digits with separators and a point, an optional sign, an optional word that multiplies it (万, million),
and an optional percent sign. Full-width digits and signs count as their plain forms; numbers in words do not count.
The kinds of misreading follow from value and digits alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import SequenceMatcher

TIMES = {"万亿": 12, "亿": 8, "万": 4, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten of the words that multiply a number."""

# A minus behind a percentage or a counted unit joins two numbers ("10%-20%", "5元-10元") and is no sign.
_NO_RANGE = r"(?<!%)(?<!\d[年月日号时点分秒天周岁度元块角万亿千百个人次倍])"
NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_])(?P<sign>{_NO_RANGE}[-−](?=[$€£¥￥]?\.?\d)|(?<!正)负(?=\d))?[$€£¥]?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\d.])\.\d+)"
    rf"(?:\s?(?P<times>{'|'.join(TIMES)})(?![A-Za-z]))?"
    r"(?P<percent>\s?%|\s?percent\b|\s?per cent\b)?",
    re.IGNORECASE,
)
# "RMB12.5" is an amount, while "A7" is a name.
CURRENCY = re.compile(r"(?<![A-Za-z])(USD|EUR|GBP|JPY|CNY|RMB|HKD)(?=\d)")
# Raised digits and fractions are numbers of their own: 10⁶ is not 106.
RAISED = re.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u2070\u2074-\u2079\u2080-\u2089\u00bc-\u00be\u2150-\u215e])")

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
    """A number as written: value, digits without point, separators or multiplying word, and whether it is a
    percentage."""

    value: Decimal
    digits: str
    percent: bool

    @property
    def key(self) -> tuple[Decimal, bool]:
        """What has to be equal for two numbers to be the same."""
        return self.value, self.percent

    @property
    def significant(self) -> str:
        """Digits without zeros at either end."""
        return self.digits.strip("0")

    @property
    def is_whole(self) -> bool:
        """Whether the value has no fraction."""
        return self.value == self.value.to_integral_value()


def find_numbers(text: str) -> list[Number]:
    """All numbers of a text in order."""
    plain = unicodedata.normalize("NFKC", RAISED.sub(" ", text))
    plain = CURRENCY.sub(r"\1 ", plain)
    # 百分之12.5 is 12.5%: bring it into the one form the pattern knows.
    plain = re.sub(r"百分之(\d+(?:\.\d+)?)", r"\1%", plain)
    found = []
    for match in NUMBER.finditer(plain):
        digits = match["digits"].replace(",", "")
        power = TIMES[match["times"].lower()] if match["times"] else 0
        # Made from text, since arithmetic on decimals rounds to 28 digits.
        value = Decimal(f"{'-' if match['sign'] else ''}{digits}e{power}")
        found.append(Number(value=value, digits=digits.replace(".", ""), percent=match["percent"] is not None))
    return found


def misread(wanted: Number, got: Number) -> str:
    """EQUAL, or the kind of misreading. Percent before value: "12.5%" read as "12.5" lost its sign."""
    if wanted.value == got.value:
        if wanted.percent == got.percent:
            return EQUAL
        return "percent sign lost" if wanted.percent else "percent sign added"
    if wanted.value == got.value.copy_negate():
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
