"""The target W* that makes up for the difference between the source and the quantized stream (EAMPQ step 4).

Dimensions: N out, K in. x source stream, x~ quantized stream, H = mean x~ x~^T, C = mean x x~^T.
W C (H + delta I)^-1 would be ridge regression of the source's outputs on the inputs the layer will really see. Full
strength overfits (the family of GPTAQ, QEP, Qronos), so only alpha of the way is gone, alpha by held-out error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MIN_TOKENS_PER_CHANNEL = 4


def target_direction(weight_NK: Tensor, hessian_KK: Tensor, cross_KK: Tensor, delta: float = 0.1) -> Tensor:
    """D = W (C - H)(H + delta mean(diag H) I)^-1, float32 [N, K]. Zero H gives a zero direction."""
    k = hessian_KK.shape[-1]
    mean = hessian_KK.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = hessian_KK.double().clone()
    ridge.diagonal(dim1=-2, dim2=-1).add_((delta * mean).clamp(min=torch.finfo(torch.float32).tiny)[..., None])
    factor, info = torch.linalg.cholesky_ex(ridge)
    if bool((info != 0).any()):
        ridge.diagonal(dim1=-2, dim2=-1).add_((mean + 1.0)[..., None])
        factor = torch.linalg.cholesky(ridge)
    right_KK = torch.cholesky_solve((cross_KK - hessian_KK).double().transpose(-1, -2), factor)
    if k != weight_NK.shape[-1]:
        raise ValueError(f"weight has {weight_NK.shape[-1]} columns, the moments {k}")
    return weight_NK.float() @ right_KK.transpose(-1, -2).float()


def damped_target(weight_NK: Tensor, hessian_KK: Tensor, cross_KK: Tensor, alpha: float, delta: float = 0.1) -> Tensor:
    """W* = W + alpha W (C - H)(H + delta mean(diag H) I)^-1, float32 [N, K]; alpha 0 returns W."""
    if alpha == 0:
        return weight_NK.float()
    return weight_NK.float() + alpha * target_direction(weight_NK, hessian_KK, cross_KK, delta)


def choose_alpha(
    weight_NK: Tensor,
    direction_NK: Tensor,
    held_hessian_KK: Tensor,
    held_cross_KK: Tensor,
    alphas: Sequence[float],
    n_eff: float,
) -> float:
    """The alpha whose W + alpha D has the least held-out error E|W x - W* x~|^2; the smallest wins a tie.

    The error is quadratic in alpha, so three traces decide among all candidates. 0 when alphas is empty or when there
    are fewer than 4 effective tokens per channel behind the direction.
    """
    if not alphas or n_eff < MIN_TOKENS_PER_CHANNEL * weight_NK.shape[-1]:
        return 0.0
    weight = weight_NK.float()
    linear = float((direction_NK * (weight @ (held_hessian_KK - held_cross_KK))).sum(dtype=torch.float64))
    square = float((direction_NK * (direction_NK @ held_hessian_KK)).sum(dtype=torch.float64))
    return min(sorted({0.0, *alphas}), key=lambda alpha: 2.0 * alpha * linear + alpha * alpha * square)
