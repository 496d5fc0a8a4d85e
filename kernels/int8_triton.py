"""4-bit weights times 8-bit tokens (W4A8; W4A4 with codes widened to int8) on a GPU: exact integer dots.

Letters: N out, K in, B blocks, T tokens, R rows of weights in a tile.

y = sum over blocks of scale * token scale * (codes . q - zero * sum(q)); what is in brackets is an integer of at most
64 * 15 * 127, exact in int32 and, by the mantissa of 1.5 * 2^23, turned into a float32 by an addition.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5_quant.kernels import inputs
from glm5_quant.kernels.layout import GROUP_SIZE, PackedMatrix, block_count, padded_k, to_codes
from glm5_quant.kernels.linear_triton import finish
from glm5_quant.kernels.table import Config, config_for
from glm5_quant.kernels.triton_blocks import GROUP, load_grid
from glm5_quant.kernels.triton_host import kernel_input, launch_options, uses_asm, without_gaps

EXACT = {"num_warps": 8, "enable_fp_fusion": False}  # of `_quantize`: every operation rounds as PyTorch's does
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32, as in quant/activation.py
LOW_INT8 = tl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
HIGH_INT8 = tl.constexpr("{.reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F;}")


class Tokens(NamedTuple):
    """codes: int8 [T, K padded to 128]; scale: float32 [T, 1] or [T, B]; sums: int32 [T, B], of each block's codes."""

    codes: Tensor
    scale: Tensor
    sums: Tensor


