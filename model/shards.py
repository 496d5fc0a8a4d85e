"""Writing safetensors shards without holding one in memory: sizes first, then the header, then one tensor at a time.

Bytes depend only on names, dtypes, shapes and values: the header lists tensors by descending element size, then by
name (so each starts aligned to its own dtype), and carries `{"format": "pt"}`, without which readers fail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glm5_quant.model import atomic
from glm5_quant.model.checkpoint import DTYPES
from glm5_quant.model.errors import UserError

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor to be written: final name, safetensors dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class Written:
    """One finished file: name relative to its folder, size, SHA-256."""

    name: str
    size_bytes: int
    sha256: str


def split_into_shards(groups: Iterable[Sequence[Spec]], max_shard_bytes: int) -> list[list[Spec]]:
    """Fill shards in the order given, keeping each group (the parts of one matrix) together where it fits in one.

    No shard exceeds `max_shard_bytes` unless one tensor alone does.
    """
    shards: list[list[Spec]] = [[]]
    used = 0
    for group in groups:
        size = sum(spec.nbytes for spec in group)
        units = [group] if size <= max_shard_bytes else [[spec] for spec in group]
        for unit in units:
            unit_bytes = sum(spec.nbytes for spec in unit)
            if shards[-1] and used + unit_bytes > max_shard_bytes:
                shards.append([])
                used = 0
            shards[-1].extend(unit)
            used += unit_bytes
    return [shard for shard in shards if shard]


def shard_names(count: int, prefix: str = "model") -> list[str]:
    """`model-00001-of-00005.safetensors` and so on."""
    return [f"{prefix}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def in_file_order(specs: Iterable[Spec]) -> list[Spec]:
    """Widest elements first, then by name: every tensor starts aligned without padding between tensors."""
    return sorted(specs, key=lambda spec: (-spec.item_bytes, spec.name))


def header_bytes(specs: Sequence[Spec]) -> bytes:
    """The length field and JSON header of a shard whose tensors follow in the order given."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, specs: Iterable[Spec], read: Callable[[str], Tensor]) -> Written:
    """Write one shard atomically; `read(name)` gives each tensor when its turn comes and it is dropped after.

    Raises:
        UserError: the disk refuses, or a tensor has another dtype or shape than its spec says.
    """
    ordered = in_file_order(specs)
    with atomic.atomic_file(path) as file:
        file.write(header_bytes(ordered))
        for spec in ordered:
            tensor = read(spec.name)
            found = (DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape))
            if found != (spec.dtype, spec.shape):
                raise UserError("tensor changed while writing", item=spec.name, found=found, expected=spec)
            file.write(tensor_bytes(tensor))
    return Written(name=path.name, size_bytes=file.size, sha256=file.sha256)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's values in C order as bytes, without a copy where it is contiguous already."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
