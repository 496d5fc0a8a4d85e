"""What one pass of the source model tells about experts: traffic, effective tokens, super experts (EAMPQ step 0).

Dimensions: L layers, E experts, T tokens, K chosen experts a token, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ExpertProfile:
    """Running sums of one layer: tokens_E, weight_E, weight_square_E float64; peak_E float32, largest |output| seen."""

    tokens_E: Tensor
    weight_E: Tensor
    weight_square_E: Tensor
    peak_E: Tensor

    @classmethod
    def empty(cls, experts: int) -> ExpertProfile:
        """A profile of no tokens."""
        tokens, weight, square = (torch.zeros(experts, dtype=torch.float64) for _ in range(3))
        return cls(tokens, weight, square, torch.zeros(experts))

    def add_routing(self, index_TK: Tensor, weight_TK: Tensor) -> None:
        """Chosen experts (int64) and their routing weights; an index equal to the number of experts is skipped."""
        index, weight = index_TK.flatten().cpu(), weight_TK.flatten().double().cpu()
        real = index < self.tokens_E.shape[0]
        index, weight = index[real], weight[real]
        self.tokens_E.index_add_(0, index, torch.ones_like(weight))
        self.weight_E.index_add_(0, index, weight)
        self.weight_square_E.index_add_(0, index, weight.square())

    def add_outputs(self, expert: int, output_TD: Tensor) -> None:
        """Outputs of one expert's down-projection, before they are weighted."""
        if output_TD.numel():
            self.peak_E[expert] = torch.maximum(self.peak_E[expert], output_TD.abs().amax().float().cpu())

    @property
    def n_eff_E(self) -> Tensor:
        """(sum w)^2 / sum w^2 of each expert, 0 where nothing was routed."""
        safe = self.weight_square_E.clamp(min=torch.finfo(torch.float64).tiny)
        return torch.where(self.weight_square_E > 0, self.weight_E.square() / safe, 0.0)

    @property
    def frequency_E(self) -> Tensor:
        """Share of all choices that went to each expert, summing to 1 (all zero when nothing was routed)."""
        return self.tokens_E / self.tokens_E.sum().clamp(min=1.0)


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
