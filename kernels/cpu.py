"""CPU paths that are faster than bf16, from operators that ship with PyTorch; docs/kernels.md says what each computes.

Letters: E experts, N out, K in, B blocks, T tokens, D hidden size, I expert size, A experts a token chooses.

A matrix is computed from one of five forms, made at its first use and remembered beside it:

    native  the codes as they are, by C kernels for any number of rows, where they can be had (native.py). Tokens are
            bf16, or rounded to 8 bits by choice, `resident="int8"`
    int4    the codes again, in the order of PyTorch's own 4-bit kernel, for up to 48 rows; bf16 arithmetic
    wide    nothing: above 48 rows the codes are widened a slice of rows at a time into bf16 matrix products
    small   matrices of up to 65,536 weights stay widened: calling a kernel would cost more than it saves
    int8    one INT8 number a weight and one scale a row, the shadow merged in; inputs are rounded to 8 bits a token
            (int8_cpu.py). For `resident="int8"` where native is not to be had
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from glm5_quant.kernels import int8_cpu, native, reference
from glm5_quant.kernels.inputs import transform
from glm5_quant.kernels.int8_cpu import Int8Weight, Rows
from glm5_quant.kernels.layout import (
    GROUP_SIZE,
    SLICE_WEIGHTS,
    SMALL_WEIGHTS,
    Inputs,
    PackedMatrix,
    block_count,
    dequantize,
    expert,
    rows,
    unpack_planes,
    weights,
)

INT4_ROWS = 48
PLAIN_ROWS = 4
PLAIN_WEIGHTS = 2048  # smaller matrices take PyTorch less time than a call of ours
WIDE_WEIGHTS = 1 << 23  # 16 MiB of bf16; smaller slices make the matrix product slower than they save
NARROWEST = 16  # PyTorch's kernel wants whole sixteens of rows
TILE_ROWS = 64  # and lays them out in tiles of 64, so slices of whole tiles can be converted one by one


class Int4Weight(NamedTuple):
    """What `_weight_int4pack_mm_for_cpu` reads: codes uint8 [N padded to 16, 32 B], grid bf16 [B, N, 2]."""

    codes: Tensor
    grid: Tensor


def linear(x_TK: Tensor, packed: PackedMatrix, bias_N: Tensor | None = None) -> Tensor:
    """x @ W^T + bias, [T, N] in x's dtype; bf16 arithmetic, or 8-bit if the matrix is resident as int8."""
    if not x_TK.shape[0]:
        return x_TK.new_empty(0, packed.n)
    dtype = torch.float32 if bias_N is not None else x_TK.dtype
    out_TN = _product(transform(x_TK, _inputs(packed, x_TK.shape[0])), packed, dtype)
    if bias_N is not None:
        out_TN = out_TN + bias_N
    return out_TN.to(x_TK.dtype)


