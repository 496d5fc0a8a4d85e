"""Read and check the header of one safetensors file, trusting nothing in it.

A file is 8 bytes of little-endian header length, that many bytes of JSON, then the tensors' bytes. The header says
where each tensor lies. Every claim is checked against the size of the file before anything is allocated: a header
that lies must cost a message, not memory.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_quant.model.errors import UserError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference reader
MAX_ELEMENTS = 2**63 - 1
MAX_NAME = 4096  # letters
MAX_DIMENSIONS = 64  # a list of a million sizes would keep us multiplying

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the headers describe it. `offset` counts from the start of the file, in bytes.

    `scale` is the tensor of block scales that belongs to an FP8 weight (None for every other dtype).
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    scale: TensorInfo | None = None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a safetensors file, by name. UserError when the file is cut, or the header breaks a rule."""
    header, data_start, file_bytes = _read_json(path)
    _check_metadata(header.pop("__metadata__", None), path)
    infos = {name: _entry(name, value, path, data_start) for name, value in header.items()}
    _check_layout(infos, path, data_start, file_bytes)
    return infos


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json that refuses a name given twice (two readers would see two different files)."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name[:200]!r} appears twice")
        result[name] = value
    return result


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    file_bytes = path.stat().st_size
    if file_bytes < 8:
        raise UserError(
            "the file is cut: too short to hold a safetensors header",
            file=path,
            found=f"{file_bytes} bytes",
            expected="8 bytes or more",
            hint="Download or copy it again",
        )
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise UserError(
                "not a safetensors file: header too long",
                file=path,
                found=f"{length} bytes",
                expected=f"at most {MAX_HEADER_BYTES}",
            )
        if 8 + length > file_bytes:
            raise UserError(
                "the file is cut inside its header",
                file=path,
                found=f"{file_bytes} bytes",
                expected=f"at least {8 + length} bytes",
                hint="Download or copy it again",
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the safetensors header is not valid JSON: {error}", file=path) from None
    if not isinstance(header, dict):
        raise UserError("the safetensors header is no JSON object", file=path, found=type(header).__name__)
    return header, 8 + length, file_bytes


def _check_metadata(metadata: object, path: Path) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(
            "bad value in a safetensors header", file=path, item="__metadata__", expected="an object of strings"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def _check_name(name: str, path: Path) -> None:
    """JSON can spell halves of characters, which no file of ours can hold."""
    if len(name) > MAX_NAME or not name.isprintable():
        expected = f"{MAX_NAME} printable letters at most"
        raise UserError("bad name of a tensor", file=path, found=ascii(name)[:80], expected=expected)


def _entry(name: str, value: object, path: Path, data_start: int) -> TensorInfo:
    _check_name(name, path)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise UserError(
            "bad entry in a safetensors header", file=path, item=name, expected="dtype, shape, data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise UserError(
            "unknown dtype", file=path, item=name, found=repr(dtype)[:80], expected="one of " + ", ".join(BITS)
        )
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise UserError(
            "bad shape", file=path, item=name, found=str(shape)[:80], expected="a list of integers of 0 or more"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise UserError(
            "bad offsets", file=path, item=name, found=str(offsets)[:80], expected="two integers of 0 or more"
        )
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS:
        raise UserError(
            "shape too large", file=path, item=name, found=str(shape)[:80], expected="fewer than 2^63 elements"
        )
    begin, end = offsets
    bits = elements * BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise UserError(
            "the shape does not fit the bytes it is given",
            file=path,
            item=name,
            found=f"{end - begin} bytes",
            expected=f"{-(-bits // 8)} bytes for {dtype} {list(shape)}",
        )
    return TensorInfo(name, path, dtype, tuple(shape), end - begin, data_start + begin)


def _check_layout(infos: dict[str, TensorInfo], path: Path, data_start: int, file_bytes: int) -> None:
    """The tensors must fill the rest of the file: no gap, no overlap, no end outside, nothing behind."""
    ordered = sorted(infos.values(), key=lambda info: (info.offset, info.nbytes))
    expected = max((info.offset + info.nbytes for info in ordered), default=data_start)
    if expected > file_bytes:
        raise UserError(
            "the file is cut",
            file=path,
            found=f"{file_bytes} bytes",
            expected=f"{expected} bytes",
            hint="Download or copy it again",
        )
    position = data_start
    for info in ordered:
        if info.offset != position:
            fault = "overlaps the tensor before it" if info.offset < position else "leaves a gap before it"
            raise UserError(
                f"the tensor {fault}",
                file=path,
                item=info.name,
                found=f"offset {info.offset - data_start}",
                expected=f"{position - data_start}",
            )
        position += info.nbytes
    if position != file_bytes:
        raise UserError(
            "bytes behind the last tensor", file=path, found=f"{file_bytes} bytes", expected=f"{position} bytes"
        )
