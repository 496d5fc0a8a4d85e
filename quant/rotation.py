"""Rotation: an orthonormal 64-point Hadamard transform on each aligned block of 64 channels (EAMPQ step 3).

Dimensions: T tokens, N out, K in. It spreads the few extreme channels of a block over all 64, so that one scale fits.
The matrix R is symmetric and its own inverse: W x = (W R)(R x), and H = mean x x^T becomes R H R. Channels of a ragged
tail (K % 64) are left as they are. The transform is what QuaRot (arXiv 2404.00456) and SpinQuant fold into weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


def hadamard(size: int = BLOCK, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """The orthonormal Sylvester-Hadamard matrix [size, size]. Raises ValueError unless size is a power of 2."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard matrix of size {size} was asked for, expected a power of 2")
    matrix: Tensor = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    orthonormal: Tensor = matrix * size**-0.5
    return orthonormal


def rotate(x: Tensor, block: int = BLOCK) -> Tensor:
    """Rotate the last dimension, for rows of W, for inputs x and for biases alike: [..., K] -> [..., K], dtype kept.

    Computed in float32 (float64 stays float64). Applied twice it gives x back.
    """
    k = x.shape[-1]
    whole = k - k % block
    wide = x if x.dtype == torch.float64 else x.float()
    matrix = hadamard(block, dtype=wide.dtype, device=x.device)
    turned = (wide[..., :whole].reshape(*x.shape[:-1], whole // block, block) @ matrix).reshape(*x.shape[:-1], whole)
    return (turned if whole == k else torch.cat([turned, wide[..., whole:]], -1)).to(x.dtype)


def butterfly(x: Tensor) -> Tensor:
    """`rotate` by additions alone, float32 [..., K] -> [..., K]: the same bits on every machine and at every size.

    Slower than the matmul, so for weights that are rotated once and stored, and may be compared bit by bit later.
    """
    k = x.shape[-1]
    whole = k - k % BLOCK
    turned = x[..., :whole].float()
    width = 1
    while width < BLOCK and whole:
        pairs = turned.reshape(*x.shape[:-1], whole // (2 * width), 2, width)
        left, right = pairs.unbind(-2)
        turned = torch.stack([left + right, left - right], dim=-2).flatten(-3)
        width *= 2
    return torch.cat([turned * BLOCK**-0.5, x[..., whole:].float()], dim=-1)


def rotate_rows(weight_NK: Tensor, block: int = BLOCK) -> Tensor:
    """Rotate the output channels of a matrix that writes the rotated stream: [..., N, K] -> [..., N, K]."""
    return rotate(weight_NK.mT, block).mT.contiguous()


def rotate_moments(hessian_KK: Tensor, block: int = BLOCK) -> Tensor:
    """R H R: second (or cross) moments of rotated inputs from those of the plain ones, [..., K, K]."""
    return rotate_rows(rotate(hessian_KK, block), block)


def fold_gain(weight_NK: Tensor, gain_K: Tensor) -> Tensor:
    """W diag(gain), float32: a norm's gain moved into a matrix that reads its output, so the norm commutes with R."""
    if gain_K.shape[-1] != weight_NK.shape[-1]:
        raise ValueError(f"a gain of {gain_K.shape[-1]} channels does not fit {weight_NK.shape[-1]} input channels")
    return weight_NK.float() * gain_K.float()


def heads_can_rotate(head_dim: int, block: int = BLOCK) -> bool:
    """Whether R folds from o-projections into v-projections: blocks must not cross the border between two heads."""
    return head_dim > 0 and head_dim % block == 0