def plain(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x @ W^T + bias, all bf16, x [..., K]; PyTorch's product reads its weights too slowly for a few rows."""
    n, k = weight_NK.shape
    tokens = x_TK.numel() // k
    if not 0 < tokens <= PLAIN_ROWS or n * k < PLAIN_WEIGHTS or not native.suits(tokens):
        return functional.linear(x_TK, weight_NK, bias_N)
    out_TN = native.dense(x_TK.reshape(tokens, k), weight_NK)
    if bias_N is not None:
        out_TN += bias_N
    return out_TN.reshape(*x_TK.shape[:-1], n)


def eight(x_TK: Tensor, codes_NK: Tensor, scale_NB: Tensor) -> Tensor | None:
    """x @ ((codes - 128) * scale)^T in bf16, x [..., K]; None without native kernels."""
    n, k = codes_NK.shape
    tokens = x_TK.numel() // k
    if not tokens or not native.suits(tokens):
        return None
    return native.eight(x_TK.reshape(tokens, k), codes_NK, scale_NB, torch.bfloat16).reshape(*x_TK.shape[:-1], n)


def experts(
    x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor, gate_up: PackedMatrix, down: PackedMatrix,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    """The routed layer, [T, D] in x's dtype: each expert over its own tokens, added in the order of the experts."""
    if gate_up.resident != down.resident:
        raise ValueError(f"gate_up and down need the same residence, found {gate_up.resident} and {down.resident}")
    int8, tokens = gate_up.resident == "int8", x_TD.shape[0]
    seen_TD, below = transform(x_TD, _inputs(gate_up, tokens)), _inputs(down, tokens)
    fits = x_TD.dtype == torch.bfloat16 or int8
    if fits and below is None and activation == "silu" and native.suits(tokens):
        return native.experts(seen_TD, index_TA, weight_TA, gate_up, down, int8=int8)
    act = reference.ACTIVATIONS[activation]
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
    every = Rows.of(seen_TD) if int8 and not native.suits(tokens) else seen_TD
    for e, token, weight in groups(index_TA, weight_TA, gate_up.codes.shape[0]):
        both = _product(every if token is None else _take(every, token), expert(gate_up, e))
        hidden = transform(act(both[:, : down.k]) * both[:, down.k :], below)
        part = _product(hidden, expert(down, e))
        if token is None:
            out_TD += part * weight
        else:
            out_TD.index_add_(0, token, part * weight)
    return out_TD.to(x_TD.dtype)


def groups(index_TA: Tensor, weight_TA: Tensor, count: int) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """(expert, its tokens or None for all of the one token there is, their float32 weights [., 1]), by expert."""
    choices = index_TA.shape[1]
    flat_P, weight_P1 = index_TA.reshape(-1), weight_TA.reshape(-1, 1).float()
    order_P = torch.argsort(flat_P, stable=True)
    numbers = flat_P[order_P].tolist()
    if numbers and not 0 <= numbers[0] <= numbers[-1] <= count:
        raise ValueError(
            f"expert indices are {numbers[0]}..{numbers[-1]}, outside 0..{count} ({count} means no expert)"
        )
    token_P, weight_P1 = order_P // choices, weight_P1[order_P]
    start = 0
    while start < len(numbers) and numbers[start] < count:
        stop = start + 1
        while stop < len(numbers) and numbers[stop] == numbers[start]:
            stop += 1
        token = None if index_TA.shape[0] == 1 and stop == start + 1 else token_P[start:stop]
        yield numbers[start], token, weight_P1[start:stop]
        start = stop


def int8_form(packed: PackedMatrix) -> Int8Weight:
    """The INT8 weights of a single matrix, shadow included."""
    if "int8" not in packed.forms:
        packed.forms["int8"] = int8_cpu.pack(reference.weights_with_shadow(packed))
    return cast(Int8Weight, packed.forms["int8"])


def int4_form(packed: PackedMatrix) -> Int4Weight:
    """The codes of a single matrix in the order of PyTorch's kernel; padded rows and columns are never seen."""
    if "int4" not in packed.forms:
        packed.forms["int4"] = _int4_weight(packed)
    return cast(Int4Weight, packed.forms["int4"])


def _take(every: Rows | Tensor, token: Tensor) -> Rows | Tensor:
    return every.take(token) if isinstance(every, Rows) else every[token]


def _inputs(packed: PackedMatrix, tokens: int) -> Inputs | None:
    """What is to be done to the inputs first: our 8-bit kernel rounds as activations "int8" want it by itself."""
    inputs = packed.inputs
    if inputs is None or inputs.activations != "int8" or packed.resident != "int8" or not native.suits(tokens):
        return inputs
    return replace(inputs, activations="none") if inputs.hadamard else None


def _product(x: Rows | Tensor, packed: PackedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, N], in `dtype` or more precise, of a single matrix as it is resident."""
    if packed.resident == "int4":
        return _four(cast(Tensor, x), packed, dtype)
    if isinstance(x, Tensor):
        if native.suits(x.shape[0]):
            return native.linear_int8(x, packed, dtype)
        x = Rows.of(x)
    return int8_cpu.linear(x, int8_form(packed))


def _four(x_TK: Tensor, packed: PackedMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, N], in `dtype` or more precise: bf16 products of the codes' own weights, plus the shadow."""
    x_TK = x_TK.bfloat16()
    if native.suits(x_TK.shape[0]):
        return native.linear(x_TK, packed, dtype if dtype == torch.bfloat16 else torch.float32)
    if packed.n * packed.k <= SMALL_WEIGHTS:
        out_TN = functional.linear(x_TK, weights(packed, torch.bfloat16))
    elif x_TK.shape[0] <= INT4_ROWS:
        out_TN = _int4(x_TK, int4_form(packed), packed.n)
    else:
        out_TN = _wide(x_TK, packed)
    return out_TN if packed.shadow is None else out_TN + reference.shadow_term(x_TK, packed.shadow)


def _int4(x_TK: Tensor, form: Int4Weight, n: int) -> Tensor:
    k = form.grid.shape[0] * GROUP_SIZE
    x_TK = functional.pad(x_TK, (0, k - x_TK.shape[1])) if x_TK.shape[1] < k else x_TK.contiguous()
    out_TN: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TK, form.codes, GROUP_SIZE, form.grid)
    return out_TN[:, :n]


def _wide(x_TK: Tensor, packed: PackedMatrix) -> Tensor:
    step = max(TILE_ROWS, WIDE_WEIGHTS // packed.k // TILE_ROWS * TILE_ROWS)
    parts = [
        functional.linear(x_TK, dequantize(rows(packed, start, start + step), torch.bfloat16))
        for start in range(0, packed.n, step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _int4_weight(packed: PackedMatrix) -> Int4Weight:
    blocks, pad = block_count(packed.k), -packed.n % NARROWEST
    step = max(TILE_ROWS, SLICE_WEIGHTS // packed.k // TILE_ROWS * TILE_ROWS)
    parts = []
    for start in range(0, packed.n, step):
        codes = unpack_planes(packed.codes[start : start + step])[:, : blocks * GROUP_SIZE]
        last = start + step >= packed.n
        codes = functional.pad(codes, (0, 0, 0, pad)) if last else codes
        parts.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1))
    scale_NB = packed.scale.float()
    zero_NB = (8 - packed.zero.float()) * scale_NB  # the kernel's weight is (code - 8) * scale + zero
    grid = functional.pad(torch.stack([scale_NB, zero_NB], -1), (0, 0, 0, 0, 0, pad)).transpose(0, 1)
    return Int4Weight(torch.cat(parts), grid.to(torch.bfloat16).contiguous())
