"""Compensation: output = quantized + gamma * buffer (EAMPQ step 9). It must never make held-out error larger.

Dimensions: T tokens, D channels. R = source output - quantized output; buffer B = what calibration predicts of R
(its mean, or the residual a shadow brings back). gamma = <R, B> / <B, B>.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class GainFit:
    """Running sums over held-out tokens, in two halves that check each other (fill them from different documents)."""

    residual_buffer: list[float] = field(default_factory=lambda: [0.0, 0.0])
    buffer_buffer: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, residual_TD: Tensor, buffer_TD: Tensor, half: int) -> None:
        """Add tokens to half 0 or 1; buffer_TD may be one row [D] for all tokens."""
        buffer_TD = buffer_TD.expand_as(residual_TD)
        self.residual_buffer[half] += float((residual_TD * buffer_TD).sum(dtype=torch.float64))
        self.buffer_buffer[half] += float(buffer_TD.square().sum(dtype=torch.float64))

    def gain(self) -> float:
        """gamma over both halves, within 0..1; 0 unless each half's own gamma lowers the other half's error."""
        gammas = [_ratio(self.residual_buffer[half], self.buffer_buffer[half]) for half in (0, 1)]
        for half in (0, 1):
            if self.change(gammas[1 - half], half) >= 0:
                return 0.0
        return _ratio(sum(self.residual_buffer), sum(self.buffer_buffer))

    def change(self, gamma: float, half: int | None = None) -> float:
        """Squared error with gamma minus squared error without, on one half or on both."""
        halves = (0, 1) if half is None else (half,)
        return sum(gamma * gamma * self.buffer_buffer[h] - 2.0 * gamma * self.residual_buffer[h] for h in halves)


def _ratio(residual_buffer: float, buffer_buffer: float) -> float:
    return min(max(residual_buffer / buffer_buffer, 0.0), 1.0) if buffer_buffer > 0 else 0.0
