"""The inner loop of the grid search: many (clip ratio, zero-point) candidates on cache-sized chunks of blocks.

Dimensions: G blocks of columns (experts times B), N rows, J columns of a block.
For fixed step counts t = code - zero, the best scale is sum(h w t) / sum(h t^2), and the error left is
sum(h w^2) - sum(h w t)^2 / sum(h t^2). So a candidate is ranked by the second term alone, with its own scale already
refitted; the scale of the winner is rounded to the storage dtype, and the codes follow from the rounded scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5_quant.quant.threads import share_out

RATIOS = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7, 0.64, 0.58, 0.52, 0.45)
ZERO_SHIFTS = (0, -1, 1)
MAX_CODE = 15
MID_CODE = 8
# The temporaries of one chunk stay in a core's cache, and PyTorch runs 32 Ki elements without waking other threads,
# whose barriers cost more than such a small operation. A GPU wants much more at once.
CHUNK_WEIGHTS = 32768
CHUNK_WEIGHTS_GPU = 1 << 24


def range_scale(low: Tensor, high: Tensor, *, symmetric: bool) -> Tensor:
    """Scale whose 16 steps cover low..high and 0. Divided before subtracting: high - low may overflow float32."""
    high, low = high.clamp(min=0), low.clamp(max=0)
    if symmetric:
        return torch.maximum(high / (MAX_CODE - MID_CODE), -low / MID_CODE)
    return high / MAX_CODE - low / MAX_CODE


def range_zero(low: Tensor, high: Tensor) -> Tensor:
    """Zero-point of the range, as float 0..15. Independent of how far the range is clipped."""
    high, low = high.clamp(min=0), low.clamp(max=0)
    share = (-low / 2) / (high / 2 - low / 2)
    return (share.nan_to_num(0.5) * MAX_CODE).round_().clamp_(0, MAX_CODE)


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 scale rounded to what `dtype` can hold, never 0, a flushed denormal, or infinite.

    float16 keeps its denormals (down to 2^-24), since its normal range ends at 6e-5, where real weights live.
    """
    info = torch.finfo(dtype)
    floor = 2.0**-24 if dtype == torch.float16 else info.smallest_normal
    return scale.nan_to_num(info.max, posinf=info.max).clamp(floor, info.max).to(dtype).float()


def step_counts(weight: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Nearest number of steps within low..high; divides, since the inverse of a tiny scale may overflow."""
    return (weight / scale).round_().clamp_(low, high)


def best_block_grids(
    blocks_GNJ: Tensor, importance_GJ: Tensor, *, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Best (scale, zero) of each block: float32 [G, N] each. blocks_GNJ float32, importance_GJ float32 at least 0."""
    g, n, j = blocks_GNJ.shape
    scale_GN = torch.empty(g, n, device=blocks_GNJ.device)
    zero_GN = torch.empty_like(scale_GN)
    importance_GJ = _normalised_importance(importance_GJ)
    chunk = CHUNK_WEIGHTS if blocks_GNJ.device.type == "cpu" else CHUNK_WEIGHTS_GPU
    rows = max(1, min(n, chunk // j))
    groups = max(1, chunk // (j * rows))

    def search_part(part: tuple[slice, slice]) -> None:
        scale_GN[part], zero_GN[part] = _search(
            blocks_GNJ[part].contiguous(), importance_GJ[part[0]], symmetric, scale_dtype
        )

    share_out(
        search_part,
        [(slice(g0, g0 + groups), slice(n0, n0 + rows)) for g0 in range(0, g, groups) for n0 in range(0, n, rows)],
    )
    return scale_GN, zero_GN


def _normalised_importance(importance_GJ: Tensor) -> Tensor:
    """Each block's importances scaled to a maximum of 1; a block of zeros becomes all ones (nothing is known of it)."""
    top = importance_GJ.amax(-1, keepdim=True)
    return torch.where(top > 0, importance_GJ / top.clamp(min=torch.finfo(torch.float32).tiny), 1.0)


def _search(w_GNJ: Tensor, h_GJ: Tensor, symmetric: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One chunk. Weights are first scaled to a block maximum of 1, so that squares neither overflow nor vanish."""
    top = w_GNJ.abs().amax(-1, keepdim=True)
    empty = top == 0
    x = w_GNJ / torch.where(empty, 1.0, top)
    hx = x * h_GJ.unsqueeze(1)
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    base_scale = range_scale(low, high, symmetric=symmetric).masked_fill(empty, 1.0)
    base_zero = torch.full_like(low, MID_CODE) if symmetric else range_zero(low, high)
    best_gain = torch.full_like(low, -1.0)
    best_scale, best_zero = base_scale.clone(), base_zero.clone()
    for shift in (0,) if symmetric else ZERO_SHIFTS:
        zero = (base_zero + shift).clamp_(0, MAX_CODE)
        for ratio in RATIOS:
            dot, norm = _fit(x, hx, h_GJ, (base_scale * ratio).reciprocal_(), zero)
            gain = (dot * dot / norm).nan_to_num_(0.0)
            # Strictly better only: ties keep the earlier candidate, whatever the chunking.
            better = gain > best_gain
            best_gain = torch.where(better, gain, best_gain)
            best_scale = torch.where(better & (dot > 0), dot / norm, best_scale)
            best_zero = torch.where(better, zero, best_zero)
    return _settle(w_GNJ, h_GJ, top, (best_scale, best_zero), (base_scale, base_zero), scale_dtype)


def _fit(x: Tensor, hx: Tensor, h_GJ: Tensor, inverse: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """sum(h x t) and sum(h t^2) of one candidate, [G, N, 1] each."""
    t = (x * inverse).round_().clamp_(-zero, MAX_CODE - zero)
    dot = (hx * t).sum(-1, keepdim=True)
    return dot, torch.bmm(t.mul_(t), h_GJ.unsqueeze(-1))


def _settle(
    w_GNJ: Tensor,
    h_GJ: Tensor,
    top: Tensor,
    found: tuple[Tensor, Tensor],
    base: tuple[Tensor, Tensor],
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Round both scales to the storage dtype, measure both errors as stored, keep the smaller."""
    unit = torch.where(top == 0, 1.0, top)
    results = []
    for scale, zero in (found, base):
        stored = round_scale(scale * unit, scale_dtype)
        t = step_counts(w_GNJ, stored, -zero, MAX_CODE - zero)
        rest = (w_GNJ - t * stored) / unit
        results.append((stored, torch.bmm(rest.mul_(rest), h_GJ.unsqueeze(-1))))
    keep = results[0][1] < results[1][1]
    scale = torch.where(keep, results[0][0], results[1][0]).masked_fill(top == 0, 1.0)
    zero = torch.where(keep, found[1], base[1]).masked_fill(top == 0, MID_CODE)
    return scale.squeeze(-1), zero.squeeze(-1)
