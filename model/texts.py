"""Reading sample data: files, folders and hub data sets become rows of text or of chat messages.

`calibrate/` and `eval/` must not know each other, and both read data; so reading stands here. A row is one document.
Its file and line stay with it, so that every later complaint can name them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded
from glm5_quant.model.hub_texts import hub_rows, looks_like_hub_id
from glm5_quant.model.text_files import FORMATS, check_characters, data_files, format_of, rows_of, unread_files
from glm5_quant.model.tokenizing import load_tokenizer as load_tokenizer

COLUMNS = ("text", "messages", "conversations", "turns")
"""Columns looked for where the caller names none; the first one of a row that is not empty is taken."""

_ROLE_KEYS, _CONTENT_KEYS = ("role", "from", "speaker"), ("content", "text", "value")
_CALL_KEYS = ("tool_calls", "function_call")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_SPLITS = ("train", "validation", "valid", "dev", "test")
_SHOWN_FILES = 5
_SPLIT_NAMES = {"validation": ("validation", "valid", "dev")}


@dataclass(frozen=True, kw_only=True)
class Text:
    """One document: either `text`, or `messages` [{"role", "content", ...}] for a chat template."""

    file: str
    line: int
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None

    @property
    def where(self) -> str:
        return f"row {self.line}"

    @property
    def plain(self) -> str:
        """The words alone, without roles or template marks."""
        return self.text if self.text is not None else "\n".join(m["content"] for m in self.messages or ())


@dataclass(frozen=True, kw_only=True)
class Texts:
    """All usable rows of a source, in order, and what was passed over."""

    source: str
    rows: tuple[Text, ...]
    rows_in: int
    rows_empty: int
    files: tuple[str, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def rows_used(self) -> int:
        return len(self.rows)


def read_texts(
    source: str | Path, *, split: str = "train", column: str | None = None, limit: int | None = None
) -> Texts:
    """Read documents from a file, a folder or a hub data set.

    Files: .txt (the whole file is one document), .jsonl, .json, .parquet, each also as .gz. A folder gives its data
    files in name order; where some of them are named after `split`, only those, with a warning. A name that is no path
    is asked for as a hub data set (`owner/name` or `owner/name:config`) in that split.

    Rows hold `text`, or a dialogue in `messages`, `conversations` or `turns` ({role|from|speaker, content|text|value});
    a dialogue may also be JSON inside a string. Turns with a `speaker` but no role become a transcript, since a chat
    template knows no speakers. `column` names another column. Empty rows are counted and passed over. `limit` stops
    after that many usable rows.

    Raises UserError naming the file, the columns found and those expected.
    """
    name = str(source)
    if limit is not None and limit < 1:
        raise UserError("limit must be at least 1", found=limit)
    rows, rows_in, rows_empty, files = [], 0, 0, dict[str, None]()
    raw, left_out = _raw_rows(name, split)
    for file, line, value in raw:
        files[file] = None
        rows_in += 1
        document = _document(value, column, file, line)
        if document is None:
            rows_empty += 1
            continue
        rows.append(document)
        if limit is not None and len(rows) >= limit:
            break
    if not rows:
        raise UserError(
            "no usable rows",
            file=name,
            found=f"{rows_in} rows, all of them empty" if rows_in else "nothing: it is empty",
            expected="at least one row with text",
        )
    return Texts(
        source=name,
        rows=tuple(rows),
        rows_in=rows_in,
        rows_empty=rows_empty,
        files=tuple(files),
        warnings=(*left_out, *_warnings(name, rows, rows_in, rows_empty, limit)),
    )


def _warnings(name: str, rows: list[Text], rows_in: int, rows_empty: int, limit: int | None) -> tuple[str, ...]:
    found = []
    if len(rows) == 1 and format_of(Path(rows[0].file)) != "text":
        found.append(f"{name}: only one usable row")
    if rows_empty:
        found.append(f"{name}: {rows_empty} of {rows_in} rows are empty and were passed over")
    if limit is not None and len(rows) == limit > 1:
        found.append(f"{name}: only the first {limit:,} usable rows were read")
    return tuple(found)


def _raw_rows(name: str, split: str) -> tuple[Iterator[tuple[str, int, Any]], tuple[str, ...]]:
    """(file, line, value) of every row of a source, and what to say about files that are left out."""
    path = expanded(name)
    try:
        is_folder, is_file = bool(name) and path.is_dir(), bool(name) and path.exists()
    except OSError as error:  # no rights to look, or a name longer than the disk takes
        raise UserError("cannot be read", file=f"{name[:200]}", found=error.strerror or str(error)) from error
    if is_folder:
        files, left_out = _folder_files(path, split)
        return _rows_of_files(files), left_out
    if is_file:
        return _rows_of_files([path]), ()
    if looks_like_hub_id(name) and path.suffix.lower() not in (*FORMATS, ".gz"):
        return ((name, line, value) for line, value in hub_rows(name, split)), ()
    raise UserError("no such file or folder", file=name or "''", expected="a file, a folder or a hub data set id")


def _rows_of_files(files: list[Path]) -> Iterator[tuple[str, int, Any]]:
    for file in files:
        yield from ((str(file), line, value) for line, value in rows_of(file))


def _folder_files(folder: Path, split: str) -> tuple[list[Path], tuple[str, ...]]:
    """The data files of a folder (where some are named after the split, only those), and a warning about the rest."""
    files = data_files(folder)
    if not files:
        here = sorted(path.name for path in folder.iterdir())[:8]
        raise UserError(
            "no data file in this folder",
            file=folder,
            found=", ".join(here) or "nothing",
            expected=".txt, .jsonl, .json or .parquet, each also as .gz",
        )
    unread = unread_files(folder)
    warnings = [f"{folder}: {len(unread)} files of kinds that are not read: {_shown(unread, folder)}"] if unread else []
    words = _SPLIT_NAMES.get(split, (split,))
    found = [_split_word(file.relative_to(folder)) for file in files]
    named = [file for file, word in zip(files, found, strict=True) if word in words]
    if not named and None not in found:
        others = ", ".join(sorted({word for word in found if word is not None}))
        warnings.append(f"{folder}: no file is named {split}: all of them were read, which are named {others}")
    if not named or len(named) == len(files):
        return files, tuple(warnings)
    said = f"{len(named)} of {len(files)} files read: those named {split}: {_shown(named, folder)}"
    return named, (*warnings, f"{folder}: {said}")


def _shown(files: list[Path], folder: Path) -> str:
    names = [file.relative_to(folder).as_posix() for file in files[:_SHOWN_FILES]]
    return ", ".join(names + [f"and {len(files) - _SHOWN_FILES} more"] * (len(files) > _SHOWN_FILES))


def _split_word(path: Path) -> str | None:
    """The split a path names as a word of its folders or of its file name, if any."""
    words = re.split(r"[^a-z0-9]+", path.as_posix().lower())
    return next((word for word in words if word in _SPLITS), None)


def _document(value: Any, column: str | None, file: str, line: int) -> Text | None:
    """One row as a document, None if it is empty."""
    if isinstance(value, Mapping):
        value = _cell(value, column, file, line)
    if value is None:
        return None
    if isinstance(value, str):
        check_characters(value, file, f"row {line}")
        return Text(file=file, line=line, text=value) if value.strip() else None
    if isinstance(value, list):
        return _dialogue(value, file, line)
    raise UserError(
        "neither text nor messages",
        file=file,
        item=f"row {line}",
        found=type(value).__name__,
        expected="a string or a list of messages",
    )


def _cell(row: Mapping[str, Any], column: str | None, file: str, line: int) -> Any:
    wanted = COLUMNS if column is None else (column,)
    present = [name for name in wanted if name in row]
    if present:
        # Tables of texts and dialogues together have both columns in every row, one of them empty.
        name = next((name for name in present if row[name]), present[0])
        return row[name] if name == "text" else _parsed(row[name])
    alike = next((name for name in row if name.lower() in wanted), None)
    raise UserError(
        "no such column" if column else "no column with text",
        file=file,
        item=f"row {line}",
        found="columns " + ", ".join(map(str, row)) if row else "a row without columns",
        expected=" or ".join(wanted),
        hint=f'Rename the column "{alike}" to "{alike.lower()}"' if alike else None,
    )


def _parsed(value: Any) -> Any:
    """A dialogue that a table keeps as JSON inside a string; anything else as it is."""
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{", value):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _dialogue(turns: list[Any], file: str, line: int) -> Text | None:
    messages = [_message(turn, file, line) for turn in turns]
    if not any(message["content"].strip() or len(message) > 2 for message in messages):
        return None
    if any("speaker" in turn and "role" not in turn for turn in turns):
        return Text(file=file, line=line, text="\n".join(f"{m['role']}: {m['content']}" for m in messages))
    return Text(file=file, line=line, messages=tuple(messages))


def _message(turn: Any, file: str, line: int) -> dict[str, Any]:
    role_key = next((key for key in _ROLE_KEYS if isinstance(turn, Mapping) and key in turn), None)
    content_key = next((key for key in _CONTENT_KEYS if isinstance(turn, Mapping) and key in turn), None)
    calls = isinstance(turn, Mapping) and any(turn.get(key) for key in _CALL_KEYS)
    if role_key is None or (content_key is None and not calls):
        raise UserError(
            "not a message",
            file=file,
            item=f"row {line}",
            found=f"keys {', '.join(map(str, turn))}" if isinstance(turn, Mapping) else type(turn).__name__,
            expected="role and content (or role|speaker and text)",
        )
    rest = {key: value for key, value in turn.items() if key not in (role_key, content_key) and value is not None}
    if format_of(Path(file)) not in ("json", "jsonl"):
        rest = _without_nulls(rest)
    role = str(turn[role_key])
    content = _content(turn[content_key] if content_key is not None else None, file, line)
    check_characters(f"{role} {content}", file, f"row {line}")
    return {"role": _ROLES.get(role, role), "content": content, **rest}


def _without_nulls(value: Any) -> Any:
    """Without the null keys that a table adds so that all calls have the arguments of all tools."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _content(value: Any, file: str, line: int) -> str:
    """Content as one string; a list of parts (the form of multi-modal chats) must hold text parts only."""
    if value is None:
        return ""
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise UserError(
            "message content is no text", file=file, item=f"row {line}", found=type(value).__name__, expected="a string"
        )
    return value
