"""A mixture-of-experts layer from 4-bit codes on a GPU, each kernel beside a plain-PyTorch twin.

Letters: E experts, N out, K in, D hidden size, I expert size, T tokens, A experts a token chooses, P = T A pairs of a
token and one of its experts, G tiles, M pairs a tile holds, R rows of weights in a tile.

Pairs are sorted by expert into tiles of one expert each (`route`), or, for a few tokens, every pair is its own tile and
nothing is sorted. `gate_up` computes both projections of the same rows in one accumulator and stores silu(gate) * up;
`down` multiplies by the router weight; `combine` adds a token's experts in a fixed order, so results repeat bit for
bit.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5_quant.kernels import reference
from glm5_quant.kernels.inputs import transform
from glm5_quant.kernels.layout import PackedMatrix, block_count, expert, padded_k
from glm5_quant.kernels.table import Config, config_for
from glm5_quant.kernels.triton_blocks import add_shadow, few_tokens, many_tokens
from glm5_quant.kernels.triton_host import kernel_input, launch_options, shadow_arguments, uses_asm, without_gaps

UNSORTED_PAIRS = 64
TOKENS_AT_ONCE = 2048


class Tiles(NamedTuple):
    """pair_GM: int32 pair numbers, P where a slot is empty; expert_G: int32, E where the tile is empty."""

    pair_GM: Tensor
    expert_G: Tensor


@triton.jit
def _tile(
    x_ptr, x_row_M, codes_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, factor_ptr, offsets_ptr, e, near_R, rows,
    blocks, x_stride, codes_stride, scale_stride,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, LEFT: tl.constexpr, EVEN_B: tl.constexpr, SHADOW: tl.constexpr,
    INT8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One expert's rows near_R times the inputs x_row_M: float32 [R, M] if LEFT, else [M, R]; codes are contiguous."""
    x_M = x_ptr + x_row_M.to(tl.int64) * x_stride
    stack_R = e.to(tl.int64) * rows + near_R
    codes_R1 = codes_ptr + stack_R[:, None] * codes_stride
    scale_R1, zero_R1 = scale_ptr + stack_R[:, None] * scale_stride, zero_ptr + stack_R[:, None] * scale_stride
    pairs = (blocks + 1) // 2
    if LEFT:
        acc = few_tokens(x_M[None, :], codes_R1, scale_R1, zero_R1, 0, pairs, blocks, BLOCK_R, BLOCK_M, EVEN_B, ASM)
    else:
        acc = many_tokens(x_M[:, None], codes_R1, scale_R1, zero_R1, 0, pairs, blocks, BLOCK_R, BLOCK_M, EVEN_B, ASM)
    if SHADOW:
        start, stop = tl.load(offsets_ptr + e), tl.load(offsets_ptr + e + 1)
        acc = add_shadow(
            acc, x_M, near_R, rows, columns_ptr, residual_ptr, factor_ptr, start, stop, INT8, LEFT, 16
        )  # fmt: skip
    return acc