@triton.jit
def _quantize(
    x_ptr, codes_ptr, scale_ptr, sums_ptr, k, blocks, x_stride, codes_stride,
    LEVELS: tl.constexpr, BY_BLOCK: tl.constexpr, SYMMETRIC: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_BJ = tl.load(x_ptr + token * x_stride + at, mask=at < k, other=0.0).to(tl.float32)
    low_B, high_B = tl.minimum(tl.min(x_BJ, axis=1), 0.0), tl.maximum(tl.max(x_BJ, axis=1), 0.0)
    bottom_B, top_B = tl.zeros((BLOCKS,), tl.float32) - LEVELS, tl.zeros((BLOCKS,), tl.float32) + LEVELS
    lost_B = tl.sum(x_BJ * 0.0, axis=1)  # NaN where an input is not finite, which minima and maxima pass over
    if not SYMMETRIC:
        scale_B = tl.maximum(tl.div_rn(high_B, top_B) - tl.div_rn(low_B, top_B), TINY) + lost_B
        share_B = tl.div_rn(low_B * -0.5, tl.maximum(high_B * 0.5 - low_B * 0.5, TINY))
        zero_B = (share_B * LEVELS + 12582912.0) - 12582912.0
        bottom_B, top_B = -zero_B, LEVELS - zero_B
    elif BY_BLOCK:
        scale_B = tl.maximum(tl.div_rn(tl.maximum(high_B, -low_B), top_B), TINY) + lost_B
    else:
        peak = tl.max(tl.maximum(high_B, -low_B), axis=0)
        scale_B = tl.maximum(tl.div_rn(peak + tl.zeros((BLOCKS,), tl.float32), top_B), TINY) + tl.sum(lost_B, axis=0)
    ratio = tl.div_rn(x_BJ, scale_B[:, None] + tl.zeros_like(x_BJ))
    rounded = (ratio + 12582912.0) - 12582912.0  # nearest, ties to even: what is above 2^23 has no fraction
    codes_BJ = tl.minimum(tl.maximum(rounded, bottom_B[:, None]), top_B[:, None]).to(tl.int32)
    tl.store(codes_ptr + token * codes_stride + at, codes_BJ.to(tl.int8), mask=at < codes_stride)
    tl.store(sums_ptr + token * blocks + block, tl.sum(codes_BJ, axis=1), mask=block < blocks)
    if BY_BLOCK:
        tl.store(scale_ptr + token * blocks + block, scale_B, mask=block < blocks)
    else:
        tl.store(scale_ptr + token + block, scale_B, mask=block < 1)


@triton.jit
def int8_codes(codes, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Bytes to int8 0..15, from the low or the high nibbles."""
    if ASM:
        PTX: tl.constexpr = HIGH_INT8 if HIGH else LOW_INT8
        nibble = tl.inline_asm_elementwise(PTX, "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4)
    else:
        nibble = ((codes >> 4) if HIGH else (codes & 15)).to(tl.int8)
    return nibble


@triton.jit
def _w4a8(
    q_ptr, x_scale_ptr, sums_ptr, codes_ptr, scale_ptr, zero_ptr, parts_ptr, tokens, n, blocks,
    q_stride, codes_stride, scale_stride, zero_stride, pairs_per_split,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, EVEN_B: tl.constexpr, BY_BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(2) * pairs_per_split
    last = tl.minimum(first + pairs_per_split, (blocks + 1) // 2)
    near_R, near_T = tl.minimum(row, n - 1), tl.minimum(token, tokens - 1).to(tl.int64)
    j, both = tl.arange(0, GROUP), tl.arange(0, 2)[None, :]
    codes_ptr += near_R[:, None] * codes_stride + first * GROUP + j[None, :]
    q_ptr += near_T[:, None] * q_stride + first * 2 * GROUP + j[None, :]
    scale_R2 = scale_ptr + near_R[:, None] * scale_stride + both
    zero_R2 = zero_ptr + near_R[:, None] * zero_stride + both
    acc_TR = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for i in range(first, last):
        codes = tl.load(codes_ptr)
        scale, zero = load_grid(scale_R2, zero_R2, i, blocks, EVEN_B)
        scale_low, scale_high = tl.split(scale.to(tl.float32))
        zero_low, zero_high = tl.split(zero.to(tl.int32))
        for h in tl.static_range(2):
            q_TK = tl.load(q_ptr + h * GROUP)
            scale_R = scale_high if h else scale_low
            zero_R = zero_high if h else zero_low
            block = tl.minimum(2 * i + h, blocks - 1)  # a block beyond the end has scale 0
            sums_T = tl.load(sums_ptr + near_T * blocks + block)
            start_TR = 0x4B400000 - sums_T[:, None] * zero_R[None, :]
            dots_TR = tl.dot(q_TK, int8_codes(codes, h, ASM).T, start_TR, out_dtype=tl.int32)
            float_TR = dots_TR.to(tl.float32, bitcast=True) - 12582912.0
            if BY_BLOCK:
                float_TR *= tl.load(x_scale_ptr + near_T * blocks + block)[:, None]
            acc_TR += float_TR * scale_R[None, :]
        codes_ptr += GROUP
        q_ptr += 2 * GROUP
    if not BY_BLOCK:
        acc_TR *= tl.load(x_scale_ptr + near_T)[:, None]
    out_T = (tl.program_id(2) * tokens + token.to(tl.int64)) * n
    tl.store(parts_ptr + out_T[:, None] + row[None, :], acc_TR, mask=(token < tokens)[:, None] & (row < n)[None, :])


def linear(x_TK: Tensor, packed: PackedMatrix, bias_N: Tensor | None = None, config: Config | None = None) -> Tensor:
    """x @ W^T + bias with x rounded to packed.inputs' activation format, [T, N] in x's dtype. No shadow."""
    if packed.inputs is None or packed.inputs.activations == "none" or packed.shadow is not None:
        raise ValueError("the integer kernel needs an activation format and takes no shadow")
    _, scale = kernel_input(x_TK, packed.scale)
    out_TN = x_TK.new_empty(x_TK.shape[0], packed.n)
    if x_TK.shape[0]:
        tokens = quantize(inputs.prepare(x_TK.float(), packed.inputs), packed.inputs.activations)
        config = config or config_for("int8", x_TK.shape[0], packed.n, packed.k)
        finish(w4a8(tokens, packed, scale, config), bias_N, out_TN)
    return out_TN


def quantize(x_TK: Tensor, activations: str) -> Tokens:
    """Tokens to integer codes with their scales and block sums, one program a token; formats as in inputs.py."""
    tokens, k = x_TK.shape
    blocks, width = block_count(k), padded_k(k)
    by_block = activations != "int4-channel"
    codes = torch.empty(tokens, width, dtype=torch.int8, device=x_TK.device)
    scale = torch.empty(tokens, blocks if by_block else 1, dtype=torch.float32, device=x_TK.device)
    sums = torch.empty(tokens, blocks, dtype=torch.int32, device=x_TK.device)
    x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
    _quantize[(tokens,)](
        x_TK, codes, scale, sums, k, blocks, x_TK.stride(0), width, LEVELS=inputs.LEVELS[activations],
        BY_BLOCK=by_block, SYMMETRIC=activations != "int4-block", BLOCKS=triton.next_power_of_2(width // GROUP_SIZE),
        **EXACT,
    )  # fmt: skip
    return Tokens(codes, scale, sums)


def quantize_plain(x_TK: Tensor, activations: str) -> Tokens:
    """The twin of `quantize`."""
    codes, scale, sums = inputs.quantize(x_TK, activations)
    return Tokens(torch.nn.functional.pad(codes, (0, padded_k(x_TK.shape[1]) - x_TK.shape[1])), scale, sums)


def w4a8(tokens: Tokens, packed: PackedMatrix, scale_NB: Tensor, config: Config) -> Tensor:
    """Float32 parts [S, T, N] whose sum is x @ W^T."""
    count, blocks, pairs = tokens.codes.shape[0], block_count(packed.k), padded_k(packed.k) // 128
    per_split = -(-pairs // min(config.split_k, pairs))
    splits = -(-pairs // per_split)
    parts_STN = torch.empty(splits, count, packed.n, dtype=torch.float32, device=tokens.codes.device)
    block_t = max(config.block_t, 16)
    codes, scale_NB, zero = without_gaps(packed, scale_NB)
    _w4a8[(triton.cdiv(packed.n, config.block_r), triton.cdiv(count, block_t), splits)](
        *tokens[:1], tokens.scale, tokens.sums, codes, scale_NB, zero, parts_STN, count, packed.n, blocks,
        tokens.codes.stride(0), codes.stride(0), scale_NB.stride(0), zero.stride(0), per_split,
        BLOCK_R=config.block_r, BLOCK_T=block_t, EVEN_B=blocks % 2 == 0, BY_BLOCK=tokens.scale.shape[1] > 1,
        ASM=uses_asm(), **launch_options(config),
    )  # fmt: skip
    return parts_STN


def w4a8_plain(tokens: Tokens, packed: PackedMatrix, scale_NB: Tensor, config: Config) -> Tensor:
    """The twin of `w4a8`, by integer block dots in int64, all of K in one part."""
    blocks = block_count(packed.k)
    pad = (0, blocks * GROUP_SIZE - packed.k)
    q_TBJ = torch.nn.functional.pad(tokens.codes[:, : packed.k], pad).view(-1, blocks, GROUP_SIZE).long()
    codes_NBJ = torch.nn.functional.pad(to_codes(packed), pad).view(-1, blocks, GROUP_SIZE).long()
    dots_TBN = torch.einsum("tbj,nbj->tbn", q_TBJ, codes_NBJ) - tokens.sums.long()[..., None] * packed.zero.T.long()
    return torch.einsum("tbn,nb->tn", dots_TBN * tokens.scale[..., None].double(), scale_NB.double()).float()[None]
