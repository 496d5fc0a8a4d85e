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

INDEX_BYTES = 4


@dataclass(frozen=True)
class Column:
    """One more residual column for a matrix: its input channel and the error drop it adds to those before it."""

    channel: int
    drop: float


def best_columns(error_NK: Tensor, hessian_KK: Tensor, count: int, damp: float = 0.01) -> list[Column]:
    """The first `count` input columns of a greedy choice, each with its exact extra drop given those before it.

    H should be the shrunk one. Each step eliminates the chosen channel from H and E H (a pivoted Cholesky).
    """
    hessian = hessian_KK.float().clone()
    hessian.diagonal().add_(damp * hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    pull_NK = error_NK.float() @ hessian
    floor = hessian.diagonal() * 1e-5
    chosen: list[Column] = []
    taken = torch.zeros(hessian.shape[0], dtype=torch.bool, device=hessian.device)
    for _ in range(min(count, hessian.shape[0])):
        diagonal_K = hessian.diagonal()
        drop_K = pull_NK.square().sum(0) / torch.maximum(diagonal_K, floor)
        drop_K = drop_K.masked_fill(taken | (diagonal_K <= floor), -1.0)
        best = int(drop_K.argmax())
        if float(drop_K[best]) <= 0:
            break
        chosen.append(Column(best, float(drop_K[best])))
        taken[best] = True
        row_K = hessian[best] / diagonal_K[best]
        pull_NK = torch.addr(pull_NK, pull_NK[:, best], row_K, alpha=-1.0)
        hessian = torch.addr(hessian, hessian[:, best].clone(), row_K, alpha=-1.0)
    return chosen


def residual(error_NK: Tensor, hessian_KK: Tensor, channels: list[int], damp: float = 0.01) -> Tensor:
    """D = E H_:S H_SS^-1, float32 [N, S], with the same damping as `best_columns`."""
    hessian = hessian_KK.float().clone()
    hessian.diagonal().add_(damp * hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny))
    index = torch.tensor(channels, dtype=torch.int64, device=hessian.device)
    reach_NS = error_NK.float() @ hessian[:, index]
    factor_ESS, ok_E = cholesky(hessian[index][:, index][None])
    if not bool(ok_E.all()):
        raise ValueError("H of the chosen shadow columns is not positive; was one chosen twice?")
    return torch.cholesky_solve(reach_NS.T, factor_ESS[0]).T.contiguous()


def store_int8(residual_NS: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [N, S], float16 scale [S]): half the bytes of FP16 at hardly any loss."""
    scale_S = (residual_NS.abs().amax(0) / 127).clamp(2.0**-24, 65504.0).to(torch.float16)
    steps = (residual_NS / scale_S.float()).round().clamp(-127, 127)
    return steps.to(torch.int8), scale_S


def column_bytes(n: int, *, int8: bool) -> int:
    """Stored bytes of one residual column of n rows, with its channel number (and its scale)."""
    return n + 2 + INDEX_BYTES if int8 else 2 * n + INDEX_BYTES