@triton.jit
def _gate_up(
    x_ptr, pair_ptr, expert_ptr, codes_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, factor_ptr, offsets_ptr,
    hidden_ptr, pairs, choices, experts, half, blocks, x_stride, codes_stride, scale_stride, hidden_stride,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, LEFT: tl.constexpr, EVEN_B: tl.constexpr, SHADOW: tl.constexpr,
    INT8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_R // 2
    e = tl.load(expert_ptr + tl.program_id(1))
    if e >= experts:
        return
    pair = tl.load(pair_ptr + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    r = tl.arange(0, BLOCK_R)
    near = tl.minimum(tl.program_id(0) * HALF + r % HALF, half - 1) + (r // HALF) * half
    token = tl.minimum(pair, pairs - 1) // choices
    acc = _tile(
        x_ptr, token, codes_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, factor_ptr, offsets_ptr, e, near,
        2 * half, blocks, x_stride, codes_stride, scale_stride, BLOCK_R, BLOCK_M, LEFT, EVEN_B, SHADOW, INT8, ASM,
    )  # fmt: skip
    if LEFT:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BLOCK_M)), (2, 1, 0)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    column = tl.program_id(0) * HALF + tl.arange(0, HALF)
    at = hidden_ptr + pair.to(tl.int64)[:, None] * hidden_stride + column[None, :]
    tl.store(at, hidden.to(hidden_ptr.dtype.element_ty), mask=(pair < pairs)[:, None] & (column < half)[None, :])


@triton.jit
def _down(
    hidden_ptr, pair_ptr, expert_ptr, weight_ptr, codes_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, factor_ptr,
    offsets_ptr, parts_ptr, pairs, experts, n, blocks, hidden_stride, codes_stride, scale_stride,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, LEFT: tl.constexpr, EVEN_B: tl.constexpr, SHADOW: tl.constexpr,
    INT8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    e = tl.load(expert_ptr + tl.program_id(1))
    if e >= experts:
        return
    pair = tl.load(pair_ptr + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = _tile(
        hidden_ptr, tl.minimum(pair, pairs - 1), codes_ptr, scale_ptr, zero_ptr, columns_ptr, residual_ptr, factor_ptr,
        offsets_ptr, e, tl.minimum(row, n - 1), n, blocks, hidden_stride, codes_stride, scale_stride,
        BLOCK_R, BLOCK_M, LEFT, EVEN_B, SHADOW, INT8, ASM,
    )  # fmt: skip
    weight = tl.load(weight_ptr + pair, mask=pair < pairs, other=0.0).to(tl.float32)
    out_M = pair.to(tl.int64) * n
    if LEFT:
        good = (row < n)[:, None] & (pair < pairs)[None, :]
        tl.store(parts_ptr + out_M[None, :] + row[:, None], acc * weight[None, :], mask=good)
    else:
        good = (pair < pairs)[:, None] & (row < n)[None, :]
        tl.store(parts_ptr + out_M[:, None] + row[None, :], acc * weight[:, None], mask=good)


@triton.jit
def _combine(parts_ptr, index_ptr, out_ptr, experts, n, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(CHOICES):
        e = tl.load(index_ptr + token * CHOICES + choice)
        part = parts_ptr + (token * CHOICES + choice) * n + column
        total += tl.load(part, mask=column < tl.where(e < experts, n, 0), other=0.0)
    tl.store(out_ptr + token * n + column, total.to(out_ptr.dtype.element_ty), mask=column < n)


def experts(
    x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor, gate_up: PackedMatrix, down: PackedMatrix,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    """The routed layer, [T, D] in x's dtype (float16 or bfloat16); many tokens go through in parts of 2,048."""
    if activation != "silu":
        raise ValueError(f"the Triton kernels compute silu experts, found {activation!r}")
    parts = [
        _experts(x_TD[at], index_TA[at], weight_TA[at], gate_up, down)
        for at in (slice(start, start + TOKENS_AT_ONCE) for start in range(0, x_TD.shape[0], TOKENS_AT_ONCE))
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else x_TD.new_empty(0, down.n)


def _experts(x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor, gate_up: PackedMatrix, down: PackedMatrix) -> Tensor:
    index_TA, weight_TA = index_TA.to(torch.int32).contiguous(), weight_TA.contiguous()
    count, pairs = gate_up.codes.shape[0], index_TA.numel()
    per_expert = -(-pairs // count)
    config = config_for("gate_up", per_expert, gate_up.n, gate_up.k)
    tiles = route(index_TA, count, config.block_t)
    hidden_PI = gate_up_silu(transform(x_TD, gate_up.inputs), index_TA, tiles, gate_up, config)
    down_config = config_for("down", per_expert, down.n, down.k)
    if down_config.block_t != config.block_t:
        raise ValueError(f"gate_up and down share their tiles, found {config.block_t} and {down_config.block_t} tokens")
    if down.inputs is not None:  # without the padding, which is no part of a ragged last block
        hidden_PI[:, : down.k] = transform(hidden_PI[:, : down.k], down.inputs)
    parts_PD = down_weighted(hidden_PI, weight_TA, tiles, down, down_config)
    out_TD = x_TD.new_empty(x_TD.shape[0], down.n)
    combine(parts_PD, index_TA, count, out_TD)
    return out_TD


def route(index_TA: Tensor, experts: int, tile: int) -> Tiles:
    """Sort pairs by expert into tiles of `tile` slots, on the device and without waiting for it.

    The number of tiles is the most there can be, so some are empty. Up to UNSORTED_PAIRS pairs each get a tile alone.
    """
    flat_P = index_TA.reshape(-1)
    pairs = flat_P.numel()
    slot_M = torch.arange(tile, device=flat_P.device, dtype=torch.int32)
    if pairs <= UNSORTED_PAIRS:
        number_P = torch.arange(pairs, device=flat_P.device, dtype=torch.int32)
        return Tiles(torch.where(slot_M == 0, number_P[:, None], pairs).contiguous(), flat_P.to(torch.int32))
    order_P = torch.argsort(flat_P, stable=True)
    count_E = flat_P.new_zeros(experts + 1).scatter_add_(0, flat_P.long(), torch.ones_like(flat_P))[:experts]
    first_E, tiles_E = count_E.cumsum(0) - count_E, -(-count_E // tile)
    tile_end_E = tiles_E.cumsum(0)
    number_G = torch.arange(pairs // tile + min(experts, pairs), device=flat_P.device)
    expert_G = torch.searchsorted(tile_end_E, number_G, right=True)
    e_G = expert_G.clamp(max=experts - 1)
    in_expert_GM = ((number_G - tile_end_E[e_G] + tiles_E[e_G]) * tile)[:, None] + slot_M
    filled_GM = (in_expert_GM < count_E[e_G, None]) & (expert_G < experts)[:, None]
    pair_GM = order_P[(first_E[e_G, None] + in_expert_GM).clamp(0, pairs - 1)]
    return Tiles(torch.where(filled_GM, pair_GM, pairs).to(torch.int32), expert_G.to(torch.int32))


def gate_up_silu(x_TD: Tensor, index_TA: Tensor, tiles: Tiles, gate_up: PackedMatrix, config: Config) -> Tensor:
    """silu(gate x) * up x for each pair that has an expert, [P, I padded to 128] in x's dtype; other rows are left."""
    x_TD, scale = kernel_input(x_TD, gate_up.scale)
    codes, scale, zero = without_gaps(gate_up, scale)
    pairs, half, blocks = index_TA.numel(), gate_up.n // 2, block_count(gate_up.k)
    width = padded_k(half)
    hidden_PI = (x_TD.new_empty if width == half else x_TD.new_zeros)(pairs, width)
    columns, residual, factor, count = shadow_arguments(gate_up.shadow, x_TD)
    offsets = gate_up.shadow.offsets if gate_up.shadow and count else columns
    grid = (triton.cdiv(half, config.block_r // 2), tiles.expert_G.numel())
    _gate_up[grid](
        x_TD, tiles.pair_GM, tiles.expert_G, codes, scale, zero, columns, residual, factor, offsets,
        hidden_PI, pairs, index_TA.shape[1], codes.shape[0], half, blocks, x_TD.stride(0), codes.stride(1), blocks,
        width, BLOCK_R=config.block_r, BLOCK_M=config.block_t,
        LEFT=config.block_t <= 16, EVEN_B=blocks % 2 == 0, SHADOW=count > 0, INT8=residual.dtype == torch.int8,
        ASM=uses_asm(), **launch_options(config),
    )  # fmt: skip
    return hidden_PI


def gate_up_silu_plain(x_TD: Tensor, index_TA: Tensor, tiles: Tiles, gate_up: PackedMatrix, config: Config) -> Tensor:
    """The twin of `gate_up_silu`; rows of pairs without an expert are NaN."""
    choices, half = index_TA.shape[1], gate_up.n // 2
    hidden_PI = x_TD.new_full((index_TA.numel(), padded_k(half)), float("nan"))
    hidden_PI[:, half:] = 0
    for pair, e in enumerate(index_TA.reshape(-1).tolist()):
        if e < gate_up.codes.shape[0]:
            both = reference.linear(x_TD[pair // choices, None].float(), expert(gate_up, e))[0]
            hidden_PI[pair, :half] = (torch.nn.functional.silu(both[:half]) * both[half:]).to(x_TD.dtype)
    return hidden_PI


def down_weighted(hidden_PI: Tensor, weight_TA: Tensor, tiles: Tiles, down: PackedMatrix, config: Config) -> Tensor:
    """weight * down(hidden) for each pair that has an expert, float32 [P, D]; other rows are left."""
    hidden_PI, scale = kernel_input(hidden_PI, down.scale)
    codes, scale, zero = without_gaps(down, scale)
    pairs, blocks = hidden_PI.shape[0], block_count(down.k)
    parts_PD = torch.empty(pairs, down.n, dtype=torch.float32, device=hidden_PI.device)
    columns, residual, factor, count = shadow_arguments(down.shadow, hidden_PI)
    offsets = down.shadow.offsets if down.shadow and count else columns
    _down[(triton.cdiv(down.n, config.block_r), tiles.expert_G.numel())](
        hidden_PI, tiles.pair_GM, tiles.expert_G, weight_TA, codes, scale, zero, columns, residual, factor, offsets,
        parts_PD, pairs, codes.shape[0], down.n, blocks, hidden_PI.stride(0), codes.stride(1), blocks,
        BLOCK_R=config.block_r, BLOCK_M=config.block_t, LEFT=config.block_t <= 16, EVEN_B=blocks % 2 == 0,
        SHADOW=count > 0, INT8=residual.dtype == torch.int8, ASM=uses_asm(), **launch_options(config),
    )  # fmt: skip
    return parts_PD


def down_weighted_plain(
    hidden_PI: Tensor, weight_TA: Tensor, tiles: Tiles, down: PackedMatrix, config: Config
) -> Tensor:
    """The twin of `down_weighted`; rows of pairs in no tile are NaN."""
    parts_PD = torch.full((hidden_PI.shape[0], down.n), float("nan"))
    for slots, e in zip(tiles.pair_GM.tolist(), tiles.expert_G.tolist(), strict=True):
        for pair in slots:
            if pair < hidden_PI.shape[0] and e < down.codes.shape[0]:
                out = reference.linear(hidden_PI[pair, None, : down.k].float(), expert(down, e))[0]
                parts_PD[pair] = out * weight_TA.reshape(-1)[pair].float()
    return parts_PD


def combine(parts_PD: Tensor, index_TA: Tensor, experts: int, out_TD: Tensor) -> None:
    """out = each token's parts added in the order of its choices; pairs without an expert count as zero."""
    tokens, n = out_TD.shape
    grid = (triton.cdiv(n, 1024), tokens)
    _combine[grid](parts_PD, index_TA, out_TD, experts, n, CHOICES=index_TA.shape[1], BLOCK=1024)


def combine_plain(parts_PD: Tensor, index_TA: Tensor, experts: int, out_TD: Tensor) -> None:
    """The twin of `combine`."""
    parts_TAD = parts_PD.view(*index_TA.shape, -1).masked_fill((index_TA >= experts)[..., None], 0.0)
    out_TD.copy_(parts_TAD.sum(1))
