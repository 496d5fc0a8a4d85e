"""Compensation is fitted on held-out tokens and never makes them worse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_samples import gaussian

from glm5_quant.quant.compensation import GainFit


def fit(residual: torch.Tensor, buffer: torch.Tensor) -> GainFit:
    found = GainFit()
    middle = residual.shape[0] // 2
    for half, part in enumerate((slice(0, middle), slice(middle, None))):
        found.add(residual[part], buffer[part] if buffer.ndim == 2 else buffer, half)
    return found


def test_gamma_is_the_least_squares_gain() -> None:
    buffer = gaussian(200, 16)
    residual = 0.4 * buffer + 0.1 * gaussian(200, 16, seed=1)
    by_hand = float((residual * buffer).sum() / buffer.square().sum())
    assert fit(residual, buffer).gain() == pytest.approx(by_hand, rel=1e-6)


def test_a_fixed_gain_of_3_tenths_leaves_49_percent_of_a_known_error() -> None:
    buffer = gaussian(100, 8)
    known, energy = fit(buffer, buffer), float(buffer.square().sum())
    assert known.gain() == pytest.approx(1.0)
    assert known.change(1.0) == pytest.approx(-energy)
    assert known.change(0.3) == pytest.approx((0.49 - 1.0) * energy)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), signal=st.floats(-1.5, 1.5))
def test_the_fitted_gain_never_raises_the_error_of_the_tokens_it_was_fitted_on(seed: int, signal: float) -> None:
    buffer = gaussian(40, 4, seed=seed)
    residual = signal * buffer + gaussian(40, 4, seed=seed + 1)
    found = fit(residual, buffer)
    gamma = found.gain()
    assert 0.0 <= gamma <= 1.0
    before, after = residual.square().sum(), (residual - gamma * buffer).square().sum()
    assert float(after) <= float(before) * (1 + 1e-6)
    assert float(after - before) == pytest.approx(found.change(gamma), rel=1e-4, abs=1e-4 * float(before))


def test_halves_that_disagree_switch_it_off() -> None:
    buffer = gaussian(100, 8)
    residual = torch.cat([buffer[:50], -0.2 * buffer[50:]])
    assert fit(residual, buffer).gain() == 0.0


def test_nothing_seen_and_an_empty_buffer_give_no_gain() -> None:
    assert GainFit().gain() == 0.0
    assert fit(gaussian(10, 4), torch.zeros(4)).gain() == 0.0
