"""Shard headers are hostile: each lie costs one message, in under a second, and no memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from glm5_quant.model.errors import UserError
from glm5_quant.model.safetensors_header import read_header

ONE_F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(body) if length is None else length).to_bytes(8, "little") + body + data)
    return path


def entry(shape: Any = (1,), offsets: Any = (0, 4), dtype: Any = "F32") -> dict[str, Any]:
    as_list = [list(value) if isinstance(value, tuple) else value for value in (shape, offsets)]
    return {"dtype": dtype, "shape": as_list[0], "data_offsets": as_list[1]}


LIES: dict[str, tuple[Any, bytes, str]] = {
    "shape larger than its bytes": ({"t": entry((1000, 1000))}, b"1234", "does not fit the bytes"),
    "offset past the end": ({"t": entry((2,), (0, 8))}, b"1234", "the file is cut"),
    "negative offset": ({"t": entry((1,), (-4, 0))}, b"1234", "bad offsets"),
    "end before begin": ({"t": entry((1,), (4, 0))}, b"1234", "does not fit the bytes"),
    "three offsets": ({"t": entry((1,), (0, 4, 8))}, b"1234", "bad offsets"),
    "offset is a float": ({"t": entry((1,), (0, 4.0))}, b"1234", "bad offsets"),
    "offset is true": ({"t": entry((1,), (False, 4))}, b"1234", "bad offsets"),
    "unknown dtype": ({"t": entry(dtype="Q9")}, b"1234", "unknown dtype"),
    "dtype is a list": ({"t": entry(dtype=["F32"])}, b"1234", "unknown dtype"),
    "negative shape": ({"t": entry((-1, -1))}, b"1234", "bad shape"),
    "shape is a number": ({"t": entry(1)}, b"1234", "bad shape"),
    "shape product overflows 64 bits": ({"t": entry((2**32, 2**32, 2**32))}, b"1234", "shape too large"),
    "a thousand dimensions": ({"t": entry([1] * 1000)}, b"1234", "bad shape"),
    "a size of a thousand digits": ({"t": entry((10**1000,))}, b"1234", "bad shape"),
    "overlap": ({"a": entry(), "b": entry((2,), (0, 8))}, b"12345678", "overlaps"),
    "gap": ({"a": entry(), "b": entry((1,), (8, 12))}, bytes(12), "leaves a gap"),
    "gap at the start": ({"a": entry((1,), (4, 8))}, bytes(8), "leaves a gap"),
    "bytes behind the last tensor": ({"a": entry()}, bytes(12), "bytes behind the last"),
    "half a byte": ({"t": entry((1,), (0, 0), "F4")}, b"", "does not fit the bytes"),
    "a key too many": ({"t": ONE_F32 | {"lie": 1}}, b"1234", "bad entry"),
    "entry is a list": ({"t": [1]}, b"1234", "bad entry"),
    "metadata holds a number": ({"__metadata__": {"format": 1}, "t": ONE_F32}, b"1234", "__metadata__"),
    "metadata is a list": ({"__metadata__": [], "t": ONE_F32}, b"1234", "__metadata__"),
    "no JSON": (b"{'a'", b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "a list": (b"[]", b"", "no JSON object"),
    "nested without end": (b'{"a":' * 50_000, b"", "not valid JSON"),
    "half a character in a name": ({"x\ud800y": ONE_F32}, b"1234", "bad name of a tensor"),
    "a terminal's commands in a name": ({"x\x1b[2Jy": ONE_F32}, b"1234", "bad name of a tensor"),
    "a name without end": ({"x" * 5000: ONE_F32}, b"1234", "bad name of a tensor"),
    "a name twice": (
        b'{"t":' + json.dumps(ONE_F32).encode() + b',"t":' + json.dumps(ONE_F32).encode() + b"}",
        b"1234",
        "twice",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_at_once_and_names_the_file(tmp_path: Path, lie: str) -> None:
    header, data, words = LIES[lie]
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(UserError, match=words) as caught:
        read_header(path)
    seconds = time.process_time() - begin
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert seconds < 1 and peak_bytes < 30 * 2**20


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001])
def test_a_header_length_near_the_limit_of_64_bits_allocates_nothing(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "bad.safetensors", b"{}", length=length)
    tracemalloc.start()
    with pytest.raises(UserError, match="header too long"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 5, 7])
def test_a_file_too_short_for_a_header_says_how_many_bytes_it_has(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(UserError, match=rf"the file is cut.*found {size} bytes"):
        read_header(path)


def test_a_file_cut_inside_its_header_says_expected_and_found_size(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "cut.safetensors", b"{}", length=500)
    with pytest.raises(UserError, match=r"inside its header; found 10 bytes; expected at least 508 bytes"):
        read_header(path)


def test_a_good_file_gives_dtype_shape_and_place_of_every_tensor(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 7),
        "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "long": torch.tensor([2**40]),
    }
    save_file(tensors, tmp_path / "good.safetensors")  # without metadata
    infos = read_header(tmp_path / "good.safetensors")
    content = (tmp_path / "good.safetensors").read_bytes()
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == {
        "scalar": ("F32", ()),
        "empty": ("F32", (0, 7)),
        "bf16": ("BF16", (2, 3)),
        "long": ("I64", (1,)),
    }
    info = infos["bf16"]
    found = torch.frombuffer(bytearray(content[info.offset : info.offset + info.nbytes]), dtype=torch.bfloat16)
    assert torch.equal(found.reshape(2, 3), tensors["bf16"])


def test_missing_metadata_and_an_empty_file_of_tensors_are_no_obstacle(tmp_path: Path) -> None:
    assert read_header(raw_file(tmp_path / "none.safetensors", {})) == {}
    assert read_header(raw_file(tmp_path / "one.safetensors", {"t": ONE_F32}, b"1234"))["t"].nbytes == 4
