"""The target W* that makes up for the difference between the source and the quantized stream (EAMPQ step 4).

Dimensions: N out, K in. x source stream, x~ quantized stream, H = mean x~ x~^T, G = mean (x - x~) x~^T.
W + W G (H + delta t I)^-1 would be ridge regression of the source's outputs on the inputs the layer will really see;
t is the typical diag H (damping.py). Full strength overfits (the family of GPTAQ, QEP, Qronos), so only alpha of the
way is gone, alpha by held-out error.

A linear that writes to the residual stream can make up for more: P = mean r x~^T, r being what the quantized stream
lacks of the source's where the linear's output is added. Ridge regression of W x + r on x~ has W G + P for W G.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5_quant.quant.cholesky import cholesky
from glm5_quant.quant.damping import typical_energy
from glm5_quant.quant.factor import require_finite

MIN_TOKENS_PER_CHANNEL = 4


def few(tokens: float, k: int) -> bool:
    """Whether so many tokens are too few to tell the moments of k inputs by themselves."""
    return tokens < MIN_TOKENS_PER_CHANNEL * k


def target_direction(
    weight_NK: Tensor, hessian_KK: Tensor, gap_KK: Tensor, delta: float = 0.1, lack_NK: Tensor | None = None
) -> Tensor:
    """D = (W G + P) (H + delta t I)^-1, float32 [..., N, K], t = typical_energy(H). Zero H gives a zero direction.

    lack_NK is P; None = 0.

    Matrices that share their moments (q/k/v, gate/up) are best stacked along N: the factor is then made once.
    Raises ValueError for shapes that do not fit.
    """
    n, k = weight_NK.shape[-2:]
    if k != hessian_KK.shape[-1] or gap_KK.shape != hessian_KK.shape:
        raise ValueError(f"weight has {k} columns, the moments {hessian_KK.shape[-1]} and {gap_KK.shape[-1]}")
    weight, gap_KK = weight_NK.float(), gap_KK.float()
    # Solve for the smaller of the two right sides.
    if lack_NK is not None:
        return ridge(torch.addmm(lack_NK.float(), weight, gap_KK), hessian_KK, delta)
    if n < k:
        return ridge(weight @ gap_KK, hessian_KK, delta)
    return weight @ ridge(gap_KK, hessian_KK, delta)


def ridge(moved_NK: Tensor, hessian_KK: Tensor, delta: float) -> Tensor:
    """moved (H + delta t I)^-1, float32 [..., N, K]."""
    factor_KK = _ridge_factor(hessian_KK.float(), delta)
    return torch.cholesky_solve(moved_NK.transpose(-1, -2), factor_KK).transpose(-1, -2)


def _ridge_factor(hessian_KK: Tensor, delta: float) -> Tensor:
    """Lower Cholesky factor of H + delta t I; more is added until every matrix of a stack factors.

    Raises ValueError where H is not finite: no amount would do.
    """
    typical = typical_energy(hessian_KK)
    while True:
        ridge_KK = hessian_KK.clone()
        ridge_KK.diagonal(dim1=-2, dim2=-1).add_((delta * typical)[..., None])
        factor_EKK, ok_E = cholesky(ridge_KK.reshape(-1, *ridge_KK.shape[-2:]), in_place=True)
        if bool(ok_E.all()):
            return factor_EKK.reshape(hessian_KK.shape)
        require_finite(hessian_KK)
        delta = max(10.0 * delta, 1e-6)


def choose_alpha(
    weight_NK: Tensor,
    direction_NK: Tensor,
    held_hessian_KK: Tensor,
    held_gap_KK: Tensor,
    alphas: Sequence[float],
    n_eff: float,
    held_lack_NK: Tensor | None = None,
) -> float:
    """The alpha whose W + alpha D has the least held-out error E|W x + r - W* x~|^2; the smallest wins a tie.

    The error is quadratic in alpha, so three traces decide among all candidates. 0 when alphas is empty or when there
    are fewer than 4 effective tokens per channel behind the direction.
    """
    if not alphas or few(n_eff, weight_NK.shape[-1]):
        return 0.0
    weight = weight_NK.float()
    linear = float((direction_NK * (weight @ held_gap_KK)).sum(dtype=torch.float64))
    if held_lack_NK is not None:
        linear += float((direction_NK * held_lack_NK).sum(dtype=torch.float64))
    square = float((direction_NK * (direction_NK @ held_hessian_KK)).sum(dtype=torch.float64))
    return min(sorted({0.0, *alphas}), key=lambda alpha: alpha * alpha * square - 2.0 * alpha * linear)
