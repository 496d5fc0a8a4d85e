"""Open a checkpoint folder safely and read it one tensor at a time.

Opening reads config, index and the headers of all shards, checks them against each other and against the files'
sizes, and touches no tensor. Everything a hostile or damaged folder can lie about is refused here, in the first
second, for every command. Nothing in the folder is ever executed, and nothing is written to it.

Tensors are read with plain reads into fresh memory rather than through a memory map: mapped pages stay in the
process's resident size, which would make peak memory follow the model instead of one tensor.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from glm5_quant.model import fp8
from glm5_quant.model.errors import UserError
from glm5_quant.model.files import read_error, read_json, side_files, source_folder, weight_files
from glm5_quant.model.safetensors_header import TensorInfo, read_header

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
OPEN_FILES = 8  # handles kept; a GLM-5 folder has hundreds of shards


class Checkpoint:
    """A checked folder of safetensors: `config`, `tensors` by name (sorted), and lazy reads.

    `dropped` names what `tensors` leaves out, with the reason (scales of FP8 weights); everything else of the source
    is in `tensors`. Reads are safe from several threads.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        tensors: dict[str, TensorInfo],
        dropped: dict[str, str],
        scheme: fp8.Fp8Scheme,
    ) -> None:
        self.folder, self.config, self.tensors, self.dropped = folder, config, tensors, dropped
        self._scheme = scheme
        self._handles: OrderedDict[Path, FileIO] = OrderedDict()
        self._lock = Lock()

    @property
    def config_file(self) -> Path:
        return self.folder / "config.json"

    @property
    def shards(self) -> list[Path]:
        """Weight files in name order."""
        return sorted({info.file for info in self.tensors.values()})

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the model is meant to run in: the config's word, bfloat16 for FP8 sources.

        A config that says float16 over weights stored wider is overruled: narrowing to FP16 turns small weights into 0.
        """
        text = self.config.get("text_config")
        words = [c.get(key) for c in (self.config, text) if isinstance(c, dict) for key in ("dtype", "torch_dtype")]
        named = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        asked = next((named[word] for word in words if isinstance(word, str) and word in named), None)
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += info.nbytes
        main = next((dtype for dtype, _ in sizes.most_common() if dtype in ("BF16", "F16", "F32")), "BF16")
        stored = torch.bfloat16 if sizes.keys() & fp8.WEIGHT_DTYPES else DTYPES[main]
        if asked is None or (asked == torch.float16 and stored != torch.float16):
            return stored
        return asked

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One whole tensor, in the stored dtype (FP8: widened, in `self.dtype`) or in `dtype`.

        UserError naming file, tensor and first bad index when a value is NaN or infinite.
        """
        info = self.info(name)
        if info.scale is None or len(info.shape) == 2:
            return self._rows(info, 0, info.shape[0] if info.shape else 1, dtype)
        out = torch.empty(info.shape, dtype=dtype or self.dtype)
        for index in range(info.shape[0]):
            out[index] = self.read_slice(name, index, dtype=dtype)
        return out

    def read_slice(
        self, name: str, index: int | None, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Rows start..stop of entry `index` of a fused stack [E, N, K] -> [stop - start, K].

        `index` None: rows of a plain matrix.
        """
        info = self.info(name)
        if index is not None:
            n, k = info.shape[-2:]
            entry_bytes = info.nbytes // info.shape[0]
            stop = n if stop is None else stop
            return self._rows(info, start, stop, dtype, base=(index, info.offset + index * entry_bytes, (n, k)))
        return self._rows(info, start, info.shape[0] if stop is None else stop, dtype)

    def read_rows(self, name: str, rows: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Chosen rows of a plain matrix -> [len(rows), K]; neighbours are read together. For embeddings of any size."""
        info, parts, start = self.info(name), [], 0
        for position in range(1, len(rows) + 1):
            if position == len(rows) or rows[position] != rows[position - 1] + 1:
                parts.append(self._rows(info, rows[start], rows[position - 1] + 1, dtype))
                start = position
        return torch.cat(parts)

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise UserError("no such tensor", file=self.folder, item=name)
        return self.tensors[name]

    def side_files(self) -> list[Path]:
        """Files an export copies byte for byte: tokenizer, templates, generation settings, licence, .py (never run);
        README.md under another name.

        Absolute paths inside `folder`, in name order, also from sub-folders; no weights, no index, no config.json.
        """
        return side_files(self.folder)

    def close(self) -> None:
        while self._handles:
            self._handles.popitem()[1].close()

    def __del__(self) -> None:
        self.close()

    def _rows(
        self,
        info: TensorInfo,
        start: int,
        stop: int,
        dtype: torch.dtype | None,
        base: tuple[int, int, tuple[int, ...]] | None = None,
    ) -> Tensor:
        lead, offset, shape = base or (None, info.offset, info.shape)
        if dtype == torch.float16 and info.dtype != "F16":
            raise ValueError(f"{info.name}: {info.dtype} is never narrowed to FP16, small weights would become 0")
        row_shape = shape[1:]
        row_bytes = info.nbytes // max(math.prod(info.shape), 1) * math.prod(row_shape)
        out_shape = (stop - start, *row_shape) if shape else ()
        value = self._raw(info, offset + start * row_bytes, out_shape)
        if info.scale is not None:
            scale = self._scale(info.scale, lead)
            value = fp8.widen(value, scale, self._scheme, first_row=start, rows=shape[0])
        self._check_finite(value, info, lead, start)
        target = dtype or (self.dtype if info.scale is not None else value.dtype)
        return value.to(target) if value.is_floating_point() else value

    def _scale(self, info: TensorInfo, lead: int | None) -> Tensor:
        if lead is None:
            scale = self._raw(info, info.offset, info.shape)
        else:
            scale = self._raw(info, info.offset + lead * (info.nbytes // info.shape[0]), info.shape[1:])
        scale = scale.to(torch.float32)
        self._check_finite(scale, info, lead, 0)
        return scale

    def _raw(self, info: TensorInfo, offset: int, shape: tuple[int, ...]) -> Tensor:
        if info.dtype not in DTYPES:
            raise UserError("values of this dtype cannot be read", file=info.file, item=info.name, found=info.dtype)
        dtype = DTYPES[info.dtype]
        buffer = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        try:
            with self._lock:
                complete = self._fill(buffer.numpy().data, info.file, offset)
        except OSError as error:
            raise read_error(error, info.file) from None
        if not complete:
            raise UserError("the file became shorter while it was read", file=info.file, item=info.name)
        return buffer.view(dtype).reshape(shape)

    def _fill(self, view: memoryview, path: Path, offset: int) -> bool:
        """Bytes of a file from `offset` on; False where it ends before `view` is full."""
        handle = self._handle(path)
        handle.seek(offset)
        done = 0
        while done < len(view):
            count = handle.readinto(view[done:])
            if not count:
                return False
            done += count
        return True

    def _handle(self, path: Path) -> FileIO:
        if path in self._handles:
            self._handles.move_to_end(path)
            return self._handles[path]
        while len(self._handles) >= OPEN_FILES:
            self._handles.popitem(last=False)[1].close()
        self._handles[path] = FileIO(path)
        return self._handles[path]

    def _check_finite(self, value: Tensor, info: TensorInfo, lead: int | None, first_row: int) -> None:
        if not value.is_floating_point() or not value.numel():
            return
        if value.dtype.itemsize == 1:
            value = value.float()  # FP8 has no order of its own
        low, high = torch.aminmax(value)  # one pass, no temporary; NaN spreads to both
        if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
            return
        index = torch.nonzero(~torch.isfinite(value.to(torch.float32)))[0].tolist()
        bad = value[tuple(index)].item()
        if index:
            index[0] += first_row
        raise UserError(
            "a weight is not finite",
            file=info.file,
            item=info.name,
            found=f"{bad} at {([] if lead is None else [lead]) + index}",
            expected="finite numbers",
            hint="The file may be damaged: compare its checksum with the publisher's, or download it again",
        )


def open_checkpoint(path_or_hub_id: str | Path) -> Checkpoint:
    """Open a folder, or a hub id `org/name` (downloaded or taken from the cache), after checking everything but the
    values.

    UserError for a missing folder, pickle-only weights, an index that lies or leaves the folder, a cut or malformed
    shard, an FP8 weight without its scale. Takes well under a second; reads no tensor.
    """
    folder = source_folder(path_or_hub_id)
    try:
        return _open(folder)
    except OSError as error:
        raise read_error(error, Path(error.filename or folder)) from error


def _open(folder: Path) -> Checkpoint:
    config_file = folder / "config.json"
    config = read_json(config_file)
    tensors: dict[str, TensorInfo] = {}
    for file, named in weight_files(folder).items():
        found = read_header(file)
        _check_index(file, named, found)
        tensors |= found
    if not tensors:
        raise UserError("no tensors in this checkpoint", file=folder)
    scheme = fp8.scheme_of(config, config_file)
    tensors, dropped = fp8.attach_scales(dict(sorted(tensors.items())), scheme)
    return Checkpoint(folder, config, tensors, dropped, scheme)


def _check_index(file: Path, named: set[str] | None, found: dict[str, TensorInfo]) -> None:
    if named is None:
        return
    for names, fault in (
        (named - found.keys(), "is not in it"),
        (found.keys() - named, "is in it but not in the index"),
    ):
        if names:
            raise UserError(
                f"index and shard disagree: the tensor {fault} ({len(names)} such)",
                file=file,
                item=min(names),
                hint="The shard or model.safetensors.index.json is from another version: download both again",
            )
