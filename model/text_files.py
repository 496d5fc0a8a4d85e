"""Rows out of sample files: plain text, JSON lines, JSON, parquet; each of them gzipped too.

Everything is read as UTF-8 whatever the locale says, line ends become "\\n", and a row keeps the number by which a
person finds it again: the line of a JSON-lines file, the position in a JSON list or parquet table, 1 for a plain text
file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from glm5_quant.model.errors import UserError

FORMATS = {
    **dict.fromkeys((".txt", ".text", ".raw", ".tokens", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".json": "json",
    ".parquet": "parquet",
}
"""Format by suffix; a file without any suffix is plain text."""

# Prose that explains a data set is not part of it: these count only when a user names the file itself.
NOT_IN_FOLDERS = frozenset({".md", ".rst", ".py"})

# Nor are these, which the `datasets` library and the hub write beside their data.
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
_UNREAD = frozenset({".csv", ".tsv", ".arrow", ".bz2", ".xz", ".zst", ".zip", ".tar"})

Row = tuple[int, Any]


def format_of(path: Path) -> str | None:
    """Format of a file by its name ("text", "jsonl", "json", "parquet"), None where the name says nothing we read."""
    suffix = _suffix(path)
    return "text" if suffix == "" else FORMATS.get(suffix)


def data_files(folder: Path) -> list[Path]:
    """Every data file below `folder` in name order, so that the order in which a disk lists files changes nothing.

    Links to folders are followed, each folder once. A link to nothing counts, so that reading it names it.
    Raises UserError naming a folder that cannot be listed.
    """
    return sorted(path for path in _files_below(folder, set()) if _is_data(path))


def unread_files(folder: Path) -> list[Path]:
    """Files below `folder`, in name order, that look like data of a kind that is not read: tables, other packing."""
    return sorted(path for path in _files_below(folder, set()) if _suffix(path) in _UNREAD)


def _is_data(path: Path) -> bool:
    described = path.name in _DESCRIPTIONS or (
        path.name == "state.json" and path.with_name("dataset_info.json").exists()
    )
    return _suffix(path) in FORMATS and _suffix(path) not in NOT_IN_FOLDERS and not described


def _files_below(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    try:
        stat = folder.stat()
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        inner = {path for path in paths if path.is_dir()}
        files = [path for path in paths if path not in inner and (path.is_file() or path.is_symlink())]
    except OSError as error:
        raise UserError("this folder cannot be read", file=folder, found=error.strerror or str(error)) from error
    if (stat.st_dev, stat.st_ino) in seen:
        return
    seen.add((stat.st_dev, stat.st_ino))
    # Real folders first, so that a link to one of them is what is passed over.
    for path in sorted(inner, key=lambda path: (path.is_symlink(), path)):
        yield from _files_below(path, seen)
    yield from files


def rows_of(path: Path) -> Iterator[Row]:
    """Yield (number, value) for each row of a file, lazily where the format allows.

    Raises UserError naming file and line for what cannot be read: other encodings, broken JSON, a cut gzip stream.
    """
    readers = {"text": _text_rows, "jsonl": _jsonl_rows, "json": _json_rows, "parquet": _parquet_rows}
    kind = format_of(path)
    if kind is None:
        known = " ".join(sorted(FORMATS))
        raise UserError(
            "this kind of file is not read", file=path, found=_suffix(path), expected=f"{known}, each also as .gz"
        )
    try:
        yield from readers[kind](path)
    except UnicodeDecodeError as error:
        raise UserError(
            "not UTF-8 text", file=path, found=f"byte 0x{error.object[error.start]:02x}", hint="Convert it to UTF-8"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError("the gzip stream is damaged or cut short", file=path, found=str(error)) from error
    except OSError as error:
        raise UserError("cannot be read", file=path, found=error.strerror or str(error)) from error


def check_characters(text: str, file: str | Path, item: str) -> None:
    """Refuse half of a surrogate pair (JSON can spell it, "\\ud83d"): no tokenizer and no file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "half a character: a surrogate without its other half",
            file=file,
            item=item,
            found=ascii(text[error.start]).strip("'"),
            hint="The text was cut inside an emoji or the like: repair the row or leave it out",
        ) from error


def _suffix(path: Path) -> str:
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return name.suffix.lower()


def _open_text(path: Path) -> IO[str]:
    # utf-8-sig drops the byte-order mark that editors on Windows put in front.
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _text_rows(path: Path) -> Iterator[Row]:
    with _open_text(path) as file:
        text = file.read()
    if "\0" in text:
        raise UserError("holds zero bytes, so it is no text file", file=path)
    yield 1, text


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with _open_text(path) as file:
        yield from _parse_lines(file, path)


def _parse_lines(lines: Iterable[str], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    "not JSON",
                    file=path,
                    item=f"line {number}",
                    found=f"{error.msg.removesuffix(' at')} at column {error.colno}",
                ) from error
            except RecursionError as error:
                raise UserError("JSON nested too deeply", file=path, item=f"line {number}") from error
            except ValueError as error:
                raise UserError("a number too long to read", file=path, item=f"line {number}") from error


def _json_rows(path: Path) -> Iterator[Row]:
    with _open_text(path) as file:
        text = file.read()
    if not text.strip():
        return
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise UserError("JSON nested too deeply", file=path) from error
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise UserError("not JSON", file=path, item=f"line {error.lineno}", found=error.msg) from error
        # Many data sets call JSON lines ".json".
        yield from _parse_lines(text.split("\n"), path)
        return
    except ValueError as error:
        raise UserError("a number too long to read", file=path) from error
    yield from enumerate(_list_in(value), start=1)


def _list_in(value: Any) -> list[Any]:
    """The rows of a JSON document: a list, the only list below one key ({"dev": [...]}), or one row by itself."""
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and len(value) == 1:
        (only,) = value.values()
        rows = isinstance(only, list) and all(isinstance(row, dict) and "role" not in row for row in only)
        if rows and not value.keys() & {"messages", "turns", "conversations"}:
            return list(only)
    return [value]


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix.lower() == ".gz" else path
    number = 0
    try:
        with pq.ParquetFile(source) as table:
            # Dates are no text, and some of them (a time zone unknown here, the year 10000) cannot be had in Python.
            columns = [column.name for column in table.schema_arrow if not pa.types.is_temporal(column.type)]
            for batch in table.iter_batches(batch_size=256, columns=columns or None):
                for value in batch.to_pylist():
                    number += 1
                    yield number, value
    except pa.ArrowException as error:
        raise UserError("not a readable parquet file", file=path, found=str(error).splitlines()[0]) from error
