"""y = x W^T from 4-bit codes on a GPU, each kernel beside a plain-PyTorch twin with the same arguments.

Letters: N out, K in, B blocks, T tokens, S splits of K, R rows of weights in a tile, C shadow columns.

A program computes one tile of outputs over one split of K into float32 parts [S, T, N]; `finish` adds the parts, the
bias and rounds once. Up to 16 tokens the weights are the left operand of the dot, so a tile needs no more than 8
tokens, the scale is applied after it in float32 and the zero-point leaves through the sums of x; from 17 tokens on the
weights are scaled first and x is the left operand.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5_quant.kernels import reference
from glm5_quant.kernels.inputs import transform
from glm5_quant.kernels.layout import PackedMatrix, block_count, dequantize, padded_k
from glm5_quant.kernels.table import Config, config_for
from glm5_quant.kernels.triton_blocks import add_shadow, few_tokens, many_tokens
from glm5_quant.kernels.triton_host import kernel_input, launch_options, shadow_arguments, uses_asm, without_gaps


@triton.jit
def _w4a16(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, parts_ptr, columns_ptr, residual_ptr, factor_ptr, tokens, n, blocks,
    x_stride, codes_stride, scale_stride, zero_stride, shadow_columns, pairs_per_split,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, LEFT: tl.constexpr, EVEN_B: tl.constexpr, SHADOW: tl.constexpr,
    INT8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(2)
    first = split * pairs_per_split
    last = tl.minimum(first + pairs_per_split, (blocks + 1) // 2)
    near = tl.minimum(row, n - 1)  # rows and tokens beyond the end repeat the last one and are not stored
    x_T = x_ptr + tl.minimum(token, tokens - 1).to(tl.int64) * x_stride
    codes_R1 = codes_ptr + near[:, None] * codes_stride
    scale_R1, zero_R1 = scale_ptr + near[:, None] * scale_stride, zero_ptr + near[:, None] * zero_stride
    if LEFT:
        acc = few_tokens(x_T[None, :], codes_R1, scale_R1, zero_R1, first, last, blocks, BLOCK_R, BLOCK_T, EVEN_B, ASM)
    else:
        acc = many_tokens(x_T[:, None], codes_R1, scale_R1, zero_R1, first, last, blocks, BLOCK_R, BLOCK_T, EVEN_B, ASM)
    if SHADOW:
        stop = tl.where(split == 0, shadow_columns, 0)
        acc = add_shadow(acc, x_T, near, n, columns_ptr, residual_ptr, factor_ptr, 0, stop, INT8, LEFT, 16)
    out_T = (split * tokens + token.to(tl.int64)) * n
    if LEFT:
        tl.store(parts_ptr + out_T[None, :] + row[:, None], acc, mask=(row < n)[:, None] & (token < tokens)[None, :])
    else:
        tl.store(parts_ptr + out_T[:, None] + row[None, :], acc, mask=(token < tokens)[:, None] & (row < n)[None, :])


@triton.jit
def _finish(parts_ptr, bias_ptr, out_ptr, size, n, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    good = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts_ptr + split * size + at, mask=good, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % n, mask=good, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=good)


def linear(x_TK: Tensor, packed: PackedMatrix, bias_N: Tensor | None = None, config: Config | None = None) -> Tensor:
    """x @ W^T + bias, [T, N] in x's dtype (float16 or bfloat16). config overrides the table."""
    x_TK, scale = kernel_input(transform(x_TK, packed.inputs), packed.scale)
    tokens = x_TK.shape[0]
    out_TN = x_TK.new_empty(tokens, packed.n)
    if tokens:
        config = config or config_for("linear", tokens, packed.n, packed.k)
        finish(w4a16(x_TK, packed, scale, config), bias_N, out_TN)
    return out_TN


def w4a16(x_TK: Tensor, packed: PackedMatrix, scale_NB: Tensor, config: Config) -> Tensor:
    """Float32 parts [S, T, N] whose sum is x @ W^T, shadow included."""
    tokens, blocks, pairs = x_TK.shape[0], block_count(packed.k), padded_k(packed.k) // 128
    per_split = -(-pairs // min(config.split_k, pairs))
    splits = -(-pairs // per_split)
    parts_STN = torch.empty(splits, tokens, packed.n, dtype=torch.float32, device=x_TK.device)
    grid = (triton.cdiv(packed.n, config.block_r), triton.cdiv(tokens, config.block_t), splits)
    columns, residual, factor, count = shadow_arguments(packed.shadow, x_TK)
    codes, scale_NB, zero = without_gaps(packed, scale_NB)
    _w4a16[grid](
        x_TK, codes, scale_NB, zero, parts_STN, columns, residual, factor, tokens, packed.n, blocks,
        x_TK.stride(0), codes.stride(0), scale_NB.stride(0), zero.stride(0), count, per_split,
        BLOCK_R=config.block_r, BLOCK_T=config.block_t, LEFT=config.block_t <= 16, EVEN_B=blocks % 2 == 0,
        SHADOW=count > 0, INT8=residual.dtype == torch.int8, ASM=uses_asm(), **launch_options(config),
    )  # fmt: skip
    return parts_STN


def w4a16_plain(x_TK: Tensor, packed: PackedMatrix, scale_NB: Tensor, config: Config) -> Tensor:
    """The twin of `w4a16`: the same parts of K, from float32 weights."""
    per_split = -(-(padded_k(packed.k) // 128) // min(config.split_k, padded_k(packed.k) // 128)) * 128
    x_TK, weight_NK = x_TK[:, : packed.k].float(), dequantize(replace(packed, scale=scale_NB))
    splits = [slice(start, start + per_split) for start in range(0, packed.k, per_split)]
    parts = [x_TK[:, split] @ weight_NK[:, split].T for split in splits]
    if packed.shadow is not None:
        parts[0] += reference.shadow_term(x_TK, packed.shadow)
    return torch.stack(parts)


def finish(parts_STN: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> None:
    """out = sum of parts + bias, rounded once to out's dtype."""
    splits, size = parts_STN.shape[0], out_TN.numel()
    bias = out_TN if bias_N is None else bias_N.contiguous()
    _finish[(triton.cdiv(size, 1024),)](
        parts_STN, bias, out_TN, size, out_TN.shape[1], SPLITS=splits, BIAS=bias_N is not None, BLOCK=1024
    )


def finish_plain(parts_STN: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> None:
    """The twin of `finish`."""
    total = parts_STN.sum(0)
    out_TN.copy_(total if bias_N is None else total + bias_N.float())
