"""The layout kernels compute from ("plane = group"), and the way to and from plain codes.

Letters: E experts (optional, leading), N out, K in, B blocks of 64 along K, C shadow columns,
H = ceil(K/128) pairs of blocks.

A row's K codes are padded to a multiple of 128. Each 128 inputs become 64 bytes: byte j of pair i holds
``codes[128 i + j] | codes[128 i + 64 + j] << 4``. Low nibbles are one whole block and high nibbles the next, so a
kernel reads one plane, multiplies, applies one scale, and nothing has to be interleaved.

Padding contributes exactly zero: inside the ragged last block it repeats that block's zero-point, so (code - zero) is
0; a block of padding only has no scale at all, and every kernel reads an absent scale as 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

GROUP_SIZE = 64
PAIR = 2 * GROUP_SIZE
SLICE_WEIGHTS = 1 << 19
SMALL_WEIGHTS = 1 << 16
ACTIVATIONS = ("none", "int8", "int4-channel", "int4-block")


@dataclass(frozen=True)
class Shadow:
    """Columns of a matrix (or of each expert) whose error is added back: ``y += x[columns] @ residual``.

    columns: int32 [C], input columns, experts one after another; residual: float [C, N] or int8 [C, N];
    scale: float32 [C], only with int8 residuals; offsets: int32 [E + 1], expert e owns rows offsets[e]:offsets[e + 1]
    (a single matrix has offsets [0, C]). Experts may own none.
    """

    columns: Tensor
    residual: Tensor
    offsets: Tensor
    scale: Tensor | None = None

    def __post_init__(self) -> None:
        count = self.columns.numel()
        if self.residual.ndim != 2 or self.residual.shape[0] != count:
            raise ValueError(f"shadow residual is {tuple(self.residual.shape)}, expected [{count}, N]")
        if (self.residual.dtype == torch.int8) != (self.scale is not None):
            raise ValueError("a shadow has scales if, and only if, its residual is int8")

    def to(self, device: torch.device | str) -> Shadow:
        """The same shadow on another device."""
        scale = None if self.scale is None else self.scale.to(device)
        return Shadow(self.columns.to(device), self.residual.to(device), self.offsets.to(device), scale)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a matrix wants done to its inputs first (`inputs.transform`): rotation, then a format of fewer bits.

    hadamard: the orthonormal 64-point rotation of aligned blocks, computed online; activations: "none", "int8",
    "int4-channel" or "int4-block"; channel_scale: float32 [K], the divisors of "int4-channel" that are folded into the
    weights, shared by the experts of a stack, or [E, K] with their own (reference backend only).
    """

    hadamard: bool = False
    activations: str = "none"
    channel_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)}, found {self.activations!r}")
        if (self.activations == "int4-channel") != (self.channel_scale is not None):
            raise ValueError("channel scales belong to int4-channel activations, and they need them")


