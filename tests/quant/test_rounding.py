"""Error feedback against a plain float64 GPTQ, and the claims made about the solver's error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quant_samples import gaussian, layer_inputs, moments_of

from glm5_quant.quant import descent, rounding
from glm5_quant.quant.config import PRESETS, QuantConfig
from glm5_quant.quant.errors import relative_error
from glm5_quant.quant.factor import order_columns, usable_hessian
from glm5_quant.quant.grid import Grid, dequantize, minmax_grid, quantize, search_grid
from glm5_quant.quant.rounding import error_feedback, solve
from glm5_quant.quant.shrinkage import trusted

CONFIG = QuantConfig(descent_sweeps=0)


def naive_gptq(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, damp: float) -> torch.Tensor:
    """GPTQ as its paper writes it, but damped by the geometric mean: float64, inverse by Cholesky, column by column."""
    n, k = weight.shape
    order = sorted(range(k), key=lambda j: (-float(hessian[j, j]), j))
    w = weight.double()[:, order].clone()
    h = hessian.double()[order][:, order]
    h = h + damp * h.diagonal().log().mean().exp() * torch.eye(k, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    codes = torch.empty(n, k, dtype=torch.uint8)
    for i, j in enumerate(order):
        scale, zero = grid.scale[:, j // 64].double(), grid.zero[:, j // 64].double()
        code = ((w[:, i] / scale).round() + zero).clamp(0, 15)
        error = (w[:, i] - (code - zero) * scale) / upper[i, i]
        w[:, i + 1 :] -= error[:, None] * upper[i, i + 1 :]
        codes[:, j] = code.to(torch.uint8)
    return codes


@pytest.mark.parametrize(("n", "k"), [(16, 64), (9, 96), (12, 300), (5, 7)])
def test_error_feedback_gives_the_codes_of_a_float64_gptq(n: int, k: int) -> None:
    weight, hessian = gaussian(n, k), moments_of(layer_inputs(4 * k, k))
    grid = search_grid(weight, hessian.diagonal())
    ours = error_feedback(weight, order_columns(hessian[None], 0.01), grid)
    assert torch.equal(ours, naive_gptq(weight, hessian, grid, 0.01))


def test_the_factor_rebuilds_the_damped_hessian_in_the_order_of_rounding() -> None:
    hessian = moments_of(layer_inputs(500, 80))
    found = order_columns(hessian[None], 0.01)
    order, unit, variance = found.order_EK[0], found.unit_EKK[0].double(), found.variance_EK[0].double()
    assert bool((hessian.diagonal()[order].diff() <= 0).all())
    assert torch.equal(unit, torch.triu(unit))
    rebuilt = unit @ torch.diag(variance[order]) @ unit.T * float(hessian.diagonal().mean())
    damped = hessian.double() + 0.01 * hessian.diagonal().double().log().mean().exp() * torch.eye(80)
    torch.testing.assert_close(rebuilt, damped[order][:, order], rtol=1e-5, atol=1e-5)


def test_equal_diagonals_are_taken_in_natural_order() -> None:
    assert order_columns(torch.eye(33)[None], 0.01).order_EK[0].tolist() == list(range(33))


def test_the_solver_beats_round_to_nearest_on_held_out_tokens() -> None:
    weight = gaussian(48, 256)
    hessian, held = moments_of(layer_inputs(2048, 256)), moments_of(layer_inputs(2048, 256, seed=9))
    plain = minmax_grid(weight)
    nearest = float(relative_error(weight, dequantize(quantize(weight, plain), plain), held))
    solved = solve(weight, hessian, CONFIG, n_eff=2048)
    assert float(relative_error(weight, dequantize(solved.codes, solved.grid), held)) < 0.6 * nearest
    assert float(solved.error) < 0.6 * nearest


def test_the_reported_error_is_the_output_error_over_the_tokens_behind_h() -> None:
    weight, x = gaussian(20, 100), layer_inputs(700, 100)
    solved = solve(weight, moments_of(x), CONFIG, n_eff=700)
    rest = (weight - dequantize(solved.codes, solved.grid)).double()
    by_hand = (x.double() @ rest.T).square().sum() / (x.double() @ weight.double().T).square().sum()
    assert float(solved.error) == pytest.approx(float(by_hand), rel=1e-4)


def test_shrinkage_rescues_an_expert_with_fewer_tokens_than_inputs() -> None:
    weight, held = gaussian(64, 256), moments_of(layer_inputs(4096, 256, seed=9))
    hessian = moments_of(layer_inputs(100, 256))
    plain = minmax_grid(weight)
    nearest = float(relative_error(weight, dequantize(quantize(weight, plain), plain), held))

    def held_error(config: QuantConfig) -> float:
        solved = solve(weight, hessian, config, n_eff=100)
        return float(relative_error(weight, dequantize(solved.codes, solved.grid), held))

    assert held_error(CONFIG) < 0.85 * nearest
    assert held_error(CONFIG) < held_error(replace(CONFIG, shrink=False))


def test_each_kind_of_polish_lowers_the_error_it_works_on() -> None:
    weight, hessian = gaussian(40, 192), moments_of(layer_inputs(1500, 192))
    plain = replace(CONFIG, shrink=False, descent_sweeps=0)
    start = float(solve(weight, hessian, plain).error)
    swept = float(solve(weight, hessian, replace(plain, descent_sweeps=2, refit_scales=False)).error)
    refitted = float(solve(weight, hessian, replace(plain, descent_sweeps=2, refit_scales=True)).error)
    assert swept < start
    assert refitted < swept


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_a_singular_h_never_stops_the_solver(rank: int) -> None:
    weight = gaussian(8, 128)
    x = layer_inputs(max(rank, 1), 128) * float(rank > 0)
    solved = solve(weight, moments_of(x), replace(CONFIG, damp=0.0, shrink=False))
    step = solved.grid.scale.repeat_interleave(64, -1)
    assert bool(torch.isfinite(dequantize(solved.codes, solved.grid)).all())
    assert float(solved.error) < 0.05
    if rank == 0:
        assert float(((weight - dequantize(solved.codes, solved.grid)).abs() / step).median()) < 0.5


def test_an_indefinite_h_is_damped_until_it_factors() -> None:
    hessian = torch.eye(64)
    hessian[0, 1] = hessian[1, 0] = 3.0
    found = order_columns(hessian[None], 0.01)
    assert bool(torch.isfinite(found.unit_EKK).all())
    assert bool((found.variance_EK > 0).all())


def test_an_h_of_zeros_counts_as_the_identity() -> None:
    weight = gaussian(8, 128)
    blind, even = solve(weight, torch.zeros(128, 128), CONFIG, n_eff=0), solve(weight, torch.eye(128), CONFIG)
    assert torch.equal(blind.codes, even.codes)
    assert torch.equal(blind.codes, quantize(weight, search_grid(weight)))


def test_feedback_does_not_leak_into_blocks_of_zeros() -> None:
    weight, hessian = gaussian(8, 192) * 5, moments_of(layer_inputs(600, 192))
    weight[3] = 0
    weight[:, 64:128] = 0
    for name, config in PRESETS.items():
        solved = solve(weight, hessian, config, n_eff=600)
        restored = dequantize(solved.codes, solved.grid)
        assert bool((restored[3] == 0).all()), name
        assert bool((restored[:, 64:128] == 0).all()), name
        assert bool(torch.isfinite(solved.error)), name


def test_a_weight_of_zeros_has_error_0() -> None:
    solved = solve(torch.zeros(4, 64), torch.eye(64), CONFIG)
    assert float(solved.error) == 0.0


def test_a_stack_of_experts_is_solved_as_its_members_are() -> None:
    weight = gaussian(3, 16, 130)
    hessian = torch.stack([moments_of(layer_inputs(90 + 200 * e, 130, seed=e)) for e in range(3)])
    n_eff = torch.tensor([90.0, 290.0, 490.0])
    stack = solve(weight, hessian, CONFIG, n_eff=n_eff)
    for e in range(3):
        alone = solve(weight[e], hessian[e], CONFIG, n_eff=float(n_eff[e]))
        assert float((stack.codes[e] == alone.codes).float().mean()) > 0.999
        assert float(stack.error[e]) == pytest.approx(float(alone.error), rel=1e-3)


def test_columns_never_used_are_rounded_to_nearest() -> None:
    weight, x = gaussian(8, 128), layer_inputs(600, 128)
    x[:, 70:90] = 0
    solved = solve(weight, moments_of(x), CONFIG, n_eff=600)
    nearest = quantize(weight, solved.grid)
    assert torch.equal(solved.codes[:, 70:90], nearest[:, 70:90])


def test_without_error_feedback_each_row_has_the_better_of_two_grids() -> None:
    weight, hessian = gaussian(32, 128), moments_of(layer_inputs(600, 128))
    fast = solve(weight, hessian, replace(CONFIG, error_feedback=False))
    diagonal = hessian.diagonal()
    for grid in (search_grid(weight), search_grid(weight, diagonal + 0.01 * diagonal.log().mean().exp())):
        other = relative_error(weight, dequantize(quantize(weight, grid), grid), hessian)
        assert float(fast.error) <= float(other)
    assert torch.equal(fast.codes, quantize(weight, fast.grid))


def test_a_given_grid_is_kept() -> None:
    weight, hessian = gaussian(8, 128), moments_of(layer_inputs(600, 128))
    grid = minmax_grid(weight)
    assert solve(weight, hessian, CONFIG, grid=grid).grid is grid


@pytest.mark.slow
def test_codes_do_not_depend_on_the_number_of_threads() -> None:
    weight, hessian = gaussian(96, 320), trusted(moments_of(layer_inputs(1000, 320)), 1000, 2.0)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            results.append(solve(weight, hessian, PRESETS["high"]))
        finally:
            torch.set_num_threads(1)
    for other in results[1:]:
        assert torch.equal(results[0].codes, other.codes)
        assert torch.equal(results[0].grid.scale, other.grid.scale)


def test_bad_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        solve(gaussian(4, 64), torch.eye(65), CONFIG)
    with pytest.raises(ValueError, match="H holds NaN"):
        solve(gaussian(4, 64), torch.eye(64) * float("nan"), CONFIG)


def test_more_turns_of_polish_never_raise_the_error_and_slices_of_rows_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, hessian = gaussian(600, 128), moments_of(layer_inputs(900, 128))
    plain = replace(CONFIG, shrink=False)
    errors = [float(solve(weight, hessian, replace(plain, descent_sweeps=n)).error) for n in range(5)]
    assert errors == sorted(errors, reverse=True)
    assert errors[4] < 0.97 * errors[0]
    polished = replace(plain, descent_sweeps=3)
    whole = solve(weight, hessian, polished)
    for module in (descent, rounding):
        monkeypatch.setattr(module, "SLICE_WEIGHTS", 0)
    sliced = solve(weight, hessian, polished)
    torch.testing.assert_close(sliced.error, whole.error, rtol=1e-3, atol=0.0)
    assert float((sliced.codes == whole.codes).float().mean()) > 0.999
    torch.testing.assert_close(sliced.grid.scale, whole.grid.scale)


def test_a_sweep_moves_each_code_to_what_float64_finds_best_with_all_others_fixed() -> None:
    weight, hessian = gaussian(6, 300), moments_of(layer_inputs(1200, 300))
    grid = minmax_grid(weight, scale_dtype=torch.float32)
    start = quantize(weight, grid)
    codes = start.clone()
    zero, scale = (t.double().repeat_interleave(64, -1)[:, :300] for t in (grid.zero, grid.scale))
    for j in range(300):
        error = weight.double() - (codes.double() - zero) * scale
        wanted = codes[:, j] + error @ hessian.double()[j] / hessian.double()[j, j] / scale[:, j]
        codes[:, j] = wanted.round().clamp(0, 15).to(torch.uint8)
    found, same = descent.polish(weight, hessian, start, grid, sweeps=1, refit=False, scale_dtype=torch.float32)
    assert int((codes != start).sum()) > 100
    assert int((found != codes).sum()) <= 1  # a tie may fall the other way in float32
    assert torch.equal(same.scale, grid.scale)


def test_scales_are_refitted_to_float64_least_squares_and_stay_where_that_is_no_better_or_far_off() -> None:
    weight, hessian = gaussian(12, 150), moments_of(layer_inputs(900, 150))
    weight[3, 64:128] = 0
    start = minmax_grid(weight, scale_dtype=torch.float32)
    codes = quantize(weight, start)
    steps = codes.double() - start.zero.double().repeat_interleave(64, -1)[:, :150]
    blocks = torch.zeros(12, 3, 150, dtype=torch.float64)
    for b in range(3):
        blocks[:, b, 64 * b : 64 * b + 64] = steps[:, 64 * b : 64 * b + 64]
    system = blocks @ hessian.double() @ blocks.mT
    pulled = (blocks @ (weight.double() @ hessian.double())[..., None])[..., 0]
    system[3, 1, 1], pulled[3, 1] = 1.0, start.scale[3, 1].double()  # an empty block keeps its scale
    wanted = torch.linalg.solve(system, pulled)

    def refitted(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        grid = Grid(scale=scale, zero=start.zero)
        return descent.polish(weight, hessian, codes, grid, sweeps=1, refit=True, scale_dtype=dtype)[1].scale

    assert float((start.scale / wanted - 1).abs().mean()) > 0.01
    torch.testing.assert_close(refitted(start.scale, torch.float32).double(), wanted, rtol=1e-3, atol=0.0)
    best = wanted.float()
    assert not torch.equal(best.bfloat16().float(), best)
    assert torch.equal(refitted(best, torch.bfloat16), best)
    small = start.scale / 3
    assert torch.equal(refitted(small, torch.float32), small)


@pytest.mark.parametrize("sweeps", [0, 3])
def test_blocks_without_a_weight_above_0_are_solved_as_those_without_one_below(sweeps: int) -> None:
    weight, hessian = gaussian(8, 128).abs() + 0.1, moments_of(layer_inputs(600, 128))
    config = replace(CONFIG, descent_sweeps=sweeps)
    above, below = (float(solve(one, hessian, config, n_eff=600).error) for one in (weight, -weight))
    assert below == pytest.approx(above, rel=0.2)
    assert below < 0.01


def test_a_stack_keeps_what_is_sound_and_gives_the_identity_to_what_is_empty() -> None:
    sound, noisy = torch.eye(3) * 2.0, torch.eye(3) * 2.0
    noisy[1, 1] = -1e-6
    found = usable_hessian(torch.stack([torch.zeros(3, 3), sound, noisy]))
    assert torch.equal(found[0], torch.eye(3))
    assert torch.equal(found[1], sound)
    assert torch.equal(found[2], torch.diag(torch.tensor([2.0, 0.0, 2.0])))
    assert torch.equal(usable_hessian(noisy), found[2])


def test_polish_rounds_columns_that_no_token_uses_to_nearest() -> None:
    weight, hessian = gaussian(16, 128), moments_of(layer_inputs(900, 128))
    hessian[70:80], hessian[:, 70:80] = 0.0, 0.0
    solved = solve(weight, hessian, replace(CONFIG, descent_sweeps=3))
    assert torch.equal(solved.codes[:, 70:80], quantize(weight, solved.grid)[:, 70:80])


@pytest.mark.parametrize(("limit", "turns"), [(4608, 3), (128 * 2, 2), (1, 1)])
def test_long_rows_are_polished_in_fewer_turns(limit: int, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = gaussian(32, 128), moments_of(layer_inputs(900, 128))
    plain = solve(weight, hessian, replace(CONFIG, descent_sweeps=turns))
    monkeypatch.setattr(descent, "TURN_INPUTS", limit)
    limited = solve(weight, hessian, replace(CONFIG, descent_sweeps=3))
    assert torch.equal(limited.codes, plain.codes)
    assert torch.equal(limited.grid.scale, plain.grid.scale)


def test_polish_does_not_move_weights_that_hardly_count() -> None:
    """Three blocks see inputs a hundredth as large, of the same factors. Free scales would turn these blocks to what
    the first one lacks: without damping the error grew from 12% of the weights to 38%."""
    factors = gaussian(2000, 8)
    strong = factors @ gaussian(8, 64, seed=1) + 0.3 * gaussian(2000, 64, seed=5)
    weak = factors @ gaussian(8, 192, seed=3) + 0.1 * gaussian(2000, 192, seed=4)
    weight, hessian = gaussian(64, 256), moments_of(torch.cat([strong, 0.01 * weak], dim=1))
    before, after = (solve(weight, hessian, replace(CONFIG, descent_sweeps=n)) for n in (0, 3))
    far = [float((dequantize(one.codes, one.grid) - weight).norm()) for one in (before, after)]
    assert far[1] < 1.05 * far[0]
    assert float(after.error) < float(before.error)
