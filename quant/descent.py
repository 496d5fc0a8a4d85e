"""Polishing after error feedback: least-squares refit of scales and coordinate descent over codes, by turns.

Dimensions: E leading batch (experts), N out, K in, B blocks. Inside, matrices are held transposed, [E, K, N], as in
rounding.py. Both lower tr(E H E^T), E = W - W^, and never raise it (beyond float noise). Three turns take 4 to 6% off
the held-out error of SmolLM2's matrices, ten 5 to 7%.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5_quant.quant.grid import MAX_CODE, Grid, to_blocks
from glm5_quant.quant.lazy import BATCH_COLUMNS, SUB_COLUMNS, carry
from glm5_quant.quant.threads import one_thread, share_out

# Rows whose B x B systems are built at once when scales are refitted.
REFIT_ROWS = 256
# A turn takes more products with H than error feedback does, and these grow with K: with 6,144 inputs three turns took
# twice as long as all else. So there are fewer where rows are long: so many inputs in all, but always one.
TURN_INPUTS = 4608
# Rows do not touch each other, and a turn makes several float32 copies of what it is given.
SLICE_WEIGHTS = 1 << 22


def polish(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    codes_NK: Tensor,
    grid: Grid,
    *,
    sweeps: int,
    refit: bool,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Grid]:
    """Codes uint8 [..., N, K] and grid after so many sweeps (1 or more) over all codes, before each one a refit of the
    scales if asked. Zero-points stay. Rows of more than 1,536 inputs are swept fewer times, see TURN_INPUTS."""
    n, k = weight_NK.shape[-2:]
    sweeps = max(1, min(sweeps, TURN_INPUTS // k))
    step = max(REFIT_ROWS, SLICE_WEIGHTS // k)
    if weight_NK.ndim == 2 and n > step:
        codes_NK, scale_NB = codes_NK.clone(), grid.scale.clone()
        for rows in (slice(start, start + step) for start in range(0, n, step)):
            part = Grid(scale=grid.scale[rows], zero=grid.zero[rows], group_size=grid.group_size)
            codes_NK[rows], part = polish(
                weight_NK[rows], hessian_KK, codes_NK[rows], part, sweeps=sweeps, refit=refit, scale_dtype=scale_dtype
            )
            scale_NB[rows] = part.scale
        return codes_NK, Grid(scale=scale_NB, zero=grid.zero, group_size=grid.group_size)

    def columns(rows_NX: Tensor) -> Tensor:
        return rows_NX.reshape(-1, n, rows_NX.shape[-1]).transpose(1, 2).float().contiguous()

    def spread(per_block_EBN: Tensor) -> Tensor:
        return per_block_EBN.repeat_interleave(grid.group_size, dim=1)[:, :k]

    hessian_EKK, weight_EKN = hessian_KK.reshape(-1, k, k), columns(weight_NK)
    zero_EBN, scale_EBN = columns(grid.zero), columns(grid.scale)
    live_EBN = columns(to_blocks(weight_NK, grid.group_size).abs().amax(-1) > 0)
    bounds = (-zero_EBN * live_EBN, (MAX_CODE - zero_EBN) * live_EBN)
    steps_EKN = columns(codes_NK).sub_(spread(zero_EBN))
    pulled_EKN = torch.bmm(hessian_EKK, weight_EKN) if refit else None
    for _ in range(sweeps):
        if pulled_EKN is not None:
            _refit_scales(pulled_EKN, hessian_EKK, steps_EKN, scale_EBN, grid.group_size, scale_dtype)
        wrong_EKN = torch.addcmul(weight_EKN, steps_EKN, spread(scale_EBN), value=-1)
        _sweep(wrong_EKN, hessian_EKK, steps_EKN, scale_EBN, bounds, grid.group_size)
    codes_EKN = steps_EKN.add_(spread(zero_EBN)).to(torch.uint8)
    scale_NB = scale_EBN.transpose(1, 2).reshape(grid.scale.shape)
    return (
        codes_EKN.transpose(1, 2).reshape(codes_NK.shape),
        Grid(scale=scale_NB, zero=grid.zero, group_size=grid.group_size),
    )


def _sweep(
    wrong_EKN: Tensor,
    hessian_EKK: Tensor,
    steps_EKN: Tensor,
    scale_EBN: Tensor,
    bounds: tuple[Tensor, Tensor],
    group_size: int,
) -> None:
    """Move each code, one column after the other, to its best value with all others fixed; `steps_EKN` in place.

    Column j's best step is the nearest to its present one plus (H E)_j / (H_jj s); errors are carried on lazily.
    wrong_EKN is E, and lost; `bounds` are the least and the most steps, [E, B, N] each.
    """
    k = wrong_EKN.shape[1]
    pull_EKN, moved_EKN = torch.bmm(hessian_EKK, wrong_EKN), wrong_EKN
    blocks = list(zip(*(x.unbind(1) for x in (scale_EBN, scale_EBN.reciprocal(), *bounds)), strict=True))
    inverse = hessian_EKK.diagonal(dim1=-2, dim2=-1)[..., None].reciprocal().clamp_(max=1e30).unbind(1)
    best_EN = torch.empty_like(wrong_EKN[:, 0])
    for start in range(0, k, BATCH_COLUMNS):
        stop = min(start + BATCH_COLUMNS, k)
        with one_thread():
            for sub in range(start, stop, SUB_COLUMNS):
                end = min(sub + SUB_COLUMNS, stop)
                # Views are made for all columns at once: for few rows, making them takes longer than the sums.
                columns = zip(*(x[:, sub:end].unbind(1) for x in (steps_EKN, pull_EKN, moved_EKN)), strict=True)
                for j, (steps_EN, pull_EN, moved_EN) in enumerate(columns, sub):
                    scale_EN, inverse_EN, low_EN, high_EN = blocks[j // group_size]
                    torch.mul(inverse_EN, inverse[j], out=moved_EN)
                    torch.addcmul(steps_EN, pull_EN, moved_EN, out=best_EN).round_()
                    torch.clamp(best_EN, low_EN, high_EN, out=best_EN)
                    torch.sub(best_EN, steps_EN, out=moved_EN).mul_(scale_EN)
                    steps_EN.copy_(best_EN)
                    if j + 1 < end:
                        pull_EKN[:, j + 1 : end].addcmul_(
                            hessian_EKK[:, j, j + 1 : end, None], moved_EN[:, None], value=-1
                        )
                carry(pull_EKN, hessian_EKK, moved_EKN, (sub, end, stop), -1.0)
        carry(pull_EKN, hessian_EKK, moved_EKN, (start, stop, k), -1.0)


def _refit_scales(
    pulled_EKN: Tensor,
    hessian_EKK: Tensor,
    steps_EKN: Tensor,
    scale_EBN: Tensor,
    group_size: int,
    scale_dtype: torch.dtype,
) -> None:
    """Scales of least tr(E H E^T) with codes and zero-points fixed: one B x B system a row; `scale_EBN` in place.

    pulled_EKN is H W. A row keeps its scales where one would come out at or below 0 or twice as large, or where the
    new ones, rounded to `scale_dtype`, are no better.
    """
    experts, _, n = pulled_EKN.shape

    def refit_part(part: tuple[int, slice]) -> None:
        e, rows = part
        pulled_RK, steps_RK = pulled_EKN[e, :, rows].T.contiguous(), steps_EKN[e, :, rows].T.contiguous()
        old_RB = scale_EBN[e, :, rows].T
        scale_EBN[e, :, rows] = _refit(pulled_RK, hessian_EKK[e], steps_RK, old_RB, group_size, scale_dtype).T

    share_out(
        refit_part, [(e, slice(row, row + REFIT_ROWS)) for e in range(experts) for row in range(0, n, REFIT_ROWS)]
    )


def _refit(
    pulled_RK: Tensor,
    hessian_KK: Tensor,
    steps_RK: Tensor,
    old_RB: Tensor,
    group_size: int,
    scale_dtype: torch.dtype,
) -> Tensor:
    """Solve A s = b for each row, A[b, c] = t_b H_bc t_c, b[b] = t_b (H w)_b; empty blocks keep their scale.

    The error is w H w - 2 s b + s A s, so what new scales change of it is (s' - s) (A s + A s' - 2 b).
    """
    blocks_RBJ = to_blocks(steps_RK, group_size)
    rows, count = old_RB.shape
    system_RBB = torch.empty(rows, count, count, device=steps_RK.device)
    for b in range(count):
        columns = slice(b * group_size, min((b + 1) * group_size, steps_RK.shape[-1]))
        # H is symmetric: only blocks from b on.
        first = columns.start
        reach = to_blocks(steps_RK[:, columns] @ hessian_KK[columns, first:], group_size)
        system_RBB[:, b, b:] = system_RBB[:, b:, b] = torch.linalg.vecdot(reach, blocks_RBJ[:, b:])
    wanted_RB = torch.linalg.vecdot(to_blocks(pulled_RK, group_size), blocks_RBJ)
    diagonal = system_RBB.diagonal(dim1=-2, dim2=-1)
    # A little pull toward the old scales keeps empty or nearly parallel blocks in place.
    pull_RB = 1e-4 * diagonal.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny + (diagonal <= 0) * 1.0
    damped_RBB = system_RBB.clone()
    damped_RBB.diagonal(dim1=-2, dim2=-1).add_(pull_RB)
    solution, info = torch.linalg.solve_ex(damped_RBB, (wanted_RB + pull_RB * old_RB).unsqueeze(-1))
    new_RB = solution.squeeze(-1).to(scale_dtype).float()
    usable = (torch.isfinite(new_RB) & (new_RB > 0) & (new_RB < 2 * old_RB)).all(-1) & (info == 0)
    new_RB = torch.where(usable[:, None], new_RB, old_RB)
    slope_RB = (system_RBB @ (old_RB + new_RB).unsqueeze(-1)).squeeze(-1) - 2.0 * wanted_RB
    better = ((new_RB - old_RB) * slope_RB).sum(-1) < 0
    return torch.where(better[:, None], new_RB, old_RB)
