"""Shadows: the part of a matrix's rounding error kept beside its codes, as residual columns (EAMPQ step 7).

Dimensions: N out, K in, S chosen input columns. E = W* - W^ is the error left after rounding. D x[S] is
added at run time, D = E H_:S H_SS^-1 being the least-squares fit of the *whole* error on the chosen inputs. Pasting
back the original columns of W does not help: their errors were already carried to other columns. drop = tr(D H_S: E^T).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.quant.cholesky import cholesky
from glm5_quant.quant.threads import one_thread

INDEX_BYTES = 4
SCALE_BYTES = 2
_FLOOR = 1e-5


@dataclass(frozen=True)
class Column:
    """One more residual column for a matrix: its input channel and the error drop it adds to those before it."""

    channel: int
    drop: float


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Columns in the order of a greedy choice, and all that the residual of the first s of them needs.

    channels int64 [S]; drops float64 [S], each column's exact drop given those before it; whole = tr(E H E^T), what
    they are parts of; reach = E H_:S float32 [N, S]; within = H_SS float32 [S, S]. H is damped.
    """

    channels: Tensor
    drops: Tensor
    whole: float
    reach: Tensor
    within: Tensor


def find_columns(error_NK: Tensor, hessian_KK: Tensor, count: int, damp: float = 0.01) -> Candidates:
    """A greedy choice of up to `count` input columns; H should be the shrunk one.

    A Cholesky factorization of H pivoted by what each column would remove. Neither H nor E H is changed on the way:
    a chosen column costs one product of E H with a vector.
    """
    error_NK, hessian_KK = error_NK.float(), hessian_KK.float()
    extra = damp * float(hessian_KK.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    pull_NK = torch.addmm(error_NK, error_NK, hessian_KK, beta=extra)
    whole = float((pull_NK * error_NK).sum(dtype=torch.float64))
    with one_thread():
        channels, drops = _pivot(pull_NK, hessian_KK, extra, count)
    index = torch.tensor(channels, dtype=torch.int64, device=hessian_KK.device)
    within_SS = hessian_KK[index][:, index]
    within_SS.diagonal().add_(extra)
    return Candidates(
        channels=index,
        drops=torch.tensor(drops, dtype=torch.float64),
        whole=max(whole, 0.0),
        reach=pull_NK[:, index].contiguous(),
        within=within_SS,
    )


def _pivot(pull_NK: Tensor, hessian_KK: Tensor, extra: float, count: int) -> tuple[list[int], list[float]]:
    """Chosen channels and their drops. What is left of H and E H after s steps is kept as s rows and s columns."""
    count = min(count, hessian_KK.shape[0])
    diagonal_K = hessian_KK.diagonal().double() + extra
    floor_K = diagonal_K * _FLOOR
    size_K = pull_NK.square().sum(0, dtype=torch.float64)
    rows_SK, columns_SN = pull_NK.new_empty(count, pull_NK.shape[1]), pull_NK.new_empty(count, pull_NK.shape[0])
    free_K = torch.ones_like(diagonal_K, dtype=torch.bool)
    channels: list[int] = []
    drops: list[float] = []
    for step in range(count):
        drop_K = torch.where((diagonal_K > floor_K) & free_K, size_K / torch.maximum(diagonal_K, floor_K), -1.0)
        best = int(drop_K.argmax())
        # Rows of what is left of H, over the square root of their pivot; columns of E H likewise.
        before_S = rows_SK[:step, best]
        root = float(diagonal_K[best]) ** 0.5
        row_K = (hessian_KK[best] - before_S @ rows_SK[:step]) / root
        row_K[best] = root
        column_N = (pull_NK[:, best] - before_S @ columns_SN[:step]) / root
        drop = float(column_N.square().sum(dtype=torch.float64))
        if drop <= 0 or float(drop_K[best]) <= 0:
            break
        channels.append(best)
        free_K[best] = False
        drops.append(drop)
        shared_K = column_N @ pull_NK - (columns_SN[:step] @ column_N) @ rows_SK[:step]
        size_K += row_K.double() * (drop * row_K.double() - 2.0 * shared_K.double())
        diagonal_K -= row_K.double().square()
        rows_SK[step], columns_SN[step] = row_K, column_N
    return channels, drops


def best_columns(error_NK: Tensor, hessian_KK: Tensor, count: int, damp: float = 0.01) -> list[Column]:
    """The channels and drops of `find_columns` alone."""
    found = find_columns(error_NK, hessian_KK, count, damp)
    return [Column(*pair) for pair in zip(found.channels.tolist(), found.drops.tolist(), strict=True)]


def residual(error_NK: Tensor, hessian_KK: Tensor, channels: list[int], damp: float = 0.01) -> Tensor:
    """D = E H_:S H_SS^-1, float32 [N, S], with the same damping as `find_columns`."""
    hessian = hessian_KK.float().clone()
    hessian.diagonal().add_(damp * hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    index = torch.tensor(channels, dtype=torch.int64, device=hessian.device)
    return prefix_residual(error_NK.float() @ hessian[:, index], hessian[index][:, index])


def prefix_residual(reach_NS: Tensor, within_SS: Tensor, count: int | None = None) -> Tensor:
    """D = E H_:S H_SS^-1, float32 [N, count], of the first `count` candidates (None: all)."""
    factor_ESS, ok_E = cholesky(within_SS[:count, :count][None])
    if not bool(ok_E.all()):
        raise ValueError("H of the chosen shadow columns is not positive; was one chosen twice?")
    return torch.cholesky_solve(reach_NS[:, :count].T, factor_ESS[0]).T.contiguous()


def unseen_changes(reach_NS: Tensor, within_SS: Tensor, unseen_reach_NS: Tensor, unseen_within_SS: Tensor) -> Tensor:
    """By how much the error of tokens kept out of the fit changes with the first 1..S columns, float64 [S].

    reach, within: of the tokens that D is fitted on. unseen_reach = mean R x[S]^T, the residual R still to be made up
    for times the inputs, and unseen_within = mean x[S] x[S]^T, of the others. With H_SS = L L^T and D_s = Y_s L_s^-1,
    both parts of -2 <D, mean R x^T> + tr(D H D^T) are sums over leading blocks of matrices that are made once.
    """
    factor_ESS, ok_E = cholesky(within_SS[None])
    if not bool(ok_E.all()):
        raise ValueError("H of the chosen shadow columns is not positive; was one chosen twice?")
    lower_SS = factor_ESS[0].double()
    with one_thread():
        own_SN, other_SN = (
            torch.linalg.solve_triangular(lower_SS, reach.double().T, upper=False)
            for reach in (reach_NS, unseen_reach_NS)
        )
        half_SS = torch.linalg.solve_triangular(lower_SS, unseen_within_SS.double(), upper=False)
        seen_SS = torch.linalg.solve_triangular(lower_SS, half_SS.T, upper=False)
        square_S = ((own_SN @ own_SN.T) * seen_SS).cumsum(0).cumsum(1).diagonal()
        changes: Tensor = square_S - 2.0 * (own_SN * other_SN).sum(1).cumsum(0)
    return changes


def store_int8(residual_NS: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, S], float16 scale [S]): half the bytes of FP16 at hardly any loss."""
    scale_S = (residual_NS.abs().amax(0) / 127).clamp(2.0**-24, 65504.0).to(torch.float16)
    steps = (residual_NS / scale_S.float()).round().clamp(-127, 127)
    return steps.to(torch.int8), scale_S


def column_bytes(n: int, *, int8: bool) -> int:
    """Stored bytes of one residual column of n rows, with its channel number (and its scale)."""
    return n + SCALE_BYTES + INDEX_BYTES if int8 else 2 * n + INDEX_BYTES
