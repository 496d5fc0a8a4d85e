"""Shadow columns: exact drops, least squares beats pasting, and one budget for the whole model."""

from __future__ import annotations

import itertools

import pytest
import torch
from quant_samples import gaussian, layer_inputs, moments_of

from glm5_quant.quant.budget import Offer, spend
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.errors import quadratic_rows
from glm5_quant.quant.grid import dequantize
from glm5_quant.quant.rounding import solve
from glm5_quant.quant.shadow import (
    best_columns,
    column_bytes,
    find_columns,
    prefix_residual,
    residual,
    store_int8,
    unseen_changes,
)


def error_and_hessian(n: int = 24, k: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight, hessian = gaussian(n, k), moments_of(layer_inputs(1000, k))
    solved = solve(weight, hessian, QuantConfig(), n_eff=1000)
    return weight, weight - dequantize(solved.codes, solved.grid), hessian


def energy(error: torch.Tensor, hessian: torch.Tensor) -> float:
    return float(quadratic_rows(error, hessian).sum())


def with_shadow(error: torch.Tensor, columns: list[int], values: torch.Tensor) -> torch.Tensor:
    rest = error.clone()
    rest[:, columns] -= values
    return rest


def test_the_promised_drops_are_what_the_residual_removes() -> None:
    _, error, hessian = error_and_hessian()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(96)
    columns = best_columns(error, hessian, 6)
    assert len({c.channel for c in columns}) == 6
    for count in (1, 3, 6):
        chosen = [c.channel for c in columns[:count]]
        left = energy(with_shadow(error, chosen, residual(error, hessian, chosen)), damped)
        promised = sum(c.drop for c in columns[:count])
        assert energy(error, damped) - left == pytest.approx(promised, rel=1e-3)


def test_the_first_column_is_the_best_of_all() -> None:
    _, error, hessian = error_and_hessian(8, 40)
    drops = {}
    for channel in range(40):
        drops[channel] = energy(error, hessian) - energy(
            with_shadow(error, [channel], residual(error, hessian, [channel], damp=0.0)), hessian
        )
    assert best_columns(error, hessian, 1, damp=0.0)[0].channel == max(drops, key=lambda c: drops[c])


def test_greedy_pairs_come_close_to_the_best_pair() -> None:
    _, error, hessian = error_and_hessian(6, 16)
    best = max(
        energy(error, hessian) - energy(with_shadow(error, list(pair), residual(error, hessian, list(pair))), hessian)
        for pair in itertools.combinations(range(16), 2)
    )
    assert sum(c.drop for c in best_columns(error, hessian, 2)) > 0.9 * best


def test_least_squares_beats_pasting_the_original_columns_back() -> None:
    _, error, hessian = error_and_hessian()
    chosen = [c.channel for c in best_columns(error, hessian, 4)]
    fitted = energy(with_shadow(error, chosen, residual(error, hessian, chosen)), hessian)
    pasted = energy(with_shadow(error, chosen, error[:, chosen]), hessian)
    assert fitted < energy(error, hessian)
    assert fitted < pasted


def test_int8_residuals_cost_half_the_bytes_and_hardly_any_drop() -> None:
    _, error, hessian = error_and_hessian()
    chosen = [c.channel for c in best_columns(error, hessian, 4)]
    exact = residual(error, hessian, chosen)
    steps, scale = store_int8(exact)
    stored = steps.float() * scale.float()
    assert steps.dtype == torch.int8
    gain_exact = energy(error, hessian) - energy(with_shadow(error, chosen, exact), hessian)
    gain_int8 = energy(error, hessian) - energy(with_shadow(error, chosen, stored), hessian)
    assert gain_int8 > 0.99 * gain_exact
    assert column_bytes(2048, int8=False) == 4100
    assert column_bytes(2048, int8=True) == 2054


def test_int8_columns_of_a_case_worked_by_hand() -> None:
    steps, scale = store_int8(torch.tensor([[127.0, 0.0, 1e9], [0.6, 0.0, -1e9], [-63.4, 0.0, 3.2e6]]))
    assert scale.tolist() == [1.0, 2.0**-24, 65504.0]
    assert steps.tolist() == [[127, 0, 127], [1, 0, -127], [-63, 0, 49]]


def test_columns_are_those_of_a_greedy_choice_in_float64() -> None:
    _, error, hessian = error_and_hessian(8, 40)
    damped = hessian.double() + 0.5 * hessian.double().diagonal().mean() * torch.eye(40)
    pull = error.double() @ damped
    chosen: list[int] = []
    for _ in range(12):
        drops = {}
        for one in set(range(40)) - set(chosen):
            index = [*chosen, one]
            fit = torch.linalg.solve(damped[index][:, index], pull[:, index].T)
            drops[one] = float((pull[:, index].T * fit).sum())
        chosen.append(max(drops, key=lambda channel: drops[channel]))
    found = find_columns(error, hessian, 12, damp=0.5)
    assert found.channels.tolist() == chosen
    values = prefix_residual(found.reach, found.within)
    fit = torch.linalg.solve(damped[chosen][:, chosen], pull[:, chosen].T)
    torch.testing.assert_close(values.double(), fit.T, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(residual(error, hessian, chosen, damp=0.5), values, rtol=1e-3, atol=1e-5)


def test_no_error_means_no_columns_and_a_column_cannot_be_chosen_twice() -> None:
    hessian = moments_of(layer_inputs(200, 20))
    assert best_columns(torch.zeros(4, 20), hessian, 5) == []
    assert best_columns(torch.zeros(4, 20), torch.zeros(20, 20), 5) == []
    assert len(best_columns(gaussian(4, 20), hessian, 99)) <= 20
    with pytest.raises(ValueError, match="chosen twice"):
        residual(gaussian(4, 20), torch.ones(20, 20), [3, 3], damp=0.0)


def test_the_budget_buys_the_most_error_per_byte_and_is_never_exceeded() -> None:
    offers = [
        Offer(matrix="a", drops=[10.0, 1.0], column_bytes=10),
        Offer(matrix="b", drops=[8.0, 7.0, 0.0], column_bytes=10),
        Offer(matrix="c", drops=[30.0], column_bytes=100),
    ]
    assert spend(offers, 30).columns == {"a": 1, "b": 2}
    assert spend(offers, 30).spent_bytes == 30
    everything = spend(offers, 1000)
    assert everything.columns == {"a": 2, "b": 2, "c": 1}
    assert everything.spent_bytes == 140
    assert spend(offers, 9).columns == {}
    costly = Offer(matrix="d", drops=[20.0], column_bytes=30)
    assert spend([costly, *offers], 30).columns == {"a": 1, "b": 2}


def test_rho_and_routing_decide_between_equal_errors_and_names_between_equal_gains() -> None:
    rare = Offer(matrix="rare", drops=[4.0], column_bytes=10, weight=0.1)
    often = Offer(matrix="often", drops=[4.0], column_bytes=10, weight=0.5)
    assert spend([rare, often], 10).columns == {"often": 1}
    twins = [Offer(matrix=name, drops=[4.0], column_bytes=10) for name in ("z", "y")]
    assert spend(twins, 10).columns == {"y": 1}


def test_super_experts_are_bought_whole_first_and_their_columns_are_then_not_offered() -> None:
    offers = [
        Offer(matrix="e1.down", drops=[9.0], column_bytes=10, expert="e1"),
        Offer(matrix="e2.down", drops=[1.0], column_bytes=10, expert="e2"),
    ]
    bought = spend(offers, 70, {"e1": 50, "e3": 40})
    assert bought.experts == ("e1",)
    assert bought.columns == {"e2.down": 1}
    assert bought.spent_bytes == 60


def test_the_change_on_unseen_tokens_is_that_of_the_residual_fitted_on_others() -> None:
    weight, hessian = gaussian(12, 64), moments_of(layer_inputs(400, 64))
    solved = solve(weight, hessian, QuantConfig(), n_eff=400)
    error = (weight - dequantize(solved.codes, solved.grid)).double()
    fresh = layer_inputs(50, 64, seed=9).double()
    found = find_columns(error, hessian, 5)
    index = found.channels
    reach = error @ fresh.T @ fresh[:, index] / 50
    changes = unseen_changes(found.reach, found.within, reach, fresh[:, index].T @ fresh[:, index] / 50)
    for count in (1, 2, 5):
        values = prefix_residual(found.reach, found.within, count).double()
        left = fresh @ with_shadow(error, index[:count].tolist(), values).T
        change = (left.square().sum() - (fresh @ error.T).square().sum()) / 50
        assert float(changes[count - 1]) == pytest.approx(float(change), rel=1e-4)


def test_candidates_add_up_to_the_whole_error_when_every_column_is_taken() -> None:
    _, error, hessian = error_and_hessian(8, 32)
    found = find_columns(error, hessian, 32)
    assert len(found.channels) == 32
    assert float(found.drops.sum()) == pytest.approx(found.whole, rel=1e-3)
    assert torch.allclose(prefix_residual(found.reach, found.within), error[:, found.channels], atol=1e-4)
