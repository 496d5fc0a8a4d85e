"""Super experts by the size of what they write."""

from __future__ import annotations

import torch
from quant_samples import gaussian

from glm5_quant.quant.profile import super_experts


def test_the_few_extreme_experts_are_found_strongest_first() -> None:
    peaks = gaussian(48, 128).abs() + 1.0
    peaks[1, 68], peaks[2, 92], peaks[3, 82] = 900.0, 1200.0, 400.0
    assert super_experts(peaks, quantile=0.9995) == [(2, 92), (1, 68), (3, 82)]


def test_an_even_model_has_no_super_experts() -> None:
    assert super_experts(gaussian(8, 16).abs() + 5.0) == []
    assert super_experts(torch.zeros(3, 4)) == []
    assert super_experts(torch.empty(0, 4)) == []
