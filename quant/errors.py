"""Errors under second moments: the quadratic forms every choice in quant/ is judged by.

Dimensions: ... leading batch (experts), N out, K in.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quadratic_rows(delta_NK: Tensor, hessian_KK: Tensor) -> Tensor:
    """d H d^T of each row d, float32 [..., N]: that row's mean squared output error over the tokens behind H.

    The product is taken in H's dtype. With bfloat16 its rounding (0.4% an element, without bias) averages out over a
    matrix.
    """
    return ((delta_NK.to(hessian_KK.dtype) @ hessian_KK).float() * delta_NK).sum(-1)


def relative_error(weight_NK: Tensor, other_NK: Tensor, hessian_KK: Tensor) -> Tensor:
    """tr(E H E^T) / tr(W H W^T) with E = W - other, float32 [...]; 0 where the weight is all zero and unchanged."""
    weight = weight_NK.float()
    lost = quadratic_rows(weight - other_NK.float(), hessian_KK).sum(-1, dtype=torch.float64)
    whole = quadratic_rows(weight, hessian_KK).sum(-1, dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    return torch.where(whole > 0, lost / whole.clamp(min=tiny), (lost > 0).double()).clamp(min=0).float()
