"""Polishing after error feedback, for the preset `high`: coordinate descent over codes, least-squares refit of scales.

Dimensions: E leading batch (experts), N out, K in, B blocks. Both lower tr(E H E^T), E = W - W^, and never raise it
(beyond float noise).
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5_quant.quant.errors import quadratic_rows
from glm5_quant.quant.grid import MAX_CODE, Grid, dequantize, expand, to_blocks
from glm5_quant.quant.threads import one_thread, share_out

BATCH_COLUMNS = 128
SUB_COLUMNS = 16
# Rows whose B x B systems are built at once when scales are refitted.
REFIT_ROWS = 256


def descend(weight_NK: Tensor, hessian_KK: Tensor, codes_NK: Tensor, grid: Grid) -> Tensor:
    """One sweep over all columns: each code moves to its best value with all others fixed. uint8 [..., N, K].

    Column j's best step is the nearest to its present one plus (E H)_j / (H_jj s); errors are carried on lazily.
    """
    n, k = weight_NK.shape[-2:]
    hessian_EKK = hessian_KK.reshape(-1, k, k)
    zero = expand(grid.zero, grid, k).float()
    live = expand(to_blocks(weight_NK, grid.group_size).abs().amax(-1) > 0, grid, k)

    def columns(per_weight_NK: Tensor) -> Tensor:
        return per_weight_NK.reshape(-1, n, k).transpose(1, 2).contiguous()

    scale_EKN, steps_EKN = columns(expand(grid.scale, grid, k)), columns(codes_NK.float() - zero)
    low_EKN, high_EKN = columns(-zero * live), columns((MAX_CODE - zero) * live)
    pull_EKN = torch.bmm(hessian_EKK, columns(weight_NK.float()) - steps_EKN * scale_EKN)
    tiny = torch.finfo(torch.float32).tiny
    inverse_EK1 = hessian_EKK.diagonal(dim1=-2, dim2=-1).clamp(min=tiny).reciprocal().clamp(max=1e30)[..., None]
    moved_EKN = torch.zeros_like(pull_EKN)
    for start in range(0, k, BATCH_COLUMNS):
        stop = min(start + BATCH_COLUMNS, k)
        with one_thread():
            for sub in range(start, stop, SUB_COLUMNS):
                end = min(sub + SUB_COLUMNS, stop)
                for j in range(sub, end):
                    wanted_EN = torch.addcdiv(steps_EKN[:, j], pull_EKN[:, j] * inverse_EK1[:, j], scale_EKN[:, j])
                    wanted_EN = torch.clamp(wanted_EN.round_(), low_EKN[:, j], high_EKN[:, j])
                    moved_EN = (wanted_EN - steps_EKN[:, j]) * scale_EKN[:, j]
                    steps_EKN[:, j], moved_EKN[:, j] = wanted_EN, moved_EN
                    if j + 1 < end:
                        pull_EKN[:, j + 1 : end].addcmul_(
                            hessian_EKK[:, j, j + 1 : end, None], moved_EN[:, None], value=-1
                        )
                _carry(pull_EKN, moved_EKN, hessian_EKK, (sub, end, stop))
        _carry(pull_EKN, moved_EKN, hessian_EKK, (start, stop, k))
    return (steps_EKN.transpose(1, 2).reshape(codes_NK.shape) + zero).to(torch.uint8)


def _carry(pull_EKN: Tensor, moved_EKN: Tensor, hessian_EKK: Tensor, bounds: tuple[int, int, int]) -> None:
    first, last, until = bounds
    if last < until:
        pull_EKN[:, last:until].baddbmm_(
            hessian_EKK[:, first:last, last:until].transpose(1, 2), moved_EKN[:, first:last], alpha=-1.0
        )


def refit_scales(weight_NK: Tensor, hessian_KK: Tensor, codes_NK: Tensor, grid: Grid, scale_dtype: torch.dtype) -> Grid:
    """Scales of least tr(E H E^T) with codes and zero-points fixed: one B x B system a row; kept per row if better.

    A scale that comes out at or below 0 makes its row keep the old ones. Rounded to scale_dtype before it is judged.
    """
    n, k = weight_NK.shape[-2:]
    weight_ENK, hessian_EKK = weight_NK.float().reshape(-1, n, k), hessian_KK.reshape(-1, k, k)
    steps_ENK = (codes_NK.float() - expand(grid.zero, grid, k).float()).reshape(-1, n, k)
    old_ENB = grid.scale.reshape(-1, n, grid.scale.shape[-1])
    new_ENB = old_ENB.clone()

    def refit_part(part: tuple[int, slice]) -> None:
        e, rows = part
        new_ENB[e, rows] = _refit(
            weight_ENK[e, rows], hessian_EKK[e], steps_ENK[e, rows], old_ENB[e, rows], grid.group_size
        )

    parts = [(e, slice(row, row + REFIT_ROWS)) for e in range(old_ENB.shape[0]) for row in range(0, n, REFIT_ROWS)]
    share_out(refit_part, parts)
    stored = new_ENB.to(scale_dtype).float()
    usable = (torch.isfinite(stored) & (stored > 0) & (stored < 2 * old_ENB)).all(-1, keepdim=True)
    fitted = Grid(
        scale=torch.where(usable, stored, old_ENB).reshape(grid.scale.shape),
        zero=grid.zero,
        group_size=grid.group_size,
    )
    errors = [quadratic_rows(weight_NK.float() - dequantize(codes_NK, one), hessian_KK) for one in (fitted, grid)]
    return fitted.rows(errors[0] < errors[1], grid)


def _refit(weight_RK: Tensor, hessian_KK: Tensor, steps_RK: Tensor, old_RB: Tensor, group_size: int) -> Tensor:
    """Solve A s = b for each row, A[b, c] = t_b H_bc t_c, b[b] = t_b (H w)_b; empty blocks keep their scale."""
    blocks_RBJ = to_blocks(steps_RK, group_size)
    rows, count = old_RB.shape
    system_RBB = torch.empty(rows, count, count, device=weight_RK.device)
    for b in range(count):
        columns = slice(b * group_size, min((b + 1) * group_size, weight_RK.shape[-1]))
        reach = to_blocks(steps_RK[:, columns] @ hessian_KK[columns], group_size)
        system_RBB[:, b] = (reach * blocks_RBJ).sum(-1)
    pulled = to_blocks(weight_RK @ hessian_KK, group_size)
    wanted_RB = (pulled * blocks_RBJ).sum(-1)
    diagonal = system_RBB.diagonal(dim1=-2, dim2=-1)
    # A little pull toward the old scales keeps empty or nearly parallel blocks in place.
    pull_RB = 1e-4 * diagonal.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny + (diagonal <= 0) * 1.0
    system_RBB.diagonal(dim1=-2, dim2=-1).add_(pull_RB)
    solution, info = torch.linalg.solve_ex(system_RBB, (wanted_RB + pull_RB * old_RB).unsqueeze(-1))
    return torch.where((info == 0)[:, None], solution.squeeze(-1), old_RB)
