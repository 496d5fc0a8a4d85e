"""Texts to score: what evaluation reads, one document at a time.

A document is plain text, or token ids (for models without a tokenizer). Its file and language make the report's
slices; its index makes the clusters of the bootstrap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5_quant.eval.prefix import Prefix, encode
from glm5_quant.model.errors import UserError
from glm5_quant.model.text_files import check_characters


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
    """ "zh", "ja", "ko" or "en" (any Latin script) by counting letters; "" when most are of another script, or none."""
    counts = {"zh": 0.0, "ja": 0.0, "ko": 0.0, "en": 0.0, "": 0.0}
    for character in text[:2000]:
        point = ord(character)
        if 0x4E00 <= point <= 0x9FFF:
            counts["zh"] += 1
        elif 0x3040 <= point <= 0x30FF:
            counts["ja"] += 3  # kana among kanji: a third of the signs is enough to call a text Japanese
        elif 0xAC00 <= point <= 0xD7A3:
            counts["ko"] += 1
        elif character.isalpha():
            # One Han character carries about as much as four letters.
            counts["en" if point < 0x250 else ""] += 0.25
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else ""


def as_documents(texts: Iterable[Any], tokenizer: Any = None) -> Iterator[Document]:
    """Documents from strings, token id lists, `Document`s, or rows with `.text`/`.messages` and `.file`.

    Rows may be dictionaries. Messages are rendered by the tokenizer's chat template where it has one, else their
    words are joined by newlines.
    """
    rows = getattr(texts, "rows", texts)
    names = _file_names(rows) if isinstance(rows, Sequence) else {}
    for number, item in enumerate(rows, start=1):
        if isinstance(item, Document):
            yield item
        elif isinstance(item, str):
            check_characters(item, "texts", f"text {number}")
            yield Document(text=item, language=language_of(item))
        elif isinstance(item, Sequence):
            yield Document(text=item)
        else:
            row = SimpleNamespace(**{"text": None, "messages": None, **item}) if isinstance(item, dict) else item
            yield _from_row(row, tokenizer, names, f"text {number}")


def _file_names(rows: Sequence[Any]) -> dict[str, str]:
    """What a report calls each file: its name, with folders in front where files of several folders have that name."""
    alike: dict[str, list[Path]] = {}
    for file in dict.fromkeys(str(getattr(row, "file", "") or "") for row in rows):
        alike.setdefault(Path(file).name, []).append(Path(file))
    found = {}
    for name, paths in alike.items():
        root = os.path.commonpath([path.absolute() for path in paths])
        for path in paths:
            found[str(path)] = name if len(paths) == 1 else path.absolute().relative_to(root).as_posix()
    return found


def _from_row(row: Any, tokenizer: Any, names: dict[str, str], where: str) -> Document:
    text = row.text
    if text is None and row.messages is None:
        found = "columns " + ", ".join(name for name, value in vars(row).items() if value is not None)
        raise UserError("a row without text", item="texts", found=found, expected="text or messages")
    words = text
    if text is None:
        text = words = "\n".join(str(message.get("content") or "") for message in row.messages)
        if getattr(tokenizer, "chat_template", None):
            text = _rendered(row, tokenizer)
    file = str(getattr(row, "file", "") or "")
    if isinstance(text, str):
        check_characters(text, file or "texts", getattr(row, "where", where))
    # The marks of a template are Latin letters: they say nothing about the language.
    language = getattr(row, "language", "") or (language_of(words) if isinstance(words, str) else "")
    return Document(text=text, file=names.get(file, Path(file).name), language=language)


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
    and `empty` texts skipped.

    `vocab_size`: rows of the model's embedding, where known. UserError for a token id outside it.
    """

    def __init__(
        self, tokenizer: Any, prefix: Prefix, critical_words: Any = None, vocab_size: int | None = None
    ) -> None:
        self.tokenizer, self.prefix, self.critical_words = tokenizer, prefix, critical_words
        self.vocab_size = vocab_size
        self.empty = self.seen = self.shapes = 0

    def __call__(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        least = 1 if self.prefix.ids else 2
        for document in documents:
            ids, critical = self._encode(document)
            self._check_ids(ids, document)
            self.seen += 1
            self.shapes += bool(document.kind)
            if len(ids) < least:
                self.empty += not document.kind
                continue
            yield Encoded(ids=ids, critical=critical, document=document, index=self.seen - 1)

    def _check_ids(self, ids: NDArray[np.int64], document: Document) -> None:
        outside = ids[(ids < 0) | (ids >= self.vocab_size)] if self.vocab_size is not None else ids[:0]
        if len(outside):
            raise UserError(
                "a token id is outside the model's embedding",
                file=document.file or "texts",
                item=f"text {self.seen + 1}",
                found=f"id {outside[0]}",
                expected=f"0 to {self.vocab_size - 1}" if self.vocab_size is not None else None,
                hint="Tokenizer and model do not belong together",
            )

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
