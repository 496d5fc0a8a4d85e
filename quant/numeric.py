"""Numeric tokens: which vocabulary entries write numbers, and which positions of a text deserve more weight.

Dimensions: B sequences, T tokens.
The rule looks at decoded text, never at token names, so it works for any tokenizer: pieces of one to three digits
(DeepSeek, GLM), single digits (Qwen, SmolLM2), free merges such as " 2016" or "00000" (GPT-2, OLMoE). Surrounding white
space is ignored. Text that is cut inside a character (U+FFFD) and special tokens are never numeric. A numeric token
is only a row to protect and a position to weigh: it is never made a special token, since `skip_special_tokens`
would then delete digits from the output.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

CHINESE = "〇零一二两兩三四五六七八九十百千万萬亿億壹贰貳叁參肆伍陆陸柒捌玖拾佰仟"
SEPARATORS = ".,'’:/\\-٫٬．，"
PERCENT = "%％‰٪"
FULL_WIDTH = "０１２３４５６７８９"


@dataclass(frozen=True, kw_only=True)
class NumericRule:
    """Kinds of numeric tokens, each with its switch. On by default: what can hardly be anything but (part of) a number.

    digits       ASCII digits only: "7", "42", " 2016", "00000"
    separated    digits with separators inside or at an end: "1,000", "3.14", "12:", "-5"
    percent      one percent or per-mille sign, alone, after digits, with brackets or sentence marks: "%", "5%", "%)."
    currency     one currency sign, alone or before digits, with up to 3 capitals before: "$", " ($", "US$", "€5"
    full_width   "５", "２０"
    circled      "①", "⑴", "⒈" and other enclosed or dotted numbers
    scripts      digits of other scripts: Arabic-Indic, Persian, Devanagari, Bengali ...
    fractions    superscripts, subscripts and fractions: "²", "₁", "½"
    roman        Roman numeral characters "Ⅱ"; the letters "II" never count, they are letters
    chinese      Chinese numerals "二十", "万". Off: they are ordinary parts of words (一般, 万一) and far too frequent
    mixed        any text with an ASCII digit beside letters: "2nd", "x86". Off: mostly names and code
    marks        one separator alone: ".", ",". Off: in most places they end sentences
    """

    digits: bool = True
    separated: bool = True
    percent: bool = True
    currency: bool = True
    full_width: bool = True
    circled: bool = True
    scripts: bool = True
    fractions: bool = True
    roman: bool = True
    chinese: bool = False
    mixed: bool = False
    marks: bool = False


def kind_of(text: str, rule: NumericRule | None = None) -> str | None:
    """The kind (a field name of NumericRule) of one decoded token, or None when it is not numeric under the rule."""
    rule = rule or NumericRule()
    kind = _kind(text.strip())
    return kind if kind is not None and getattr(rule, kind) else None


def numeric_token_kinds(
    decoded: Mapping[int, str] | Sequence[str], rule: NumericRule | None = None, special_ids: Collection[int] = ()
) -> dict[int, str]:
    """{id: kind} in ascending order of ids. decoded: the text of each id, decoded alone (special tokens included)."""
    items: Iterable[tuple[int, str]] = decoded.items() if isinstance(decoded, Mapping) else enumerate(decoded)
    skipped = frozenset(special_ids)
    found = {i: kind for i, text in items if i not in skipped and (kind := kind_of(text, rule)) is not None}
    return dict(sorted(found.items()))


def numeric_token_ids(
    decoded: Mapping[int, str] | Sequence[str], rule: NumericRule | None = None, special_ids: Collection[int] = ()
) -> list[int]:
    """Sorted ids of the numeric tokens."""
    return list(numeric_token_kinds(decoded, rule, special_ids))


def numeric_positions(ids_BT: Tensor, numeric_ids: Sequence[int]) -> Tensor:
    """bool [B, T]: this token or the next one of the sequence is numeric (the next is what the position predicts)."""
    wanted = torch.tensor(list(numeric_ids), dtype=ids_BT.dtype, device=ids_BT.device)
    here_BT = torch.isin(ids_BT, wanted)
    result = here_BT.clone()
    result[..., :-1] |= here_BT[..., 1:]
    return result


def token_weight(routing_T: Tensor, numeric_T: Tensor, exponent: int, numeric_weight: float) -> Tensor:
    """w = c^p (1 + lam n), float32: the weight of a token in an expert's moments (EAMPQ step 1)."""
    return routing_T.float() ** exponent * (1.0 + numeric_weight * numeric_T.float())


def describe(rule: NumericRule) -> dict[str, bool]:
    """The rule as plain data, for configs and reports."""
    return {field.name: bool(getattr(rule, field.name)) for field in fields(rule)}


# Most of a vocabulary is plain words; they are passed over here.
_POSSIBLE = re.compile(rf"[0-9$%{re.escape(SEPARATORS)}]|[^\x00-\x7f]")
_SEPARATED = re.compile(rf"[+\-−]?[{re.escape(SEPARATORS)}]*[0-9][0-9{re.escape(SEPARATORS)}\u00a0\u202f]*")
_NUMBER = rf"(?:[0-9][0-9{re.escape(SEPARATORS)}]*)?"
_PERCENT = re.compile(rf"[(\[（]?[+\-−]?{_NUMBER}\s?[{PERCENT}][)\]）.,;:!?、。，；！？]*")
_CURRENCY = re.compile(rf"[(\[（]?[+\-−]?[A-Z]{{0,3}}(\S)\s?{_NUMBER}")


def _kind(text: str) -> str | None:
    """The first kind that fits, whatever the rule says about it."""
    if not text or "\ufffd" in text or not _POSSIBLE.search(text):
        return None
    if text.isascii() and text.isdigit():
        return "digits"
    for kind, fits in _BY_CHARACTERS:
        if fits(text[0]) and all(fits(char) for char in text):
            return kind
    if _SEPARATED.fullmatch(text):
        return "separated"
    if _PERCENT.fullmatch(text):
        return "percent"
    money = _CURRENCY.fullmatch(text)
    if money and unicodedata.category(money[1]) == "Sc":
        return "currency"
    if any("0" <= char <= "9" for char in text):
        return "mixed"
    return "marks" if len(text) == 1 and text in SEPARATORS else None


def _is_script_digit(char: str) -> bool:
    return unicodedata.category(char) == "Nd" and not char.isascii() and char not in FULL_WIDTH


def _is_circled(char: str) -> bool:
    mark = unicodedata.decomposition(char)
    enclosed = mark.startswith("<circle>") or (mark.startswith("<compat>") and not _is_fraction(char))
    # White on black and in two circles: signs that Unicode does not decompose.
    plain = "\u24eb" <= char <= "\u24ff" or "\u2776" <= char <= "\u2793" or char in "\U0001f10b\U0001f10c"
    return unicodedata.category(char) == "No" and (enclosed or plain)


def _is_fraction(char: str) -> bool:
    return unicodedata.decomposition(char).startswith(("<fraction>", "<super>", "<sub>")) and char.isnumeric()


_BY_CHARACTERS = (
    ("full_width", lambda char: char in FULL_WIDTH),
    ("scripts", _is_script_digit),
    ("circled", _is_circled),
    ("fractions", _is_fraction),
    ("roman", lambda char: "\u2160" <= char <= "\u2188"),
    ("chinese", lambda char: char in CHINESE),
)
