"""Critical words: words whose change turns an answer around, such as negations, limits and risk classes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded

DEFAULT_WORDS = (
    *("not", "no", "never", "cannot", "can't", "won't", "don't", "doesn't", "isn't", "without", "neither", "nor"),
    *("unless", "except", "only", "must", "at most", "at least", "up to", "no more than", "no less than", "more than"),
    *("less than", "maximum", "minimum", "limit", "above", "below", "before", "after", "approved", "rejected"),
    *(
        "不",
        "没",
        "未",
        "无",
        "非",
        "勿",
        "禁止",
        "不得",
        "除非",
        "仅",
        "必须",
        "至少",
        "至多",
        "最高",
        "最低",
        "不超过",
    ),
    *("不低于", "上限", "下限", "限额", "以上", "以下", "保守型", "稳健型", "平衡型", "成长型", "进取型", "激进型"),
    *("高风险", "中风险", "低风险", "通过", "拒绝"),
)

# Thai, Lao, Burmese, Khmer, kana, Han and Hangul: no spaces between words, or endings that grow on them.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
_LETTER = rf"[^\W{_SPACELESS}]"
_APOSTROPHES = "'\u2019"


class CriticalWords:
    """A list of words, and where they stand in texts, in any case. Words match as whole words, but those of scripts
    without spaces (Chinese, Japanese, Korean, Thai) anywhere. Both apostrophes are one."""

    def __init__(self, words: Iterable[str]) -> None:
        plain = (unicodedata.normalize("NFC", word.strip()).replace("\u2019", "'") for word in words)
        self.words = tuple(dict.fromkeys(filter(None, plain)))
        if not self.words:
            raise UserError("no critical words", item="critical_words", found="an empty list")
        longest_first = sorted(self.words, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(_pattern, longest_first)), re.IGNORECASE)

    def find(self, text: str) -> list[str]:
        """The critical words of a text, in order, in lower case."""
        return [match.group().lower().replace("\u2019", "'") for match in self.pattern.finditer(text)]

    def mark(self, tokenizer: Any, text: str, count: int) -> NDArray[np.bool_] | None:
        """bool [count]: which of the last `count` tokens of the encoded text touch a critical word.

        None where the tokenizer cannot say which characters a token covers.
        """
        if not getattr(tokenizer, "is_fast", False):
            return None
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        critical = np.zeros(len(text) + 1, dtype=np.bool_)
        for match in self.pattern.finditer(text):
            critical[match.start() : match.end()] = True
        marks = np.array([bool(critical[start:end].any()) for start, end in offsets], dtype=np.bool_)
        return marks[len(marks) - count :]


def _pattern(word: str) -> str:
    text = re.escape(word).replace("'", f"[{_APOSTROPHES}]")
    if re.search(f"[{_SPACELESS}]", word):
        return text
    return rf"(?<!{_LETTER}){text}(?!{_LETTER})"


def read_critical_words(source: str | Path) -> CriticalWords | None:
    """The default list for "default", a UTF-8 file with one word a line, or None for ""."""
    if not source:
        return None
    if source == "default":
        return CriticalWords(DEFAULT_WORDS)
    path = expanded(source)
    try:
        # utf-8-sig drops the byte-order mark that editors on Windows put in front.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("cannot read the critical words", file=path, found=str(error)) from error
    return CriticalWords(line for line in lines if not line.startswith("#"))
