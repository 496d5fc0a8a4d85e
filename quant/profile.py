"""Super experts: the few whose outputs are extreme (EAMPQ step 0).

Dimensions: L layers, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def super_experts(peak_LE: Tensor, *, quantile: float = 0.995, share: float = 0.1) -> list[tuple[int, int]]:
    """(layer, expert) of the few experts whose down-projection outputs are extreme, strongest first.

    Extreme = above the quantile of all experts' peaks and above `share` of the largest peak, and at least three times
    the median peak (arXiv 2507.23279 gives the first two; the third keeps even models from having any).
    """
    if peak_LE.numel() == 0:
        return []
    peaks = peak_LE.double().flatten()
    bound = max(float(peaks.quantile(quantile)), share * float(peaks.max()), 3.0 * float(peaks.median()))
    order = torch.sort(peaks, descending=True, stable=True).indices.tolist()
    experts = peak_LE.shape[1]
    return [divmod(i, experts) for i in order if float(peaks[i]) >= bound and float(peaks[i]) > 0]
