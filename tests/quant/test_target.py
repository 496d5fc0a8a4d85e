"""The damped target: ridge regression at full strength, held-out error decides how far to go."""

from __future__ import annotations

import pytest
import torch
from quant_samples import gaussian, layer_inputs, moments_of

from glm5_quant.quant.target import choose_alpha, target_direction


def streams(tokens: int, k: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, quantized) inputs: the quantized stream is a biased, noisy copy of the source."""
    source = layer_inputs(tokens, k, seed=seed)
    return source, source * 0.9 + noise * gaussian(tokens, k, seed=seed + 50) * source.std(0)


def moments(tokens: int, k: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    source, x = streams(tokens, k, noise, seed)
    return moments_of(x), (source - x).T @ x / tokens


def test_full_strength_is_ridge_regression_of_source_outputs_on_quantized_inputs() -> None:
    weight, (source, x) = gaussian(6, 20), streams(400, 20, 0.3)
    h, g = x.T @ x / 400, (source - x).T @ x / 400
    delta = 0.1 * float(h.diagonal().double().log().mean().exp())
    wanted = (
        weight.double()
        @ (h.double() + g.double() + delta * torch.eye(20))
        @ torch.linalg.inv(h.double() + delta * torch.eye(20))
    )
    torch.testing.assert_close((weight + target_direction(weight, h, g)).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [6, 30])
def test_what_the_stream_lacks_is_regressed_together_with_the_gap(rows: int) -> None:
    weight, (source, x) = gaussian(rows, 20), streams(400, 20, 0.3)
    lack = x @ gaussian(20, rows, seed=7) + gaussian(400, rows, seed=8)
    h, g, p = x.T @ x / 400, (source - x).T @ x / 400, lack.T @ x / 400
    ridge = h.double() + 0.1 * float(h.diagonal().double().log().mean().exp()) * torch.eye(20)
    wanted = (weight.double() @ g.double() + p.double()) @ torch.linalg.inv(ridge)
    direction = target_direction(weight, h, g, 0.1, p)
    torch.testing.assert_close(direction.double(), wanted, rtol=1e-4, atol=1e-4)
    errors = {
        a: float((source @ weight.T + lack - x @ (weight + a * direction).T).double().square().sum())
        for a in (0.0, 0.5, 1.0)
    }
    assert choose_alpha(weight, direction, h, g, tuple(errors), 400, p) == min(errors, key=lambda a: errors[a]) == 1.0
    assert choose_alpha(weight, direction, h, g, tuple(errors), 400) < 1.0


def test_equal_streams_leave_nothing_to_correct() -> None:
    weight, h = gaussian(6, 20), moments_of(layer_inputs(400, 20))
    assert float(target_direction(weight, h, torch.zeros_like(h)).abs().max()) == 0.0


def test_the_chosen_strength_has_the_least_held_out_error_of_all_candidates() -> None:
    weight, alphas = gaussian(6, 40), (0.0, 0.25, 0.5, 0.75, 1.0)
    for seed, noise in ((0, 0.1), (1, 0.5), (2, 1.0)):
        direction = target_direction(weight, *moments(170, 40, noise, seed))
        source, x = streams(900, 40, noise, seed + 100)
        errors = {
            a: float((source @ weight.T - x @ (weight + a * direction).T).double().square().sum()) for a in alphas
        }
        chosen = choose_alpha(weight, direction, moments_of(x), (source - x).T @ x / 900, alphas, n_eff=170)
        assert chosen == min(errors, key=lambda a: errors[a])


def test_a_direction_that_hurts_held_out_tokens_is_not_taken() -> None:
    weight, (h, g) = gaussian(6, 20), moments(400, 20, 0.3)
    assert choose_alpha(weight, -target_direction(weight, h, g), h, g, (0.25, 1.0), n_eff=400) == 0.0


def test_fewer_than_four_tokens_a_channel_or_no_candidates_switch_it_off() -> None:
    weight, (h, g) = gaussian(6, 20), moments(400, 20, 0.3)
    direction = target_direction(weight, h, g)
    assert choose_alpha(weight, direction, h, g, (0.0, 1.0), n_eff=80) == 1.0
    assert choose_alpha(weight, direction, h, g, (0.0, 1.0), n_eff=79) == 0.0
    assert choose_alpha(weight, direction, h, g, (), n_eff=400) == 0.0


def test_zero_and_indefinite_moments_give_finite_targets() -> None:
    weight = gaussian(3, 8)
    assert not target_direction(weight, torch.zeros(8, 8), torch.zeros(8, 8)).any()
    bad = torch.eye(8)
    bad[0, 1] = bad[1, 0] = 5.0
    assert bool(torch.isfinite(target_direction(weight, bad, torch.eye(8))).all())


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="7 columns, the moments 8 and 8"):
        target_direction(gaussian(3, 7), torch.eye(8), torch.eye(8))
