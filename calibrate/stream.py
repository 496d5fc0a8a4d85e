"""Hidden states of all calibration tokens at a layer boundary, on disk as memory-mapped files.

Two streams run side by side: `source` through the source model, `quantized` through what was solved so far. The page
cache keeps them in memory while there is room; the kernel writes them out when there is not. The files of a finished
boundary are what a killed run goes on from.
"""

from __future__ import annotations

import math
import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from torch import Tensor

from glm5_quant.calibrate.spill import save
from glm5_quant.model import atomic
from glm5_quant.model.errors import UserError

NAMES = ("source", "quantized")
FEW_WINDOWS = 8
# A token whose |h|^2 is below this share of the median counts as if it had that: zeros would outweigh all others.
LEAST_ENERGY = 1e-4
_ZEROS = bytes(2**17)
# Linux's MADV_POPULATE_WRITE (5.14 on), which the module does not name.
_POPULATE_WRITE = 23
_mappings: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()
"""Where in memory each mapped file begins."""


@dataclass(kw_only=True)
class Stream:
    """One stream. `shape` is [windows, positions, hidden]; `dtype` is the one layers run in.

    `side` is what a layer hands to the next beside hidden states (`prev_topk_indices` of GLM-5.2), [windows, ...]; None
    where a family has nothing such, and before its first layer. On another `device` than the CPU the file holds a copy
    of what lies there.
    """

    folder: Path
    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype = torch.float32
    side: Tensor | None = None
    device: str = "cpu"
    _file: Tensor | None = field(default=None, repr=False)
    _now: Tensor | None = field(default=None, repr=False)

    def path(self, boundary: int) -> Path:
        return self.folder / f"{self.name}.{boundary:05d}.bin"

    def side_path(self, boundary: int) -> Path:
        return self.folder / f"{self.name}.{boundary:05d}.side.safetensors"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def open(self, boundary: int) -> Tensor:
        """The stream at the input of layer `boundary`.

        Raises:
            UserError: the file is missing or has another size (the run it belonged to cannot be gone on with).
        """
        path = self.path(boundary)
        size = path.stat().st_size if path.exists() else None
        if size != self.nbytes:
            raise UserError(
                "hidden states of the last finished layer are missing or incomplete",
                file=path,
                found="nothing" if size is None else f"{size} bytes",
                expected=f"{self.nbytes} bytes",
                hint="Start again with `--resume never`",
            )
        side = load_file(self.side_path(boundary)) if self.side_path(boundary).exists() else {}
        self.side = side["side"].to(self.device) if side else None
        return _mapped(path, self.shape, self.dtype).to(self.device)

    def create(self, boundary: int) -> Tensor:
        """An empty stream file for the next boundary, under a temporary name until `commit`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(boundary).with_suffix(".part")
        with path.open("wb") as file:
            _reserve(file.fileno(), self.nbytes, path)
        self._file = _mapped(path, self.shape, self.dtype)
        self._now = self._file.to(self.device)
        return self._now

    def commit(self, boundary: int, side: Tensor | None) -> None:
        """Give the file of `boundary` its final name, once it is on the disk: else the record of the layer before could
        outlive it when the machine goes down, and the next run would go on from zeros."""
        if self._file is not None and self._now is not None and self._now is not self._file:
            self._file.copy_(self._now)
        self._file = self._now = None
        if side is not None:
            temporary = self.side_path(boundary).with_suffix(".part")
            save({"side": side.cpu()}, temporary)
            _settle(temporary, self.side_path(boundary))
        _settle(self.path(boundary).with_suffix(".part"), self.path(boundary))
        self.side = side

    def drop(self, boundary: int) -> None:
        for path in (self.path(boundary), self.side_path(boundary)):
            path.unlink(missing_ok=True)


def _settle(part: Path, path: Path) -> None:
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    part.replace(path)
    atomic.sync_folder(path.parent)


def scratch(folder: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer of zeros in a file of `folder` that vanishes with the tensor (or the process)."""
    if not math.prod(shape):
        return torch.zeros(shape, dtype=dtype)
    path = folder / f"scratch.{uuid.uuid4().hex}.bin"
    with path.open("wb") as file:
        _reserve(file.fileno(), dtype.itemsize * math.prod(shape), path)
    tensor = _mapped(path, shape, dtype)
    path.unlink()
    return tensor


def windows(*streams: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The streams window by window, side by side; pages that were touched are released every few."""
    for number, side_by_side in enumerate(zip(*streams, strict=True)):
        if number % FEW_WINDOWS == 0:
            release_pages()
        yield side_by_side


def relative_weights(energy_T: Tensor) -> Tensor:
    """1 / |h|^2 of tokens with these |h|^2, float32 [T]: what errors in the residual stream weigh to the next norm."""
    seen = energy_T[energy_T > 0]
    least = float(seen.median()) * LEAST_ENERGY if len(seen) else 1.0
    return 1.0 / energy_T.clamp(min=max(least, torch.finfo(torch.float32).tiny))


def token_parts(count: int, size: int) -> Iterator[slice]:
    """Ranges of so many tokens; pages of files that one of them touched are released before the next."""
    for start in range(0, count, size):
        release_pages()
        yield slice(start, min(start + size, count))


def release_pages() -> None:
    """Stop counting the files' pages as this process's memory. What they hold stays in the page cache, or on disk once
    the kernel needs the room, and comes back when it is next touched."""
    for mapping in _mappings:
        mapping.madvise(mmap.MADV_DONTNEED)


def make_writable(rows: Tensor) -> None:
    """Take the page faults of writing to rows that lie in a file all at once; rows elsewhere stay as they are.

    For rows that are added to: each page would fault at reading and again at writing, one by one, which takes three
    times as long as the sum itself.
    """
    first, nbytes = rows.data_ptr(), rows.nbytes
    for mapping, start in _mappings.items():
        if start <= first < start + len(mapping):
            offset = (first - start) // mmap.PAGESIZE * mmap.PAGESIZE
            with suppress(OSError):
                mapping.madvise(_POPULATE_WRITE, offset, first - start + nbytes - offset)


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), dtype.itemsize * math.prod(shape))
    tensor = torch.frombuffer(mapping, dtype=dtype)
    _mappings[mapping] = tensor.data_ptr()
    return tensor.view(shape)


def _reserve(descriptor: int, nbytes: int, path: Path) -> None:
    """Claim the blocks now: a full disk is an error here, where it can be told, and not a crash at some later store.

    Zeros are written, too: the page cache then holds large pages, and what is stored later costs a fifth.
    """
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        for start in range(0, nbytes, len(_ZEROS)):
            os.pwrite(descriptor, _ZEROS[: nbytes - start], start)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(
            f"no room for hidden states ({error.strerror})", file=path, expected=f"{nbytes / 2**30:.2f} GiB free"
        ) from None
