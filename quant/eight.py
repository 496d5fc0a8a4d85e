"""INT8 in blocks, for the matrices that 4 bits hurt most (EAMPQ step 10): symmetric, rounded to nearest.

Dimensions: N out, K in, B = ceil(K / group_size) blocks.
Each step is 1/127 of a block's largest weight, so the error is about a 300th of INT4's and nothing cleverer pays.
weight = (code - 128) * scale, code in 0..255: what compressed-tensors calls `pack-quantized` with 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5_quant.quant.clip import round_scale
from glm5_quant.quant.grid import Grid, expand, to_blocks

ZERO = 128
LARGEST = 127


def round_eight(weight_NK: Tensor, *, group_size: int, scale_dtype: torch.dtype) -> tuple[Tensor, Grid]:
    """(codes uint8 [N, K], their grid) for a floating [N, K]. A block of zeros gets scale 1 and comes back as 0.

    Raises ValueError for a weight that is not finite.
    """
    weight = weight_NK.float()
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight holds NaN or infinite values")
    largest_NB = to_blocks(weight, group_size).abs().amax(-1)
    scale_NB = round_scale(largest_NB / LARGEST, scale_dtype).masked_fill(largest_NB == 0, 1.0)
    grid = Grid(scale=scale_NB, zero=torch.full_like(scale_NB, ZERO, dtype=torch.uint8), group_size=group_size)
    steps_NK = (weight / expand(scale_NB, grid, weight.shape[-1])).round_().clamp_(-ZERO, LARGEST)
    return (steps_NK + ZERO).to(torch.uint8), grid
