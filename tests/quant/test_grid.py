"""Grids: defined results for every block, scales exact in their dtype, and a search that never loses to min-max."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_quant.quant.grid import Grid, dequantize, minmax_grid, quantize, search_grid

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both_grids(weight: torch.Tensor, dtype: torch.dtype, symmetric: bool = False) -> list[Grid]:
    return [
        minmax_grid(weight, scale_dtype=dtype, symmetric=symmetric),
        search_grid(weight, None, scale_dtype=dtype, symmetric=symmetric),
    ]


def weighted_error(weight: torch.Tensor, grid: Grid, importance: torch.Tensor) -> torch.Tensor:
    rest = weight.double() - dequantize(quantize(weight, grid), grid).double()
    return (rest.square() * importance.double()).sum(-1)


def test_min_max_grid_of_a_hand_computed_block() -> None:
    weight = torch.linspace(-1.0, 2.75, 16).repeat(4)[None]
    grid = minmax_grid(weight, scale_dtype=torch.float32)
    assert grid.scale.item() == 0.25
    assert grid.zero.item() == 4
    assert quantize(weight, grid)[0, :16].tolist() == list(range(16))
    assert torch.equal(dequantize(quantize(weight, grid), grid), weight)


def test_symmetric_grids_have_zero_point_8_everywhere_and_reach_both_ends() -> None:
    weight = gaussian(5, 128)
    for grid in both_grids(weight, torch.bfloat16, symmetric=True):
        assert torch.equal(grid.zero, torch.full((5, 2), 8, dtype=torch.uint8))
    plain = minmax_grid(weight, symmetric=True, scale_dtype=torch.float32)
    low, high = (weight.reshape(5, 2, 64).amin(-1), weight.reshape(5, 2, 64).amax(-1))
    torch.testing.assert_close(plain.scale, torch.maximum(high / 7, -low / 8))
    step = plain.scale.repeat_interleave(64, -1)
    assert bool(((weight - dequantize(quantize(weight, plain), plain)).abs() <= step / 2 * 1.0001).all())


def test_a_block_that_ends_at_0_is_not_empty_and_an_empty_one_has_scale_1_and_zero_point_8() -> None:
    ramp = torch.linspace(0.0, 3.75, 16).repeat(4)
    grid = minmax_grid(torch.stack([ramp, -ramp, 0 * ramp]), scale_dtype=torch.float32)
    assert grid.scale[:, 0].tolist() == [0.25, 0.25, 1.0]
    assert grid.zero[:, 0].tolist() == [0, 15, 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_field_case_o01_zero_blocks_come_back_as_exactly_zero(dtype: torch.dtype, symmetric: bool) -> None:
    weight = gaussian(6, 192)
    weight[2] = 0
    weight[5, 64:128] = 0
    for grid in both_grids(weight, dtype, symmetric):
        assert bool((torch.isfinite(grid.scale) & (grid.scale > 0)).all())
        restored = dequantize(quantize(weight, grid), grid)
        assert bool((restored[2] == 0).all())
        assert bool((restored[5, 64:128] == 0).all())


def test_field_case_o02_a_block_below_the_range_of_float16_is_as_accurate_as_any_other_in_bfloat16() -> None:
    weight = gaussian(4, 128).bfloat16().float()
    weight[1, :64] *= 1e-8
    for grid in both_grids(weight, torch.bfloat16):
        restored = dequantize(quantize(weight, grid), grid)
        error = ((restored - weight).square().reshape(4, 2, 64).sum(-1)) / weight.square().reshape(4, 2, 64).sum(-1)
        assert float(error[1, 0]) < 1.5 * float(error[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_field_case_o03_denormals_and_huge_ranges_have_finite_scales_and_stay_within_the_range(
    dtype: torch.dtype,
) -> None:
    sizes = torch.tensor([1e-20, 1e-30, 1e-40, 1e30, 3e38])
    weight = (gaussian(5, 64) / gaussian(5, 64).abs().amax(-1, keepdim=True)) * sizes[:, None]
    top = weight.abs().amax(-1)
    for grid in both_grids(weight, dtype):
        restored = dequantize(quantize(weight, grid), grid)
        assert bool((torch.isfinite(grid.scale) & (grid.scale > 0)).all())
        assert bool(torch.isfinite(restored).all())
        assert bool((restored.abs().amax(-1) <= top * 1.15).all())
        within = (restored - weight).abs().amax(-1) <= grid.scale[:, 0] * 1.01
        assert bool((within | (restored == 0).all(-1) | (grid.scale[:, 0] >= 65504)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_blocks_come_back_within_a_step(dtype: torch.dtype) -> None:
    weight = torch.tensor([3.7, -3.7, 1e-3, -250.0])[:, None].expand(4, 64).contiguous()
    for grid in both_grids(weight, dtype):
        assert bool(((dequantize(quantize(weight, grid), grid) - weight).abs() <= grid.scale).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_exact_in_the_storage_dtype(dtype: torch.dtype) -> None:
    weight = gaussian(16, 256) * torch.logspace(-9, 6, 16)[:, None]
    for grid in both_grids(weight, dtype):
        assert torch.equal(grid.scale.to(dtype).float(), grid.scale)


@pytest.mark.parametrize(("n", "k"), [(1, 64), (60, 128), (3, 96), (2, 7), (2049, 64), (1, 1)])
def test_ragged_and_small_shapes_keep_their_shape(n: int, k: int) -> None:
    weight = gaussian(n, k)
    for grid in both_grids(weight, torch.bfloat16):
        assert grid.scale.shape == grid.zero.shape == (n, -(-k // 64))
        codes = quantize(weight, grid)
        assert codes.shape == (n, k)
        assert int(codes.max()) <= 15
        step = grid.scale.repeat_interleave(64, -1)[:, :k]
        assert float(((dequantize(codes, grid) - weight).abs() / step).mean()) < 0.5


def test_a_ragged_tail_gets_the_grid_it_would_have_alone() -> None:
    weight, importance = gaussian(8, 96), gaussian(96, seed=1).square()
    whole = search_grid(weight, importance)
    tail = search_grid(weight[:, 64:].contiguous(), importance[64:])
    assert torch.equal(whole.scale[:, 1:], tail.scale)
    assert torch.equal(whole.zero[:, 1:], tail.zero)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 150),
    symmetric=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    spread=st.floats(0, 4),
)
def test_the_searched_grid_is_never_worse_than_min_max_under_its_own_weights(
    seed: int, k: int, symmetric: bool, dtype: torch.dtype, spread: float
) -> None:
    weight = gaussian(6, k, seed=seed)
    importance = (gaussian(k, seed=seed + 1) * spread).exp()
    searched = search_grid(weight, importance, symmetric=symmetric, scale_dtype=dtype)
    plain = minmax_grid(weight, symmetric=symmetric, scale_dtype=dtype)
    better, worse = weighted_error(weight, searched, importance), weighted_error(weight, plain, importance)
    energy = (weight.double().square() * importance.double()).sum(-1)
    assert bool((better <= worse * (1 + 1e-5) + 1e-12 * energy).all())


def test_the_search_finds_what_trying_every_zero_and_400_scales_finds_to_within_4_percent() -> None:
    weight, importance = gaussian(12, 64), gaussian(64, seed=3).square()
    grid = search_grid(weight, importance, scale_dtype=torch.float32)
    found = weighted_error(weight, grid, importance)
    best = torch.full((12,), float("inf"), dtype=torch.float64)
    reach = (weight.amax(-1) - weight.amin(-1))[:, None] / 15
    for zero in range(16):
        for ratio in torch.linspace(0.3, 1.1, 400).tolist():
            candidate = Grid(scale=reach * ratio, zero=torch.full((12, 1), zero, dtype=torch.uint8))
            best = torch.minimum(best, weighted_error(weight, candidate, importance))
    assert float(found.sum() / best.sum()) < 1.04


def test_a_stack_of_experts_gets_the_grids_of_its_members() -> None:
    weight, importance = gaussian(3, 8, 130), gaussian(3, 130, seed=1).square()
    stack = search_grid(weight, importance)
    for e in range(3):
        alone = search_grid(weight[e], importance[e])
        assert torch.equal(stack.scale[e], alone.scale)
        assert torch.equal(stack.zero[e], alone.zero)


def test_bad_input_is_refused_by_name() -> None:
    weight = gaussian(2, 64)
    weight[1, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        minmax_grid(weight)
    with pytest.raises(ValueError, match="64 columns"):
        search_grid(gaussian(2, 65), torch.ones(64))
    with pytest.raises(ValueError, match="negative"):
        search_grid(gaussian(2, 64), torch.arange(64.0) - 1.0)
    with pytest.raises(ValueError, match="non-finite"):
        search_grid(gaussian(2, 64), torch.ones(64).index_fill(0, torch.tensor([5]), float("inf")))
    with pytest.raises(ValueError, match="no rows"):
        minmax_grid(torch.zeros(0, 64))
    with pytest.raises(ValueError, match="1 blocks of 64 cannot describe 128"):
        quantize(gaussian(2, 128), minmax_grid(gaussian(2, 64)))
