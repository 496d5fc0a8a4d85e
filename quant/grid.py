"""Grids: a scale and a zero-point for every block of 64 neighbouring weights of a row (EAMPQ step 5).

Dimensions: ... leading batch (experts), N out, K in, B = ceil(K / group_size) blocks, J columns of a block.
weight = (code - zero) * scale, code and zero in 0..15. The last block of a ragged row holds K % group_size columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from glm5_quant.quant.clip import best_block_grids, range_scale, range_zero, round_scale, step_counts

MAX_CODE = 15
MID_CODE = 8


@dataclass(frozen=True)
class Grid:
    """scale float32 [..., N, B], exact in the storage dtype, finite and above 0; zero uint8 [..., N, B]."""

    scale: Tensor
    zero: Tensor
    group_size: int = 64

    def rows(self, chosen: Tensor, other: Grid) -> Grid:
        """This grid, with the rows where `chosen` (bool [..., N]) is False taken from `other`."""
        pick = chosen.unsqueeze(-1)
        return Grid(
            scale=torch.where(pick, self.scale, other.scale),
            zero=torch.where(pick, self.zero, other.zero),
            group_size=self.group_size,
        )


def minmax_grid(
    weight_NK: Tensor, *, group_size: int = 64, symmetric: bool = False, scale_dtype: torch.dtype = torch.bfloat16
) -> Grid:
    """The round-to-nearest grid: the 16 steps span each block's range, 0 included.

    weight_NK: floating [..., N, K], finite. A block of zeros gets scale 1 and zero 8, and so comes back as exactly 0.
    """
    blocks_NBJ = to_blocks(_checked(weight_NK), group_size)
    low, high = torch.aminmax(blocks_NBJ, dim=-1)
    scale = round_scale(range_scale(low, high, symmetric=symmetric), scale_dtype)
    zero = torch.full_like(low, MID_CODE) if symmetric else range_zero(low, high)
    return _finish(scale, zero, (low == 0) & (high == 0), group_size)


def search_grid(
    weight_NK: Tensor,
    importance_K: Tensor | None = None,
    *,
    group_size: int = 64,
    symmetric: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Grid:
    """Grid that minimises sum_j h_j (w_j - s (q_j - z))^2 in each block: clip search, zero search, least-squares scale.

    weight_NK: [..., N, K]; importance_K: [..., K] (diag H, at least 0) or None for all ones. A block whose importances
    are all 0 is treated as unweighted. Never worse than `minmax_grid` under the same weighted error.
    """
    weight = _checked(weight_NK)
    if importance_K is None:
        importance_K = torch.ones(weight.shape[-1], device=weight.device)
    if importance_K.shape[-1] != weight.shape[-1]:
        raise ValueError(f"importance has {importance_K.shape[-1]} columns, the weight {weight.shape[-1]}")
    if not bool((torch.isfinite(importance_K) & (importance_K >= 0)).all()):
        raise ValueError("importance holds negative or non-finite values")
    batch, n = weight.shape[:-2], weight.shape[-2]
    blocks_GNJ = to_blocks(weight, group_size).movedim(-2, -3).reshape(-1, n, group_size)
    per_block = to_blocks(importance_K.float(), group_size)
    importance_GJ = per_block.expand(*batch, *per_block.shape[-2:]).reshape(-1, group_size)
    scale_GN, zero_GN = best_block_grids(blocks_GNJ, importance_GJ, symmetric=symmetric, scale_dtype=scale_dtype)
    scale, zero = (t.reshape(*batch, -1, n).transpose(-1, -2).contiguous() for t in (scale_GN, zero_GN))
    return Grid(scale=scale, zero=zero.to(torch.uint8), group_size=group_size)


def quantize(weight_NK: Tensor, grid: Grid) -> Tensor:
    """Nearest codes on the grid: floating [..., N, K] -> uint8 [..., N, K]."""
    scale, zero = expand(grid.scale, grid, weight_NK.shape[-1]), expand(grid.zero, grid, weight_NK.shape[-1]).float()
    steps = step_counts(weight_NK.float(), scale, -zero, MAX_CODE - zero)
    return (steps + zero).to(torch.uint8)


def dequantize(codes_NK: Tensor, grid: Grid) -> Tensor:
    """(code - zero) * scale as float32 [..., N, K]."""
    k = codes_NK.shape[-1]
    return (codes_NK.float() - expand(grid.zero, grid, k).float()) * expand(grid.scale, grid, k)


def to_blocks(weight_NK: Tensor, group_size: int) -> Tensor:
    """[..., N, K] -> [..., N, B, group_size]; a ragged tail is filled with zeros: they change no range and no error."""
    ragged = -weight_NK.shape[-1] % group_size
    return (pad(weight_NK, (0, ragged)) if ragged else weight_NK).reshape(*weight_NK.shape[:-1], -1, group_size)


def expand(per_block_NB: Tensor, grid: Grid, k: int) -> Tensor:
    """[..., N, B] -> [..., N, k], each block's value repeated over its columns."""
    if per_block_NB.shape[-1] != -(-k // grid.group_size):
        raise ValueError(f"{per_block_NB.shape[-1]} blocks of {grid.group_size} cannot describe {k} columns")
    return per_block_NB.repeat_interleave(grid.group_size, dim=-1)[..., :k]


def _checked(weight_NK: Tensor) -> Tensor:
    if weight_NK.ndim < 2 or weight_NK.numel() == 0:
        raise ValueError(f"a weight of shape {tuple(weight_NK.shape)} has no rows and columns to quantize")
    weight = weight_NK.float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight holds NaN or infinite values")
    return weight


def _finish(scale: Tensor, zero: Tensor, empty: Tensor, group_size: int) -> Grid:
    return Grid(
        scale=scale.masked_fill(empty, 1.0),
        zero=zero.masked_fill(empty, MID_CODE).to(torch.uint8),
        group_size=group_size,
    )
