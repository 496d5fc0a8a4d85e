"""Damping is a share of what a typical channel holds: neither massive channels nor dead ones move it much."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.damping import FLOOR, typical_energy
from glm5_quant.quant.factor import order_columns
from glm5_quant.quant.grid import dequantize
from glm5_quant.quant.rounding import solve
from glm5_quant.quant.target import target_direction


def test_typical_energy_is_the_geometric_mean() -> None:
    stack = torch.stack([torch.diag(torch.tensor([1.0, 4.0, 16.0])), torch.diag(torch.tensor([2.0, 2.0, 2.0]))])
    assert typical_energy(stack).tolist() == pytest.approx([4.0, 2.0])


def test_one_dead_channel_counts_as_a_millionth_of_the_mean() -> None:
    # Mean 4 over three channels: the dead one counts as 4e-6.
    expected = math.exp((math.log(4.0 * FLOOR) + 2 * math.log(6.0)) / 3)
    assert float(typical_energy(torch.diag(torch.tensor([0.0, 6.0, 6.0])))) == pytest.approx(expected, rel=1e-5)


def test_it_is_above_zero_even_for_zeros() -> None:
    assert float(typical_energy(torch.zeros(5, 5))) > 0.0


def massive(k: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Inputs [4096, K] that share a few directions, one channel 300 times as large; H and weights [64, K], float64; the
    ratio of arithmetic to geometric mean of diag H."""
    generator = torch.Generator().manual_seed(k)
    mixing = torch.randn(k // 8, k, generator=generator, dtype=torch.float64)
    inputs = torch.randn(4096, k // 8, generator=generator, dtype=torch.float64) @ mixing
    inputs += 0.1 * torch.randn(4096, k, generator=generator, dtype=torch.float64)
    inputs[:, 7] *= 300.0
    hessian = inputs.T @ inputs / 4096
    ratio = float(hessian.diagonal().mean() / hessian.diagonal().log().mean().exp())
    return inputs, hessian, torch.randn(64, k, generator=generator, dtype=torch.float64), ratio


def share(wrong_TN: Tensor, whole_TN: Tensor) -> float:
    return float(wrong_TN.square().mean() / whole_TN.square().mean())


@pytest.mark.parametrize("sweeps", [0, 3], ids=["error feedback", "and polish"])
def test_a_massive_channel_does_not_switch_error_feedback_off(sweeps: int) -> None:
    """Damped by 1% of the arithmetic mean the output's error is 100 times as large."""
    inputs, hessian, weight, ratio = massive(128)
    wrong = []
    for damp in (0.01, 0.01 * ratio):
        config = QuantConfig(damp=damp, descent_sweeps=sweeps, refit_scales=sweeps > 0)
        solved = solve(weight.float(), hessian.float(), config)
        restored = dequantize(solved.codes, solved.grid).double()
        wrong.append(share(inputs @ (restored - weight).T, inputs @ weight.T))
    assert wrong[0] < 0.05 * wrong[1]


def test_nor_the_correction_toward_the_source_stream() -> None:
    inputs, hessian, weight, ratio = massive(64)
    gap_TK = 0.05 * inputs[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    moments = (gap_TK.T @ inputs / 4096).float()
    missed = [
        share(inputs @ target_direction(weight.float(), hessian.float(), moments, delta).double().T - gap_TK @ weight.T,
              gap_TK @ weight.T)
        for delta in (0.1, 0.1 * ratio)
    ]  # fmt: skip
    assert missed[0] < 0.05 * missed[1]


def test_damping_that_a_float32_factor_cannot_tell_from_zero_is_raised_until_it_can() -> None:
    inputs = torch.randn(3, 96, generator=torch.Generator().manual_seed(5)) * torch.logspace(-4, 4, 96)
    order = order_columns((inputs.T @ inputs)[None], 1e-9)
    assert bool(torch.isfinite(order.unit_EKK).all())
    assert float(order.variance_EK.min()) > 0.0