@dataclass(frozen=True)
class PackedMatrix:
    """One INT4 matrix, or a stack of E of them, ready for the kernels.

    codes: uint8 [(E,) N, 64 H]; scale: float [(E,) N, B] (any of float32, float16, bfloat16); zero: uint8 [(E,) N, B];
    n, k: the true sizes. shadow: see `Shadow`. resident: what the CPU path may do, "int4" (exact) or "int8" (round
    inputs to 8 bits, which is faster; where C kernels cannot run, by a second copy of the weights: docs/kernels.md).
    inputs: what is done to the inputs first, None for nothing. forms: what a backend made of the codes for itself.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    n: int
    k: int
    shadow: Shadow | None = None
    resident: str = "int4"
    inputs: Inputs | None = None
    forms: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1:
            raise ValueError(f"a packed matrix needs n and k of at least 1, found {self.n} x {self.k}")
        if self.resident not in ("int4", "int8"):
            raise ValueError(f"resident must be int4 or int8, found {self.resident!r}")
        _check("codes", self.codes, (*self.codes.shape[:-2], self.n, padded_k(self.k) // 2), (torch.uint8,))
        blocks = (*self.codes.shape[:-2], self.n, block_count(self.k))
        _check("scale", self.scale, blocks, (torch.float32, torch.float16, torch.bfloat16))
        _check("zero", self.zero, blocks, (torch.uint8,))

    @property
    def experts(self) -> int | None:
        """The number of stacked matrices, None for a single one."""
        return self.codes.shape[0] if self.codes.ndim == 3 else None

    def to(self, device: torch.device | str) -> PackedMatrix:
        """The same matrix on another device."""
        shadow = None if self.shadow is None else self.shadow.to(device)
        codes, scale, zero = (part.to(device) for part in (self.codes, self.scale, self.zero))
        inputs = self.inputs
        if inputs is not None and inputs.channel_scale is not None:
            inputs = replace(inputs, channel_scale=inputs.channel_scale.to(device))
        return replace(self, codes=codes, scale=scale, zero=zero, shadow=shadow, inputs=inputs)


def block_count(k: int) -> int:
    """Blocks of 64 in a row of k inputs; the last may be ragged."""
    return -(-k // GROUP_SIZE)


def padded_k(k: int) -> int:
    """k rounded up to whole pairs of blocks."""
    return -(-k // PAIR) * PAIR


def from_codes(
    codes_NK: Tensor, scale: Tensor, zero: Tensor, *, shadow: Shadow | None = None, resident: str = "int4"
) -> PackedMatrix:
    """Pack plain codes (uint8 0..15, [(E,) N, K]) with their grid (scale and zero, [(E,) N, B])."""
    if codes_NK.dtype != torch.uint8 or codes_NK.ndim not in (2, 3):
        raise ValueError(f"codes must be uint8 [(E,) N, K], found {codes_NK.dtype} {tuple(codes_NK.shape)}")
    *lead, n, k = codes_NK.shape
    if codes_NK.numel() and int(codes_NK.max()) > 15:
        raise ValueError(f"codes must be 0..15, found {int(codes_NK.max())}")
    padded = codes_NK.new_zeros(*lead, n, padded_k(k))
    padded[..., :k] = codes_NK
    padded[..., k : block_count(k) * GROUP_SIZE] = zero[..., -1:]
    planes = padded.view(*lead, n, -1, 2, GROUP_SIZE)
    codes = (planes[..., 0, :] | planes[..., 1, :] << 4).reshape(*lead, n, -1)
    return PackedMatrix(codes, scale.contiguous(), zero.contiguous(), n, k, shadow, resident)


def to_codes(packed: PackedMatrix) -> Tensor:
    """The plain codes back, uint8 [(E,) N, K]: `from_codes` undone bit for bit."""
    return unpack_planes(packed.codes)[..., : packed.k]


def unpack_planes(codes: Tensor) -> Tensor:
    """Kernel bytes [..., 64 H] to padded codes [..., 128 H]."""
    pairs = codes.view(*codes.shape[:-1], -1, 1, GROUP_SIZE)
    return torch.cat([pairs & 15, pairs >> 4], dim=-2).flatten(-3)


def dequantize(packed: PackedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Weights [(E,) N, K]: (code - zero) * scale computed in float32, then rounded once to dtype. No shadow."""
    codes, scale, zero = (part.reshape(-1, part.shape[-1]) for part in (packed.codes, packed.scale, packed.zero))
    out = torch.empty(codes.shape[0], scale.shape[1] * GROUP_SIZE, dtype=dtype, device=codes.device)
    # On a CPU a slice of rows at a time stays in the cache, which makes all of it four times faster.
    step = max(1, SLICE_WEIGHTS // packed.k) if codes.device.type == "cpu" else codes.shape[0]
    for at in (slice(start, start + step) for start in range(0, codes.shape[0], step)):
        out[at] = _widen(codes[at], scale[at], zero[at])
    return out.view(*packed.codes.shape[:-1], -1)[..., : packed.k]


def _widen(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Float32 weights of whole blocks, [R, 64 B]; uint8 differences wrap to the int8 they stand for."""
    pairs = codes.view(codes.shape[0], -1, GROUP_SIZE)
    planes = torch.empty(*pairs.shape[:2], 2, GROUP_SIZE, dtype=torch.uint8, device=codes.device)
    torch.bitwise_and(pairs, 15, out=planes[:, :, 0])
    torch.bitwise_right_shift(pairs, 4, out=planes[:, :, 1])
    blocks = planes.view(codes.shape[0], -1, GROUP_SIZE)[:, : scale.shape[1]].sub_(zero[..., None])
    return blocks.view(torch.int8).to(torch.float32).mul_(scale[..., None].to(torch.float32)).flatten(1)


def rows(packed: PackedMatrix, start: int, stop: int) -> PackedMatrix:
    """Output rows start:stop as a view without the shadow (callers add it once, over all rows)."""
    cut: tuple[Any, ...] = (..., slice(start, stop), slice(None))
    codes, scale, zero = (part[cut] for part in (packed.codes, packed.scale, packed.zero))
    return replace(packed, codes=codes, scale=scale, zero=zero, n=min(stop, packed.n) - start, shadow=None)


def weights(packed: PackedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """`dequantize` of a single matrix, remembered if it is so small that widening costs more than memory."""
    if packed.n * packed.k > SMALL_WEIGHTS:
        return dequantize(packed, dtype)
    if dtype not in packed.forms:
        with torch.inference_mode(False):  # a later pass may want gradients
            packed.forms[dtype] = dequantize(packed, dtype)
    return cast(Tensor, packed.forms[dtype])


def expert(packed: PackedMatrix, e: int) -> PackedMatrix:
    """One matrix of a stack, as a view that is remembered; its shadow comes along."""
    if e not in packed.forms:
        packed.forms[e] = _expert(packed, e)
    return cast(PackedMatrix, packed.forms[e])


def _expert(packed: PackedMatrix, e: int) -> PackedMatrix:
    shadow = None if packed.shadow is None else _expert_shadow(packed.shadow, e)
    inputs = packed.inputs
    if inputs is not None and inputs.channel_scale is not None and inputs.channel_scale.ndim == 2:
        inputs = replace(inputs, channel_scale=inputs.channel_scale[e])
    codes, scale, zero = packed.codes[e], packed.scale[e], packed.zero[e]
    return replace(packed, codes=codes, scale=scale, zero=zero, shadow=shadow, inputs=inputs)


def _expert_shadow(shadow: Shadow, e: int) -> Shadow | None:
    start, stop = shadow.offsets[e : e + 2].tolist()
    if start == stop:
        return None
    scale = None if shadow.scale is None else shadow.scale[start:stop]
    return Shadow(
        shadow.columns[start:stop], shadow.residual[start:stop], shadow.offsets.new_tensor([0, stop - start]), scale
    )


def _check(name: str, found: Tensor, shape: torch.Size | tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(found.shape) != tuple(shape) or found.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"packed {name}: expected {wanted} {tuple(shape)}, found {found.dtype} {tuple(found.shape)}")
