"""Activations as integers, and the product with INT4 weights in exact integer arithmetic (EAMPQ, "Activations").

Dimensions: T tokens, N out, K in, B blocks of 64 input channels.
int8          per token and block, symmetric: x = step * s_tb, steps -127..127
int4-channel  static a_j per channel, folded into weight column j before the grid is chosen: x = step * a_j [* f_t],
              steps -7..7; f_t is an optional factor per token
int4-block    per token and block, asymmetric: x = (code - zero) * s_tb, codes 0..15
In every mode y_n = sum_b s_nb * s_tb * (sum_j (code - zero)_nj * step_tj): the inner sum is an integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.quant.clip import range_scale, range_zero
from glm5_quant.quant.grid import Grid, expand, to_blocks

MAX_INT8 = 127
MAX_INT4 = 7
CLIP_RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TINY = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True)
class Quantized:
    """steps int8 [..., T, K] (integers with the zero-point taken off); scale float32 [..., T, 1] or [..., T, B].

    In mode int4-channel, the channel scales a_j are not here: they live in the weight's columns.
    """

    steps: Tensor
    scale: Tensor
    group_size: int = 64

    def dequantize(self) -> Tensor:
        """steps * scale as float32 [..., T, K]."""
        k = self.steps.shape[-1]
        scale = self.scale
        if scale.shape[-1] > 1:
            scale = scale.repeat_interleave(self.group_size, -1)[..., :k]
        return self.steps.float() * scale


def quantize_int8(x_TK: Tensor, group_size: int = 64) -> Quantized:
    """Symmetric INT8, one scale for each token and block of channels.

    With one scale a token, the largest channel takes the steps from all others: on SmolLM2 that costs 31% more KL.
    """
    blocks = to_blocks(x_TK.float(), group_size)
    scale = (blocks.abs().amax(-1, keepdim=True) / MAX_INT8).clamp(min=TINY)
    steps = (blocks / scale).round_().clamp_(-MAX_INT8, MAX_INT8).flatten(-2)[..., : x_TK.shape[-1]]
    return Quantized(steps=steps.to(torch.int8), scale=scale.squeeze(-1), group_size=group_size)


def quantize_int4_block(x_TK: Tensor, group_size: int = 64) -> Quantized:
    """Asymmetric INT4, one scale and zero-point for each token and block of channels; steps -15..15."""
    blocks = to_blocks(x_TK.float(), group_size)
    low, high = torch.aminmax(blocks, dim=-1, keepdim=True)
    scale, zero = range_scale(low, high, symmetric=False).clamp(min=TINY), range_zero(low, high)
    steps = (blocks / scale).round_() + zero
    steps = (steps.clamp_(0, 15) - zero).flatten(-2)[..., : x_TK.shape[-1]]
    return Quantized(steps=steps.to(torch.int8), scale=scale.squeeze(-1), group_size=group_size)


def quantize_int4_channel(
    x_TK: Tensor, channel_scale_K: Tensor, *, token_factor: bool = True, group_size: int = 64
) -> Quantized:
    """Symmetric INT4 on static channel scales; token_factor stretches the 15 steps to each token's own range."""
    ratio = x_TK.float() / channel_scale_K.float()
    ones = torch.ones_like(ratio[..., :1])
    factor = (ratio.abs().amax(-1, keepdim=True) / MAX_INT4).clamp(min=TINY) if token_factor else ones
    steps = (ratio / factor).round_().clamp_(-MAX_INT4, MAX_INT4)
    return Quantized(steps=steps.to(torch.int8), scale=factor, group_size=group_size)


def quantize(x_TK: Tensor, mode: str, channel_scale_K: Tensor | None = None, group_size: int = 64) -> Quantized:
    """Activations in one of the modes of QuantConfig.activations; ValueError for others and for missing scales."""
    if mode == "int8":
        return quantize_int8(x_TK, group_size)
    if mode == "int4-block":
        return quantize_int4_block(x_TK, group_size)
    if mode == "int4-channel":
        if channel_scale_K is None:
            raise ValueError("int4-channel needs calibrated channel scales")
        return quantize_int4_channel(x_TK, channel_scale_K, group_size=group_size)
    raise ValueError(f"no integer format is called {mode!r}, expected int8, int4-channel or int4-block")


def channel_scales(sample_TK: Tensor) -> Tensor:
    """Static a_j, float32 [K] above 0: for each channel the clip ratio of least squared error on sample tokens.

    A channel that is 0 in the sample gets the mean of the others, so that a later value is not cut to nothing.
    """
    x = sample_TK.float()
    top_K = x.abs().amax(0)
    best_K, least_K = top_K / MAX_INT4, torch.full_like(top_K, float("inf"))
    for ratio in CLIP_RATIOS:
        scale_K = (top_K * (ratio / MAX_INT4)).clamp(min=TINY)
        rest = x - (x / scale_K).round_().clamp_(-MAX_INT4, MAX_INT4) * scale_K
        error_K = rest.square().sum(0)
        best_K = torch.where(error_K < least_K, scale_K, best_K)
        least_K = torch.minimum(error_K, least_K)
    seen = top_K > 0
    usual = best_K[seen].mean() if bool(seen.any()) else torch.tensor(1.0)
    return torch.where(seen, best_K, usual.to(best_K.device)).clamp(min=TINY)


def fold_scales(weight_NK: Tensor, channel_scale_K: Tensor) -> Tensor:
    """W diag(a), float32: the weight whose inputs are x / a. Do this before the grid is chosen."""
    return weight_NK.float() * channel_scale_K.float()


def fold_moments(hessian_KK: Tensor, channel_scale_K: Tensor) -> Tensor:
    """Second moments of x / a from those of x."""
    return hessian_KK / channel_scale_K.unsqueeze(-1) / channel_scale_K.unsqueeze(-2)


def quantized_matmul(activations: Quantized, codes_NK: Tensor, grid: Grid) -> Tensor:
    """y float32 [T, N] with an exact integer dot in each block; uint8 codes [N, K] on their grid.

    The dots are at most 64 * 15 * 127 < 2^24, so float32 matmul gives them without any rounding.
    """
    k = codes_NK.shape[-1]
    if activations.group_size != grid.group_size or activations.steps.shape[-1] != k:
        raise ValueError(
            f"activations have {activations.steps.shape[-1]} channels in blocks of {activations.group_size}, "
            f"the weight {k} in blocks of {grid.group_size}"
        )
    if grid.group_size * 15 * MAX_INT8 >= 1 << 24:
        raise ValueError(f"integer dots over blocks of {grid.group_size} are not exact in float32")
    weight_BNJ = to_blocks(codes_NK.float() - expand(grid.zero, grid, k).float(), grid.group_size).movedim(-2, 0)
    steps_BTJ = to_blocks(activations.steps.float(), grid.group_size).movedim(-2, 0)
    scale_BT = activations.scale.movedim(-1, 0).expand(weight_BNJ.shape[0], -1)
    y_TN = torch.zeros(steps_BTJ.shape[1], weight_BNJ.shape[1], device=codes_NK.device)
    for b in range(weight_BNJ.shape[0]):
        y_TN += (steps_BTJ[b] @ weight_BNJ[b].T) * scale_BT[b, :, None] * grid.scale[:, b]
    return y_TN
