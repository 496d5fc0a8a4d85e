"""What happens to a matrix's inputs before the dot: online rotation, and activations of fewer bits, in plain PyTorch.

Letters: T tokens, K in, B blocks of 64 along K.

The activation formats are those of quant/activation.py: "int8" one scale a token and block of 64; "int4-channel"
a fixed scale a channel, already folded into the weights, and one factor a token; "int4-block" one scale and zero-point
a token and block of 64. Codes are int8 with the zero-point taken off in every format, so that one integer dot serves
all.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from glm5_quant.kernels.layout import GROUP_SIZE, Inputs
from glm5_quant.quant import activation
from glm5_quant.quant.grid import to_blocks

LEVELS = {"int8": 127, "int4-channel": 7, "int4-block": 15}


def transform(x_TK: Tensor, inputs: Inputs | None) -> Tensor:
    """x as the matrix sees it, in x's dtype: rotated, then rounded to the activation format and widened again."""
    if inputs is None:
        return x_TK
    seen_TK = prepare(x_TK.float(), inputs)
    if inputs.activations != "none":
        codes_TK, scale_TB, _ = quantize(seen_TK, inputs.activations)
        seen_TK = dequantize(codes_TK, scale_TB)
    return seen_TK.to(x_TK.dtype)


def prepare(x_TK: Tensor, inputs: Inputs) -> Tensor:
    """Everything before rounding: the 64-point rotation of whole blocks and the division by the channel scales."""
    if inputs.hadamard:
        x_TK = rotate(x_TK)
    if inputs.channel_scale is None:
        return x_TK
    if inputs.channel_scale.ndim != 1:
        raise ValueError("channel scales of each expert are computed by the reference backend only")
    return (x_TK / inputs.channel_scale).to(x_TK.dtype)


def rotate(x_TK: Tensor) -> Tensor:
    """Orthonormal 64-point Hadamard on each aligned block of inputs; a ragged last block is left as it is."""
    whole = x_TK.shape[-1] // GROUP_SIZE * GROUP_SIZE
    blocks = x_TK[..., :whole].reshape(*x_TK.shape[:-1], whole // GROUP_SIZE, GROUP_SIZE)
    rotated = (blocks.float() @ hadamard(x_TK.device)).to(x_TK.dtype).flatten(-2)
    return torch.cat([rotated, x_TK[..., whole:]], dim=-1) if whole < x_TK.shape[-1] else rotated


@functools.cache
def hadamard(device: torch.device) -> Tensor:
    """The 64 x 64 Hadamard matrix by Sylvester's construction, divided by 8 so that it is its own inverse."""
    with torch.inference_mode(False):  # a later pass may want gradients
        matrix = torch.ones(1, 1)
        while matrix.shape[0] < GROUP_SIZE:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return (matrix / 8).to(device)


def quantize(x_TK: Tensor, activations: str) -> tuple[Tensor, Tensor, Tensor]:
    """Steps int8 [T, K], scale float32 [T, B] or [T, 1], and the sums of each block's steps int32 [T, B].

    x is approximately steps * scale; the zero-points of "int4-block" (codes 0..15) are taken off already. Where all
    inputs are zero the steps are, too.
    """
    if activations == "int4-channel":  # its channel scales are gone from x already
        rounded = activation.quantize_int4_channel(x_TK, torch.ones((), device=x_TK.device))
    else:
        rounded = activation.quantize(x_TK, activations)
    return rounded.steps, rounded.scale, to_blocks(rounded.steps.int(), GROUP_SIZE).sum(-1, dtype=torch.int32)


def dequantize(codes_TK: Tensor, scale: Tensor) -> Tensor:
    """Float32 [T, K] from what `quantize` returned."""
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(GROUP_SIZE, dim=1)[:, : codes_TK.shape[1]]
    return codes_TK.float() * scale
