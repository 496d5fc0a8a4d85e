"""Device functions every Triton kernel shares: nibbles to numbers, one block of 64 inputs, the loops over blocks.

Letters: N out, K in, B blocks, T tokens, C shadow columns; R rows of weights in a tile. A pair is 128 inputs: one tile
of R x 64 bytes whose low nibbles are one block and whose high nibbles are the next (see layout.py).

Codes become floats without a conversion instruction: a nibble is placed into the mantissa of 64.0 (fp16) or 128.0
(bf16), which makes 64 + q or 128 + q exactly, four at a time by one byte permute per two values. The surplus leaves
with the zero-point. ASM picks PTX for NVIDIA; the other path computes the same bits with plain operators, for the
interpreter and for AMD.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: SIM300, SIM108  (DTYPE == tl.float16 is no Yoda condition, and Triton wants both branches as statements)

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(64)


_PLACE = "prmt.b32 $0, t, {0}, 0x4140; prmt.b32 $1, t, {0}, 0x4342;}}"
_HALF = _PLACE.format("0x54545454")
_BRAIN = _PLACE.format("0x43434343")
_REGISTER = "{.reg .b32 t; "
HALF_LOW = tl.constexpr(_REGISTER + "shl.b32 t, $2, 4; and.b32 t, t, 0xF0F0F0F0; " + _HALF)
HALF_HIGH = tl.constexpr(_REGISTER + "and.b32 t, $2, 0xF0F0F0F0; " + _HALF)
BRAIN_LOW = tl.constexpr(_REGISTER + "and.b32 t, $2, 0x0F0F0F0F; " + _BRAIN)
BRAIN_HIGH = tl.constexpr(_REGISTER + "shr.b32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F; " + _BRAIN)
HALF_ONES = tl.constexpr("mov.b32 $0, 0x3C003C00; mov.b32 $1, 0x3C003C00; // $2")
BRAIN_ONES = tl.constexpr("mov.b32 $0, 0x3F803F80; mov.b32 $1, 0x3F803F80; // $2")


@triton.jit
def offset_codes(codes, HIGH: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bytes to surplus + q in DTYPE, from the low or the high nibbles."""
    if ASM and DTYPE == tl.float16:
        HALF_PTX: tl.constexpr = HALF_HIGH if HIGH else HALF_LOW
        placed = tl.inline_asm_elementwise(HALF_PTX, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    elif ASM:
        BRAIN_PTX: tl.constexpr = BRAIN_HIGH if HIGH else BRAIN_LOW
        placed = tl.inline_asm_elementwise(BRAIN_PTX, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        nibble = ((codes >> 4) if HIGH else (codes & 15)).to(tl.uint16)
        if DTYPE == tl.float16:
            placed = ((nibble << 4) | 0x5400).to(tl.float16, bitcast=True)
        else:
            placed = (nibble | 0x4300).to(tl.bfloat16, bitcast=True)
    return placed


@triton.jit
def ones_like_codes(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """1.0 everywhere, in the register layout of the codes: a dot with it gives the sums of x without moving x again."""
    if ASM and DTYPE == tl.float16:
        ones = tl.inline_asm_elementwise(HALF_ONES, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    elif ASM:
        ones = tl.inline_asm_elementwise(BRAIN_ONES, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        ones = tl.full(codes.shape, 1.0, DTYPE)
    return ones


@triton.jit
def zero_with_surplus(zero, DTYPE: tl.constexpr):
    """uint8 zero-points to float32 surplus + zero, by the same trick in the mantissa of 2^23.

    Of both blocks before they are split: Triton then does it once a row, not once for each thread that needs the row.
    """
    SURPLUS: tl.constexpr = 64.0 if DTYPE == tl.float16 else 128.0
    return (zero.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 - SURPLUS)


@triton.jit
def load_grid(scale_R2, zero_R2, i, blocks, EVEN_B: tl.constexpr):
    """Scale and zero of both blocks of pair i, [R, 2], one load each; a block that is not there has scale 0."""
    if EVEN_B:
        scale, zero = tl.load(scale_R2 + 2 * i), tl.load(zero_R2 + 2 * i)
    else:
        there = 2 * i + tl.arange(0, 2)[None, :] < blocks
        scale = tl.load(scale_R2 + 2 * i, mask=there, other=0.0)
        zero = tl.load(zero_R2 + 2 * i, mask=there, other=0)
    return scale, zero


@triton.jit
def few_tokens(
    x_1T, codes_R1, scale_R1, zero_R1, first, last, blocks, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    EVEN_B: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[R, T] float32 over the pairs first..last-1, for tiles of 8 and 16 tokens; arguments point at each row's start.

    Weights are the left operand: acc += scale * (codes . x - zero * sum(x)), the outer part in float32.
    """
    DTYPE: tl.constexpr = x_1T.dtype.element_ty
    j = tl.arange(0, GROUP)
    both = tl.arange(0, 2)[None, :]
    acc_RT = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    codes_ptr = codes_R1 + first * GROUP + j[None, :]
    x_ptr = x_1T + first * 2 * GROUP + j[:, None]
    for i in range(first, last):
        codes = tl.load(codes_ptr)
        scale_R2, zero_R2 = load_grid(scale_R1 + both, zero_R1 + both, i, blocks, EVEN_B)
        scale_low, scale_high = tl.split(scale_R2.to(tl.float32))
        zero_low, zero_high = tl.split(zero_with_surplus(zero_R2, DTYPE))
        for h in tl.static_range(2):
            x_KT = tl.load(x_ptr + h * GROUP)
            scale = scale_high if h else scale_low
            zero = zero_high if h else zero_low
            sums = tl.dot(ones_like_codes(codes, DTYPE, ASM), x_KT)
            dots = tl.dot(offset_codes(codes, h, DTYPE, ASM), x_KT)
            acc_RT += scale[:, None] * (dots - zero[:, None] * sums)
        codes_ptr += GROUP
        x_ptr += 2 * GROUP
    return acc_RT


@triton.jit
def many_tokens(
    x_T1, codes_R1, scale_R1, zero_R1, first, last, blocks, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    EVEN_B: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[T, R] float32 over the pairs first..last-1, for tiles of 64 and 128 tokens; arguments as in `few_tokens`.

    x is the left operand: acc += x . ((codes - zero) * scale)^T, weights rounded to x's dtype.
    """
    DTYPE: tl.constexpr = x_T1.dtype.element_ty
    j = tl.arange(0, GROUP)
    both = tl.arange(0, 2)[None, :]
    acc_TR = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    codes_ptr = codes_R1 + first * GROUP + j[None, :]
    x_ptr = x_T1 + first * 2 * GROUP + j[None, :]
    for i in range(first, last):
        codes = tl.load(codes_ptr)
        scale_R2, zero_R2 = load_grid(scale_R1 + both, zero_R1 + both, i, blocks, EVEN_B)
        scale_low, scale_high = tl.split(scale_R2)
        zero_low, zero_high = tl.split(zero_with_surplus(zero_R2, DTYPE))
        for h in tl.static_range(2):
            x_TK = tl.load(x_ptr + h * GROUP)
            scale = scale_high if h else scale_low
            zero = zero_high if h else zero_low
            centred = offset_codes(codes, h, DTYPE, ASM) - zero.to(DTYPE)[:, None]
            if scale.dtype == DTYPE:
                weight = centred * scale[:, None]
            else:  # a scale of another dtype may lie outside DTYPE's range although the weight does not
                weight = (centred.to(tl.float32) * scale.to(tl.float32)[:, None]).to(DTYPE)
            acc_TR = tl.dot(x_TK, weight.T, acc_TR)
        codes_ptr += GROUP
        x_ptr += 2 * GROUP
    return acc_TR


@triton.jit
def add_shadow(
    acc, x_T, row_R, n, columns_ptr, residual_ptr, factor_ptr, start, stop, INT8: tl.constexpr, LEFT: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """acc += residual . x[columns]: more K-blocks of the same accumulator, which is [R, T] if LEFT, else [T, R].

    An int8 residual is exact in x's dtype, so its factor is applied to x, once a column.
    """
    DTYPE: tl.constexpr = x_T.dtype.element_ty
    for at in tl.range(start, stop, BLOCK_C, num_stages=1):
        c = at + tl.arange(0, BLOCK_C)
        good = c < stop
        column = tl.load(columns_ptr + c, mask=good, other=0)
        x_TC = tl.load(x_T[:, None] + column[None, :], mask=good[None, :], other=0.0)
        if INT8:
            factor = tl.load(factor_ptr + c, mask=good, other=0.0)
            x_TC = (x_TC.to(tl.float32) * factor[None, :]).to(DTYPE)
        residual_CR = tl.load(
            residual_ptr + c.to(tl.int64)[:, None] * n + row_R[None, :], mask=good[:, None], other=0.0
        )
        if INT8:
            residual_CR = residual_CR.to(tl.float32)
        residual_CR = residual_CR.to(DTYPE)
        if LEFT:
            acc = tl.dot(residual_CR.T, x_TC.T, acc)
        else:
            acc = tl.dot(x_TC, residual_CR, acc)
    return acc
