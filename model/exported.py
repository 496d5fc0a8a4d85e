"""An export as something to read: its scheme, its packed matrices, and a view of it as if they were plain weights.

Letters: N out, K in, B blocks along K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from glm5_quant.model.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.export_plan import BYTES_PER_WORD, CODES_PER_WORD, PACKED, PART_ENDINGS, SCALE, SHAPE, ZERO
from glm5_quant.model.fp8 import Fp8Scheme
from glm5_quant.model.scheme import Scheme, read_scheme, without_quantization
from glm5_quant.quant.eight import ZERO as EIGHT_ZERO
from glm5_quant.quant.grid import Grid, dequantize
from glm5_quant.quant.packing import unpack_bytes, unpack_codes, unpack_zeros
from glm5_quant.quant.rotation import rotate

SCALE_DTYPES = ("BF16", "F16", "F32")
SYMMETRIC_ZERO = 8


@dataclass(frozen=True)
class Exported:
    """A folder whose config and tensors agree on what is INT4. `shapes`: [N, K] of each packed matrix, by module."""

    checkpoint: Checkpoint
    scheme: Scheme
    shapes: dict[str, tuple[int, int]]

    def read(self, module: str) -> tuple[Tensor, Grid]:
        """Codes uint8 [N, K] and grid (scale in its stored dtype [N, B], zero uint8 [N, B]) of one matrix."""
        n, k = self.shapes[module]
        packed, scale = self.checkpoint.read(module + PACKED), self.checkpoint.read(module + SCALE)
        if module in self.eight:
            zero = torch.full(scale.shape, EIGHT_ZERO, dtype=torch.uint8)
            return unpack_bytes(packed, k), Grid(scale=scale, zero=zero, group_size=self.scheme.group_size)
        codes = unpack_codes(packed, k)
        if self.scheme.symmetric:
            zero = torch.full(scale.shape, SYMMETRIC_ZERO, dtype=torch.uint8)
        else:
            zero = unpack_zeros(self.checkpoint.read(module + ZERO), n)
        return codes, Grid(scale=scale, zero=zero, group_size=self.scheme.group_size)

    def weight(self, module: str, activation_scale_K: Tensor | None = None) -> Tensor:
        """The matrix that plain inputs meet, float32 [N, K], comparable with the source's: folded activation scales
        (the sidecar's, needed in mode int4-channel only) and rotation are taken back."""
        weight_NK = dequantize(*self.read(module))
        if module in self.eight:
            return weight_NK
        if self.scheme.inputs.activations == "int4-channel":
            if activation_scale_K is None:
                raise ValueError(f"{module}: activation scales are folded into its codes, and were not given")
            weight_NK = weight_NK / activation_scale_K
        return rotate(weight_NK) if self.scheme.inputs.rotation == "full" else weight_NK

    @cached_property
    def eight(self) -> frozenset[str]:
        """Modules stored in 8 bits."""
        return frozenset(self.scheme.eight)

    @property
    def four(self) -> dict[str, tuple[int, int]]:
        """`shapes` of the others."""
        return {module: shape for module, shape in self.shapes.items() if module not in self.eight}

    @cached_property
    def plain_view(self) -> Checkpoint:
        """Names, shapes and dtypes as if nothing were packed, for code that maps names; its packed weights cannot be
        read."""
        tensors = {n: info for n, info in self.checkpoint.tensors.items() if not n.endswith(PART_ENDINGS)}
        for module, shape in self.shapes.items():
            scale = self.checkpoint.tensors[module + SCALE]
            tensors[f"{module}.weight"] = replace(scale, name=f"{module}.weight", shape=shape)
        config = without_quantization(self.checkpoint.config)
        return Checkpoint(self.checkpoint.folder, config, dict(sorted(tensors.items())), {}, Fp8Scheme())


def open_exported(folder: str | Path) -> Exported | None:
    """Open an export; None for a folder that is not quantized at all.

    Raises:
        UserError: config says INT4 but the tensors do not, or the reverse, or parts of a matrix do not fit together.
    """
    return as_exported(open_checkpoint(folder))


def as_exported(checkpoint: Checkpoint) -> Exported | None:
    """The same for a checkpoint that is open already."""
    scheme = read_scheme(checkpoint.config, file=checkpoint.config_file)
    modules = [name.removesuffix(PACKED) for name in checkpoint.tensors if name.endswith(PACKED)]
    if scheme is None and not modules:
        return None
    if scheme is None or not modules:
        raise UserError(
            "config and weights disagree about quantization",
            file=checkpoint.config_file,
            found=f"{len(modules)} packed matrices in the weight files",
            expected="some" if scheme else "none, since config.json has no pack-quantized quantization_config",
            hint="Config and weights come from different folders: export again",
        )
    exported = Exported(checkpoint, scheme, {module: _shape(checkpoint, module) for module in modules})
    stray = sorted(exported.eight - exported.shapes.keys())
    if stray:
        raise UserError("named as stored in 8 bits, but not packed", file=checkpoint.config_file, item=stray[0])
    for module in modules:
        problem = part_problem(exported, module)
        if problem is not None:
            raise UserError(problem, file=checkpoint.folder, item=module)
    return exported


def part_problem(exported: Exported, module: str) -> str | None:
    """What is wrong with the parts of one matrix, judged by headers and its stored shape; None when nothing is."""
    tensors, scheme = exported.checkpoint.tensors, exported.scheme
    n, k = exported.shapes[module]
    blocks, eight = -(-k // scheme.group_size), module in exported.eight
    per_word = BYTES_PER_WORD if eight else CODES_PER_WORD
    wanted = {PACKED: (("I32",), (n, -(-k // per_word))), SCALE: (SCALE_DTYPES, (n, blocks))}
    if not scheme.symmetric and not eight:
        wanted[ZERO] = (("I32",), (-(-n // CODES_PER_WORD), blocks))
    elif module + ZERO in tensors:
        return "config says symmetric, but zero-points are stored"
    if f"{module}.weight" in tensors:
        return "stored twice, packed and plain"
    for part, (dtypes, shape) in wanted.items():
        info = tensors.get(module + part)
        if info is None:
            return f"{part.lstrip('.')} is missing"
        if info.dtype not in dtypes or info.shape != shape:
            return f"{part.lstrip('.')} is {info.dtype} {list(info.shape)}, expected {dtypes[0]} {list(shape)}"
    return None


def _shape(checkpoint: Checkpoint, module: str) -> tuple[int, int]:
    info: TensorInfo | None = checkpoint.tensors.get(module + SHAPE)
    if info is None or info.shape != (2,) or info.dtype not in ("I64", "I32"):
        found = "none" if info is None else f"{info.dtype} {list(info.shape)}"
        raise UserError("no stored shape", file=checkpoint.folder, item=module + SHAPE, found=found, expected="I64 [2]")
    n, k = checkpoint.read(module + SHAPE).tolist()
    if n < 1 or k < 1:
        raise UserError("not a matrix", file=info.file, item=module + SHAPE, found=[n, k], expected="at least 1 x 1")
    return n, k
