"""Rounding with error feedback on static grids: the solver that turns a matrix and its statistics into codes.

Dimensions: E leading batch (experts), N out, K in, B blocks. Inside, matrices are held transposed, [E, K, N], so that
one input column is one contiguous row of memory.

Error feedback is GPTQ (Frantar et al., arXiv 2210.17323) in the form QuIP gives it (arXiv 2307.13304, LDLQ): with
H = M D M^T, M unit upper triangular, column k is rounded after adding sum_{i<k} (w_i - w^_i) M[i, k]. Same codes as
GPTQ's Cholesky of the inverse, but one factorization of H and no inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.damping import typical_energy
from glm5_quant.quant.descent import polish
from glm5_quant.quant.errors import quadratic_rows, relative_error
from glm5_quant.quant.factor import Order, order_columns, require_finite, usable_hessian
from glm5_quant.quant.grid import MAX_CODE, Grid, dequantize, expand, quantize, search_grid, to_blocks
from glm5_quant.quant.lazy import BATCH_COLUMNS, SUB_COLUMNS, carry
from glm5_quant.quant.rows import RowFeedback, round_in_turns
from glm5_quant.quant.shrinkage import Noise, trusted
from glm5_quant.quant.threads import one_thread

SLICE_WEIGHTS = 1 << 22


@dataclass(frozen=True)
class Solved:
    """codes uint8 [..., N, K], their grid, error = tr(E H E^T) / tr(W H W^T) as float32 [...] (0-d for one matrix).

    `error` is None where it was not asked for.
    """

    codes: Tensor
    grid: Grid
    error: Tensor | None


def solve(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    config: QuantConfig,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    n_eff: float | Tensor | None = None,
    noise: Noise | None = None,
    grid: Grid | None = None,
    feedback: Sequence[RowFeedback] = (),
    measure: bool = True,
) -> Solved:
    """Grid and codes of least error under H for one matrix or a stack of experts.

    weight_NK: [..., N, K] target weights. hessian_KK: [..., K, K] second moments of the inputs (statistics.Moments).
    n_eff: effective tokens behind H, for shrinkage ([...] tensor for a stack); None = H is taken as it is.
    noise: what is known of H's uncertainty beside n_eff, for one matrix.
    grid: start from this one instead of searching.
    feedback: that between rows, for each of the matrices stacked in `weight_NK`; () where all outputs count alike.
    measure: whether the error is wanted, which costs two matmuls.
    Never fails on a singular H; an H of zeros counts as the identity.
    Raises ValueError for non-finite input or shapes that do not fit.
    """
    weight = weight_NK.float()
    k = weight.shape[-1]
    if hessian_KK.shape != (*weight.shape[:-2], k, k):
        raise ValueError(f"H of shape {tuple(hessian_KK.shape)} does not fit a weight of {tuple(weight.shape)}")
    require_finite(hessian_KK)
    plain_KK = usable_hessian(hessian_KK.float())
    trusted_KK = plain_KK
    if config.shrink and n_eff is not None:
        trusted_KK = trusted(plain_KK, n_eff, config.shrink_trust, noise)
    order = order_columns(trusted_KK.reshape(-1, k, k), config.damp) if config.error_feedback else None
    if grid is None and order is not None:
        # Later columns make up for part of an early column's error; what they cannot is what the grid should minimise.
        importance = order.variance_EK.reshape(*weight.shape[:-2], k) if config.weighted_grid else None
        grid = _search(weight, importance, config, scale_dtype)
    grid = grid or choose_grid(weight, trusted_KK, config, scale_dtype=scale_dtype)
    if config.descent_sweeps:
        # Damped as for error feedback: what H knows nothing of would otherwise be free to move, and does.
        trusted_KK = trusted_KK.clone() if trusted_KK is plain_KK else trusted_KK
        diagonal = trusted_KK.diagonal(dim1=-2, dim2=-1)
        diagonal += config.damp * typical_energy(trusted_KK)[..., None]

    def rounded(aim_NK: Tensor, part: Grid) -> tuple[Tensor, Grid]:
        codes = quantize(aim_NK, part) if order is None else error_feedback(aim_NK, order, part)
        if not config.descent_sweeps:
            return codes, part
        sweeps, refit = config.descent_sweeps, config.refit_scales
        return polish(aim_NK, trusted_KK, codes, part, sweeps=sweeps, refit=refit, scale_dtype=scale_dtype)

    codes, grid = round_in_turns(weight, grid, feedback, rounded) if feedback else rounded(weight, grid)
    error = relative_error(weight, dequantize(codes, grid), plain_KK) if measure else None
    return Solved(codes=codes, grid=grid, error=error)


def choose_grid(weight_NK: Tensor, hessian_KK: Tensor, config: QuantConfig, *, scale_dtype: torch.dtype) -> Grid:
    """For rounding to nearest: the grid weighted by diag H or, row by row, the unweighted one where that is better."""
    plain = _search(weight_NK, None, config, scale_dtype)
    if not config.weighted_grid:
        return plain
    diagonal = hessian_KK.diagonal(dim1=-2, dim2=-1)
    weighted = _search(weight_NK, diagonal + config.damp * typical_energy(hessian_KK)[..., None], config, scale_dtype)
    better, other = (
        quadratic_rows(weight_NK - dequantize(quantize(weight_NK, one), one), hessian_KK) for one in (weighted, plain)
    )
    return weighted.rows(better <= other, plain)


def _search(weight_NK: Tensor, importance: Tensor | None, config: QuantConfig, scale_dtype: torch.dtype) -> Grid:
    return search_grid(
        weight_NK, importance, group_size=config.group_size, symmetric=config.symmetric, scale_dtype=scale_dtype
    )


def error_feedback(weight_NK: Tensor, order: Order, grid: Grid) -> Tensor:
    """Codes uint8 [..., N, K]: columns rounded in the given order on static grids, errors carried to later columns."""
    batch, (n, k) = weight_NK.shape[:-2], weight_NK.shape[-2:]
    step = max(64, SLICE_WEIGHTS // k)
    if not batch and n > step:
        # Rows do not touch each other: the eight float32 copies made below are then of a slice, not of the matrix.
        slices = [slice(start, min(start + step, n)) for start in range(0, n, step)]
        parts = [Grid(scale=grid.scale[s], zero=grid.zero[s], group_size=grid.group_size) for s in slices]
        return torch.cat([error_feedback(weight_NK[s], order, p) for s, p in zip(slices, parts, strict=True)])
    rows_first = order.order_EK[:, :, None].expand(-1, -1, n)

    def columns(per_weight_NK: Tensor) -> Tensor:
        return per_weight_NK.reshape(-1, n, k).transpose(1, 2).gather(1, rows_first)

    zero = expand(grid.zero, grid, k).float()
    live = expand(to_blocks(weight_NK, grid.group_size).abs().amax(-1) > 0, grid, k)
    # Feedback must not leak into blocks of zeros: their codes are pinned to the zero-point.
    low_EKN, high_EKN = columns(-zero * live), columns((MAX_CODE - zero) * live)
    scale_EKN = columns(expand(grid.scale, grid, k))
    steps_EKN = _feed_back(columns(weight_NK), order.unit_EKK, scale_EKN, low_EKN, high_EKN)
    steps_EKN = torch.empty_like(steps_EKN).scatter_(1, rows_first, steps_EKN)
    return (steps_EKN.transpose(1, 2).reshape(*batch, n, k) + zero).to(torch.uint8)


def _feed_back(weight_EKN: Tensor, unit_EKK: Tensor, scale_EKN: Tensor, low_EKN: Tensor, high_EKN: Tensor) -> Tensor:
    """Step counts (code - zero) as float32 [E, K, N], column after column, errors carried on lazily."""
    k = weight_EKN.shape[1]
    adjusted_EKN = weight_EKN.clone()
    error_EKN, steps_EKN = torch.empty_like(weight_EKN), torch.empty_like(weight_EKN)
    for start in range(0, k, BATCH_COLUMNS):
        stop = min(start + BATCH_COLUMNS, k)
        with one_thread():
            for sub in range(start, stop, SUB_COLUMNS):
                end = min(sub + SUB_COLUMNS, stop)
                kept = (weight_EKN, adjusted_EKN, scale_EKN, low_EKN, high_EKN, steps_EKN, error_EKN)
                # Views are made for all columns at once: for few rows, making them takes longer than the sums.
                columns = zip(*(x[:, sub:end].unbind(1) for x in kept), strict=True)
                for j, (weight_EN, aim_EN, scale_EN, low_EN, high_EN, steps_EN, error_EN) in enumerate(columns, sub):
                    torch.clamp(torch.div(aim_EN, scale_EN, out=steps_EN).round_(), low_EN, high_EN, out=steps_EN)
                    torch.addcmul(weight_EN, steps_EN, scale_EN, value=-1.0, out=error_EN)
                    if j + 1 < end:
                        adjusted_EKN[:, j + 1 : end].addcmul_(unit_EKK[:, j, j + 1 : end, None], error_EN[:, None])
                carry(adjusted_EKN, unit_EKK, error_EKN, (sub, end, stop), 1.0)
        carry(adjusted_EKN, unit_EKK, error_EKN, (start, stop, k), 1.0)
    return steps_EKN
