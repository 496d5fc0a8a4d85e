"""Profiles of routing, and super experts by the size of what they write."""

from __future__ import annotations

import pytest
import torch
from quant_samples import gaussian

from glm5_quant.quant.profile import ExpertProfile, super_experts


def test_tokens_weights_and_effective_tokens_are_counted_by_expert() -> None:
    profile = ExpertProfile.empty(4)
    profile.add_routing(torch.tensor([[0, 1], [1, 4]]), torch.tensor([[0.75, 0.25], [0.5, 0.0]]))
    profile.add_routing(torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.25]]))
    assert profile.tokens_E.tolist() == [2, 3, 0, 0]
    assert profile.weight_E.tolist() == [1.0, 1.25, 0.0, 0.0]
    assert profile.n_eff_E[0].item() == pytest.approx(1.0 / (0.75**2 + 0.25**2))
    assert profile.n_eff_E[2].item() == 0.0
    assert profile.frequency_E.tolist() == pytest.approx([0.4, 0.6, 0.0, 0.0])
    assert ExpertProfile.empty(2).frequency_E.tolist() == [0.0, 0.0]


def test_peaks_are_the_largest_outputs_of_either_sign() -> None:
    profile = ExpertProfile.empty(2)
    profile.add_outputs(1, torch.tensor([[1.0, -7.5]]).bfloat16())
    profile.add_outputs(1, torch.tensor([[2.0, 3.0]]))
    profile.add_outputs(0, torch.empty(0, 2))
    assert profile.peak_E.tolist() == [0.0, 7.5]


def test_the_few_extreme_experts_are_found_strongest_first() -> None:
    peaks = gaussian(48, 128).abs() + 1.0
    peaks[1, 68], peaks[2, 92], peaks[3, 82] = 900.0, 1200.0, 400.0
    assert super_experts(peaks, quantile=0.9995) == [(2, 92), (1, 68), (3, 82)]


def test_an_even_model_has_no_super_experts() -> None:
    assert super_experts(gaussian(8, 16).abs() + 5.0) == []
    assert super_experts(torch.zeros(3, 4)) == []
    assert super_experts(torch.empty(0, 4)) == []
