"""FP8 sources: find the scale of each FP8 weight, check its shape, widen weights on read.

DeepSeek-type checkpoints store a weight as F8_E4M3 and, for each 128x128 block, one factor: weight = fp8 * scale. The
factor's tensor is called `weight_scale_inv` (it multiplies all the same); other tools use other names. A raw FP8
weight without its scale is thousands of times too large, so a missing or odd-shaped scale stops the run before any
tensor is read.

Dimension letters: N rows (out), K columns (in), R blocks along N, C blocks along K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_quant.model.errors import UserError
from glm5_quant.model.safetensors_header import TensorInfo

WEIGHT_DTYPES = frozenset({"F8_E4M3", "F8_E5M2"})
SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0"})
SCALE_ENDINGS = ("_scale_inv", "_scale", ".scale_inv", ".scale")
ACTIVATION_ENDINGS = (".input_scale", ".activation_scale", ".input_scale_inv", ".activation_scale_inv")
FOLDED = "block scales, multiplied into their weight when it is read"
STATIC = "activation scales of the FP8 source, of no use without it"


@dataclass(frozen=True)
class Fp8Scheme:
    """How large the block of one scale is; None spans the whole dimension (per channel: (1, None))."""

    block_n: int | None = 128
    block_k: int | None = 128

    def block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        n, k = shape[-2], shape[-1]
        return self.block_n or max(n, 1), self.block_k or max(k, 1)

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Shapes the scale of a weight [..., N, K] may have."""
        block_n, block_k = self.block(shape)
        full = (*shape[:-2], math.ceil(shape[-2] / block_n), math.ceil(shape[-1] / block_k))
        return [full, (), (1,)] if self.block_n is None and len(shape) == 2 else [full]


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The source's own quantization settings, from the top level or the text model's block; {} when there are none."""
    places = (config, config.get("text_config"))
    keys = ("quantization_config", "compression_config")
    found = (place.get(key) for place in places if isinstance(place, Mapping) for key in keys)
    return next((dict(value) for value in found if isinstance(value, Mapping)), {})


def scheme_of(config: Mapping[str, Any], file: Path) -> Fp8Scheme:
    """The block size of an FP8 source: `weight_block_size`, compressed-tensors' strategy, or 128x128."""
    settings = quantization_config(config)
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping):
        weights: Any = next((g["weights"] for g in groups.values() if isinstance(g, Mapping) and g.get("weights")), {})
        weights = weights if isinstance(weights, Mapping) else {}
        strategy = weights.get("strategy")
        if strategy in ("channel", "tensor"):
            return Fp8Scheme(1 if strategy == "channel" else None, None)
        settings = {"weight_block_size": weights.get("block_structure") or [128, 128]}
    size = settings.get("weight_block_size", [128, 128])
    if size is None:
        return Fp8Scheme(None, None)
    if not (isinstance(size, list) and len(size) == 2 and all(type(edge) is int and edge > 0 for edge in size)):
        raise UserError(
            "bad block size", file=file, item="weight_block_size", found=size, expected="two positive integers"
        )
    return Fp8Scheme(size[0], size[1])


def attach_scales(tensors: Mapping[str, TensorInfo], scheme: Fp8Scheme) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors with every FP8 weight joined to its scale, and the names left out with the reason.

    UserError naming the weight when a scale is missing, ambiguous, of an unknown dtype or of the wrong shape.
    """
    weights = [info for info in tensors.values() if info.dtype in WEIGHT_DTYPES]
    joined, dropped = dict(tensors), {}
    for info in weights:
        stem = info.name.removesuffix(".weight")
        scale = _scale_of(info, stem, tensors, scheme)
        joined[info.name] = replace(info, scale=scale)
        dropped[scale.name] = FOLDED
        dropped |= {stem + ending: STATIC for ending in ACTIVATION_ENDINGS if stem + ending in tensors}
    return {name: info for name, info in joined.items() if name not in dropped}, dropped


def _scale_of(info: TensorInfo, stem: str, tensors: Mapping[str, TensorInfo], scheme: Fp8Scheme) -> TensorInfo:
    names = [base + ending for base in (stem + ".weight", stem) for ending in SCALE_ENDINGS]
    found = [name for name in dict.fromkeys(names) if name in tensors]
    if len(found) != 1:
        raise UserError(
            "an FP8 weight needs exactly one tensor of block scales",
            file=info.file,
            item=info.name,
            found=", ".join(found) or "none",
            expected=f"one of {stem}.weight_scale_inv, .weight_scale, .scale",
            hint="The raw FP8 values are of no use without it: download the checkpoint again",
        )
    scale = tensors[found[0]]
    shapes = scheme.scale_shapes(info.shape) if len(info.shape) >= 2 else []
    if scale.shape not in shapes or scale.dtype not in SCALE_DTYPES:
        raise UserError(
            "the block scales do not fit their FP8 weight",
            file=scale.file,
            item=scale.name,
            found=f"{scale.dtype} {list(scale.shape)}",
            expected=f"{' or '.join(str(list(shape)) for shape in shapes)} of {', '.join(sorted(SCALE_DTYPES))} "
            f"for {info.name} {list(info.shape)}",
        )
    return scale


def check_left_over(tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse parts of a quantized matrix beside a plain one: who knows whether that one needs them? An export has parts
    of the same names."""
    for name, info in tensors.items():
        module, _, part = name.rpartition(".weight_")
        plain = tensors.get(f"{module}.weight")
        if plain is not None and part in ("packed", "scale", "zero_point", "shape"):
            raise UserError(
                "a part of a quantized matrix beside a plain one",
                file=info.file,
                item=name,
                found=f"{plain.name} of {plain.dtype}",
                expected="plain weights alone, or FP8 weights with their scales",
                hint="Start from the original model",
            )


def widen(weight_NK: Tensor, scale_RC: Tensor, scheme: Fp8Scheme, *, first_row: int = 0, rows: int = 0) -> Tensor:
    """weight [N, K] FP8 times its block scales [R, C] -> float32 [N, K].

    `first_row` and `rows` place a slice of rows inside a weight of `rows` rows (0: the weight is whole), so that a
    slice of a fused gate-and-up stack meets the right blocks even when it starts inside one.
    """
    n, k = weight_NK.shape
    block_n, block_k = scheme.block((rows or n, k))
    row_blocks = torch.arange(first_row, first_row + n) // block_n
    scale_NC = scale_RC.to(torch.float32).reshape(-1, math.ceil(k / block_k))[row_blocks]
    out_NK = weight_NK.to(torch.float32)
    for column in range(scale_NC.shape[1]):
        out_NK[:, column * block_k : (column + 1) * block_k].mul_(scale_NC[:, column : column + 1])
    return out_NK
