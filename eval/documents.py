"""Texts to score: what evaluation reads, one document at a time.

A document is plain text, or token ids (for models without a tokenizer). Its file and language make the report's
slices; its index makes the clusters of the bootstrap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5_quant.eval.prefix import Prefix, encode
from glm5_quant.model.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text with where it came from. `text` is a string, or token ids. `kind` names a stress shape, if any."""

    text: str | Sequence[int]
    file: str = ""
    language: str = ""
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids of one document (int64 [T], prefix stripped) and which of them belong to critical words (bool [T])."""

    ids: NDArray[np.int64]
    critical: NDArray[np.bool_] | None
    document: Document
    index: int


def language_of(text: str) -> str:
    """ "zh", "ja", "ko" or "en" (any Latin script) by counting letters; "" when the text has none."""
    counts = {"zh": 0.0, "ja": 0.0, "ko": 0.0, "en": 0.0}
    for character in text[:2000]:
        point = ord(character)
        if 0x4E00 <= point <= 0x9FFF:
            counts["zh"] += 1
        elif 0x3040 <= point <= 0x30FF:
            counts["ja"] += 3  # kana among kanji: a third of the signs is enough to call a text Japanese
        elif 0xAC00 <= point <= 0xD7A3:
            counts["ko"] += 1
        elif character.isascii() and character.isalpha():
            counts["en"] += 0.25  # one Han character carries about as much as four letters
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else ""


def as_documents(texts: Iterable[Any], tokenizer: Any = None) -> Iterator[Document]:
    """Documents from strings, token id lists, `Document`s, or rows with `.text`/`.messages` and `.file`.

    Rows may be dictionaries. Messages are rendered by the tokenizer's chat template where it has one, else their
    words are joined by newlines.
    """
    for item in getattr(texts, "rows", texts):
        if isinstance(item, Document):
            yield item
        elif isinstance(item, str):
            yield Document(text=item, language=language_of(item))
        elif isinstance(item, Sequence):
            yield Document(text=item)
        else:
            row = SimpleNamespace(**{"text": None, "messages": None, **item}) if isinstance(item, dict) else item
            yield _from_row(row, tokenizer)


def _from_row(row: Any, tokenizer: Any) -> Document:
    text = row.text
    if text is None and row.messages is None:
        found = "columns " + ", ".join(name for name, value in vars(row).items() if value is not None)
        raise UserError("a row without text", item="texts", found=found, expected="text or messages")
    if text is None and getattr(tokenizer, "chat_template", None):
        text = _rendered(row, tokenizer)
    elif text is None:
        text = "\n".join(str(message["content"] or "") for message in row.messages)
    file = str(getattr(row, "file", "") or "")
    return Document(text=text, file=Path(file).name, language=getattr(row, "language", "") or language_of(text))


def _rendered(row: Any, tokenizer: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in row.messages], tokenize=False))
    except Exception as error:  # a template is a program: it may raise anything
        raise UserError(
            "the chat template refuses these messages",
            file=getattr(row, "file", None),
            item=getattr(row, "where", None),
            found=str(error),
        ) from error


class Encoder:
    """Documents to token ids; counts what had to be skipped. State: `seen` documents, `shapes` of stress among them,
    and `empty` texts skipped."""

    def __init__(self, tokenizer: Any, prefix: Prefix, critical_words: Any = None) -> None:
        self.tokenizer, self.prefix, self.critical_words = tokenizer, prefix, critical_words
        self.empty = self.seen = self.shapes = 0

    def __call__(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        least = 1 if self.prefix.ids else 2
        for document in documents:
            ids, critical = self._encode(document)
            self.seen += 1
            self.shapes += bool(document.kind)
            if len(ids) < least:
                self.empty += not document.kind
                continue
            yield Encoded(ids=ids, critical=critical, document=document, index=self.seen - 1)

    def _encode(self, document: Document) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        if not isinstance(document.text, str):
            return np.asarray(self.prefix.strip(document.text), dtype=np.int64), None
        if self.tokenizer is None:
            raise ValueError("texts need a tokenizer; pass tokenizer=, or token ids instead of text")
        ids = self.prefix.strip(encode(self.tokenizer, document.text))
        critical = None
        if self.critical_words is not None:
            critical = self.critical_words.mark(self.tokenizer, document.text, len(ids))
        return np.asarray(ids, dtype=np.int64), critical
