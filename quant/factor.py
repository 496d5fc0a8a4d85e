"""The order columns are rounded in, and the factor of H that carries one column's rounding error to the next.

Dimensions: E leading batch (experts), K in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.quant.cholesky import cholesky
from glm5_quant.quant.damping import typical_energy


@dataclass(frozen=True)
class Order:
    """H in the order of rounding, factored as M D M^T.

    order_EK     int64, column of the matrix that is rounded at each step: descending diag H, ties in natural order
    unit_EKK     float32 M, unit upper triangular, in the order of rounding
    variance_EK  float32 diagonal of D, in **natural** order: the part of a column's mean square that columns rounded
                 later cannot make up for. Scaled by 1 / mean diag H.
    """

    order_EK: Tensor
    unit_EKK: Tensor
    variance_EK: Tensor


def require_finite(hessian_KK: Tensor) -> None:
    """Raise ValueError where H holds NaN or infinite values."""
    if not bool(torch.isfinite(hessian_KK).all()):
        raise ValueError("H holds NaN or infinite values")


def usable_hessian(hessian_KK: Tensor) -> Tensor:
    """H with negative diagonal noise removed; a matrix whose diagonal is all zero becomes the identity."""
    diagonal = hessian_KK.diagonal(dim1=-2, dim2=-1)
    empty = (diagonal <= 0).all(-1)
    if not bool(empty.any()) and bool((diagonal >= 0).all()):
        return hessian_KK
    eye = torch.eye(hessian_KK.shape[-1], device=hessian_KK.device)
    fixed = torch.where(empty[..., None, None], eye, hessian_KK)
    fixed.diagonal(dim1=-2, dim2=-1).clamp_(min=0)
    return fixed


def order_columns(hessian_EKK: Tensor, damp: float) -> Order:
    """Sort by diag H (stable) and factor H + damp * typical_energy(H) I. Never fails on a finite H: see
    `_stubborn_factor`. Raises ValueError for another."""
    diagonal_EK = hessian_EKK.diagonal(dim1=-2, dim2=-1)
    order_EK = torch.sort(diagonal_EK, dim=-1, descending=True, stable=True).indices
    # Reversed, a lower Cholesky factor becomes the upper one that M D M^T asks for.
    reversed_EK = order_EK.flip(-1)
    # In place where it can be: at GLM-5's size each K x K matrix is 151 MB.
    factor_EKK, ok_E = cholesky(_arranged(hessian_EKK, reversed_EK, damp), in_place=True)
    for bad in torch.nonzero(~ok_E).flatten().tolist():
        one = slice(bad, bad + 1)
        factor_EKK[bad] = _stubborn_factor(_arranged(hessian_EKK[one], reversed_EK[one], damp))
    root_EK = factor_EKK.diagonal(dim1=-2, dim2=-1).clone()
    variance_EK = torch.empty_like(root_EK).scatter_(1, reversed_EK, root_EK.square())
    unit_EKK = factor_EKK.div_(root_EK.unsqueeze(-2)).flip(-1, -2)
    return Order(order_EK=order_EK, unit_EKK=unit_EKK, variance_EK=variance_EK)


def _arranged(hessian_EKK: Tensor, order_EK: Tensor, damp: float) -> Tensor:
    """(H + damp typical_energy(H) I) / mean(diag H), rows and columns in the given order."""
    k = hessian_EKK.shape[-1]
    mixed_EKK = hessian_EKK.gather(1, order_EK[:, :, None].expand(-1, -1, k))
    mixed_EKK = mixed_EKK.gather(2, order_EK[:, None, :].expand(-1, k, -1))
    mean_E = hessian_EKK.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(torch.float32).tiny)
    mixed_EKK /= mean_E[:, None, None]
    mixed_EKK.diagonal(dim1=-2, dim2=-1).add_(damp * typical_energy(mixed_EKK)[:, None])
    return mixed_EKK


def _stubborn_factor(hessian_EKK: Tensor) -> Tensor:
    """Cholesky of one matrix of mean diagonal 1, in float64: as it is, then with 1e-7, 1e-6, ... on its diagonal."""
    require_finite(hessian_EKK)
    extra = 0.0
    while True:
        damped_EKK = hessian_EKK.double()
        damped_EKK.diagonal(dim1=-2, dim2=-1).add_(extra)
        factor_EKK, ok_E = cholesky(damped_EKK, in_place=True)
        if bool(ok_E):
            return factor_EKK[0]
        extra = max(10.0 * extra, 1e-7)
