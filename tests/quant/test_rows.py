"""Feedback between rows against float64 conditional means, and what it does to the error it is made for."""

from __future__ import annotations

import pytest
import torch
from quant_samples import gaussian, layer_inputs, moments_of

from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.factor import order_columns
from glm5_quant.quant.grid import Grid, dequantize, search_grid
from glm5_quant.quant.rounding import error_feedback, solve
from glm5_quant.quant.rows import TURNS, OutputMoments, RowFeedback

CONFIG = QuantConfig(shrink=False, descent_sweeps=0)


def alike(groups: int, rows: int, tokens: int = 4000, seed: int = 3) -> torch.Tensor:
    """Gradients [T, groups * rows] that are much alike within a group."""
    parts = [
        gaussian(tokens, rows, seed=seed + g) @ (gaussian(rows, rows, seed=90 + g) + 2.0 / rows**0.5)
        for g in range(groups)
    ]
    return torch.cat(parts, dim=1)


def moments(gradient: torch.Tensor, groups: int) -> OutputMoments:
    found = OutputMoments.empty(groups, gradient.shape[1] // groups)
    found.add(gradient)
    return found


def feedback_of(gradient: torch.Tensor, groups: int, damp: float = 0.01) -> RowFeedback:
    """Trusted without end: moments as they are, damped."""
    return RowFeedback.of(moments(gradient, groups), damp, 1e12)


def curvature(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """float64 [N, N] sum g g^T / |g| within each group, nothing between groups."""
    size = gradient.shape[1] // groups
    blocks = []
    for g in range(groups):
        one = gradient[:, g * size : (g + 1) * size].double()
        blocks.append((one / one.norm(dim=1, keepdim=True)).T @ one)
    return torch.block_diag(*blocks)


def naive(weight: torch.Tensor, hessian: torch.Tensor, metric: torch.Tensor, groups: int, grid: Grid) -> torch.Tensor:
    """Turn after turn, rows aiming at what is best given earlier turns and all others free: float64 inverses."""
    n, size = len(weight), len(weight) // groups
    columns, codes = order_columns(hessian[None], 0.01), torch.empty(weight.shape, dtype=torch.uint8)
    for g in range(groups):
        index = torch.arange(g * size, (g + 1) * size)
        m = metric[index][:, index].clone()
        m += 0.01 * m.diagonal().log().mean().exp() * torch.eye(size, dtype=torch.float64)
        order = sorted(range(size), key=lambda i: (-float(m[i, i]), i))
        error = torch.zeros(size, weight.shape[1], dtype=torch.float64)
        turn = -(-size // TURNS)
        for step, row in enumerate(order):
            start = step // turn * turn
            before, left = order[:start], order[start:]
            aim = weight[index[row]].double()
            if before:
                aim = aim + (torch.linalg.inv(m[left][:, left]) @ m[left][:, before] @ error[before])[step - start]
            one = Grid(scale=grid.scale[index[row]][None], zero=grid.zero[index[row]][None])
            codes[index[row]] = error_feedback(aim.float()[None], columns, one)[0]
            error[row] = weight[index[row]].double() - dequantize(codes[index[row]][None], one)[0].double()
    assert n == groups * size
    return codes


@pytest.mark.parametrize(("groups", "rows"), [(1, 8), (3, 5), (2, 1), (2, 20)])
def test_rows_aim_at_the_conditional_mean_of_a_float64_reference(groups: int, rows: int) -> None:
    weight, hessian = gaussian(groups * rows, 96), moments_of(layer_inputs(500, 96))
    weight[1] = -weight[1].abs()  # a row without a weight above 0 is no row of zeros
    gradient = alike(groups, rows)
    grid = search_grid(weight, hessian.diagonal())
    found = solve(weight, hessian, CONFIG, grid=grid, feedback=[feedback_of(gradient, groups)])
    wanted = naive(weight, hessian, curvature(gradient, groups), groups, grid)
    assert int((found.codes != wanted).sum()) <= 1  # a tie may fall the other way in float32


def test_the_error_that_outputs_count_falls_and_the_plain_one_pays() -> None:
    groups, rows, k = 3, 32, 128
    weight, hessian = gaussian(groups * rows, k), moments_of(layer_inputs(900, k))
    gradient = alike(groups, rows)
    metric = curvature(gradient, groups)

    def errors(config: QuantConfig, feedback: list[RowFeedback]) -> tuple[float, float]:
        solved = solve(weight, hessian, config, feedback=feedback)
        error = (weight - dequantize(solved.codes, solved.grid)).double()
        seen = error @ hessian.double() @ error.T
        return float((metric * seen).sum()), float(seen.trace())

    for config in (CONFIG, QuantConfig(shrink=False)):
        counted, plain = errors(config, [])
        with_rows, plain_with = errors(config, [feedback_of(gradient, groups)])
        assert with_rows < 0.8 * counted
        assert plain_with > plain


def test_outputs_that_do_not_touch_each_other_change_nothing() -> None:
    weight, hessian = gaussian(24, 100), moments_of(layer_inputs(500, 100))
    without = solve(weight, hessian, QuantConfig(), n_eff=500)
    alone = OutputMoments.empty(3, 8)
    alone.sum_GRR += torch.diag(torch.tensor([5.0, 1.0, 3.0, 2.0, 9.0, 4.0, 7.0, 6.0]))
    alone.energy_G += 10.0
    alone.square_G += 1.0
    for one in (alone, OutputMoments.empty(3, 8)):
        found = solve(weight, hessian, QuantConfig(), n_eff=500, feedback=[RowFeedback.of(one, 0.01, 1.0)])
        assert torch.equal(found.codes, without.codes)
        assert torch.equal(found.grid.scale, without.grid.scale)


def test_stacked_matrices_are_solved_as_each_would_be_alone() -> None:
    hessian = moments_of(layer_inputs(500, 70))
    weights = [gaussian(40, 70), gaussian(6, 70, seed=1), gaussian(11, 70, seed=2)]
    feedback = [feedback_of(alike(2, 20), 2), feedback_of(alike(3, 2), 3), feedback_of(alike(1, 11), 1)]
    together = solve(torch.cat(weights), hessian, QuantConfig(), n_eff=500, feedback=feedback)
    alone = [solve(w, hessian, QuantConfig(), n_eff=500, feedback=[f]) for w, f in zip(weights, feedback, strict=True)]
    assert torch.equal(together.codes, torch.cat([one.codes for one in alone]))
    assert torch.equal(together.grid.scale, torch.cat([one.grid.scale for one in alone]))


def test_feedback_of_some_rows_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="between 16 rows of 24"):
        solve(gaussian(24, 70), torch.eye(70), QuantConfig(), feedback=[feedback_of(alike(2, 8), 2)])


def test_blocks_of_zeros_stay_zeros_whatever_other_rows_lack() -> None:
    weight, hessian = gaussian(16, 192) * 5, moments_of(layer_inputs(600, 192))
    weight[3] = 0
    weight[5, 64:128] = 0
    solved = solve(weight, hessian, QuantConfig(), n_eff=600, feedback=[feedback_of(alike(2, 8), 2)])
    restored = dequantize(solved.codes, solved.grid)
    assert bool((restored[3] == 0).all())
    assert bool((restored[5, 64:128] == 0).all())


def test_tokens_weigh_by_the_size_of_their_gradient() -> None:
    found = OutputMoments.empty(2, 2)
    found.add(torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 5.0, 1.0, 0.0]]))
    assert torch.allclose(found.sum_GRR[0], torch.tensor([[9.0, 12.0], [12.0, 16.0 + 25.0]]) / 5.0)
    assert torch.equal(found.sum_GRR[1], torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert found.n_eff.tolist() == [2.0, 1.0]
    assert OutputMoments.empty(1, 4).n_eff.tolist() == [0.0]
    before = found.sum_GRR.clone()
    found.add(torch.tensor([[float("nan"), 1.0, float("inf"), 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert torch.equal(found.sum_GRR, before)
    assert found.n_eff.tolist() == [2.0, 1.0]


@pytest.mark.parametrize(("groups", "rows"), [(1, 12), (4, 9)])
def test_weighed_rows_count_plainly_what_m_counts(groups: int, rows: int) -> None:
    gradient, error = alike(groups, rows), gaussian(groups * rows, 50)
    found = feedback_of(gradient, groups, damp=0.0)
    metric = curvature(gradient, groups)
    wanted = float((error.double().T @ metric @ error.double()).trace() / metric.diagonal().mean())
    assert float(found.weigh(error).double().square().sum()) == pytest.approx(wanted, rel=1e-4)


def test_few_tokens_are_trusted_little() -> None:
    gradient = alike(1, 24, tokens=12)
    bold, careful = (RowFeedback.of(moments(gradient, 1), 0.01, trust).reach_GRR for trust in (1e12, 1.0))
    step = -(-24 // TURNS)
    assert float(careful[:, :step, step:].abs().mean()) < 0.5 * float(bold[:, :step, step:].abs().mean())


def test_some_groups_stand_for_all() -> None:
    found = feedback_of(alike(6, 5), 6)
    part, rows = found.some(12)
    assert rows.tolist() == [*range(5), *range(10, 15), *range(20, 25)]
    assert torch.equal(part.order_GR, found.order_GR[::2])
    assert torch.equal(part.weigh(gaussian(30, 7)[rows]), found.weigh(gaussian(30, 7))[rows])
    assert found.some(1000)[1].tolist() == list(range(30))
