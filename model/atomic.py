"""Files and folders that appear whole or not at all: temporary name, fsync, rename; and checks before work starts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from glm5_quant.model.errors import UserError
from glm5_quant.model.files import read_error

PART_SUFFIX = ".part"
_COPY_BYTES = 1 << 20


def part_name(path: Path) -> Path:
    """Where a file is written before it is whole: hidden and in the same folder, so that no reader picks it up."""
    return path.with_name(f".{path.name}{PART_SUFFIX}")


def is_part(path: Path) -> bool:
    """Whether a file is a half-written one that a killed run left."""
    return path.name.startswith(".") and path.name.endswith(PART_SUFFIX)


class HashingFile:
    """A binary file being written, with the SHA-256 and size of what went in."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


@contextmanager
def atomic_file(path: Path) -> Iterator[HashingFile]:
    """Write `path` under a temporary name; flush, fsync and rename at the end. Nothing stays when the body fails.

    Raises:
        UserError: the file cannot be written (full disk, no rights), with the system's reason.
    """
    part = part_name(path)
    try:
        with part.open("wb") as file:
            yield HashingFile(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        _unlink(part)
        raise os_error(error, path) from None
    except BaseException:
        _unlink(part)
        raise


def write_bytes(path: Path, data: bytes) -> str:
    """Write a small file atomically; returns its SHA-256."""
    with atomic_file(path) as file:
        file.write(data)
    return file.sha256


def json_bytes(value: Any) -> bytes:
    """JSON as this project stores it: two spaces, real characters, one line break at the end."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def copy_file(source: Path, target: Path) -> str:
    """Copy bytes (never links, modes or times) atomically; returns the SHA-256."""
    with atomic_file(target) as writer:
        for chunk in _chunks(source):
            writer.write(chunk)
    return writer.sha256


def _chunks(source: Path) -> Iterator[bytes]:
    try:
        with source.open("rb") as reader:
            while chunk := reader.read(_COPY_BYTES):
                yield chunk
    except OSError as error:
        raise read_error(error, source) from None


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents. UserError if something else is in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_error(error, folder) from None


def check_writable(folder: Path) -> None:
    """Try the rights by making a file, since mode bits say little (read-only mounts, access lists, root)."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise os_error(error, folder) from None


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """UserError when the disk of `folder` has fewer than `needed_bytes` left."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            "not enough free disk space",
            file=folder,
            found=f"{free:,} bytes",
            expected=f"{needed_bytes:,} bytes",
            hint="Choose another output folder, or free space",
        )


def remove(path: Path) -> None:
    """Delete a file, a link (never what it points to) or a folder with all that is in it."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise os_error(error, path) from None


def os_error(error: OSError, path: Path) -> UserError:
    """The system's refusal as one short message."""
    return UserError(f"cannot be written ({error.strerror or error})", file=path)


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
