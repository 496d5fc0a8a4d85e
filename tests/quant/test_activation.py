"""Integer activations: exact integer arithmetic, and errors in the order they were measured in."""

from __future__ import annotations

import pytest
import torch
from quant_samples import gaussian, layer_inputs, moments_of

from glm5_quant.quant.activation import (
    Quantized,
    channel_scales,
    fold_moments,
    fold_scales,
    quantize,
    quantize_int4_block,
    quantize_int4_channel,
    quantize_int8,
    quantized_matmul,
)
from glm5_quant.quant.grid import Grid, dequantize, search_grid
from glm5_quant.quant.grid import quantize as quantize_weight
from glm5_quant.quant.rotation import rotate

MODES = ("int8", "int4-channel", "int4-block")


def relative(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((wanted - found).square().sum() / wanted.square().sum())


def int64_matmul(activations: Quantized, codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Every product and every sum of a block as int64, block by block."""
    t, k = activations.steps.shape
    y = torch.zeros(t, codes.shape[0], dtype=torch.float64)
    for b in range(-(-k // 64)):
        part = slice(64 * b, min(64 * b + 64, k))
        weight = codes[:, part].to(torch.int64) - grid.zero[:, b : b + 1].to(torch.int64)
        dot = activations.steps[:, part].to(torch.int64) @ weight.T
        scale = activations.scale[:, min(b, activations.scale.shape[1] - 1)]
        y += dot.double() * scale[:, None].double() * grid.scale[:, b].double()
    return y


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [64, 100, 256])
def test_the_product_equals_int64_arithmetic_and_the_product_of_dequantized_values(mode: str, k: int) -> None:
    x, weight = layer_inputs(9, k), gaussian(5, k)
    acts = quantize(x, mode, channel_scales(x))
    grid = search_grid(weight)
    codes = quantize_weight(weight, grid)
    y = quantized_matmul(acts, codes, grid)
    scale = float(y.abs().max())
    assert float((y - int64_matmul(acts, codes, grid)).abs().max()) < 1e-5 * scale
    assert float((y - acts.dequantize() @ dequantize(codes, grid).T).abs().max()) < 1e-5 * scale


def test_the_largest_possible_dot_of_a_block_is_exact() -> None:
    codes = torch.full((1, 64), 15, dtype=torch.uint8)
    grid = Grid(scale=torch.ones(1, 1), zero=torch.zeros(1, 1, dtype=torch.uint8))
    acts = quantize_int8(torch.full((1, 64), 127.0))
    assert float(quantized_matmul(acts, codes, grid)) == 64 * 15 * 127


def test_int4_steps_of_cases_worked_by_hand() -> None:
    x = torch.tensor([[14.0, -3.2, 0.9, 40.0], [0.7, -7.0, 1.6, 3.4]])
    scale = torch.tensor([2.0, 1.0, 1.0, 10.0])
    fixed = quantize_int4_channel(x, scale, token_factor=False)
    assert fixed.steps.tolist() == [[7, -3, 1, 4], [0, -7, 2, 0]]
    assert fixed.scale.tolist() == [[1.0], [1.0]]
    assert quantize_int4_channel(10 * x, scale, token_factor=False).steps.tolist()[0] == [7, -7, 7, 7]
    stretched = quantize(2 * x, "int4-channel", scale)
    assert stretched.steps.tolist() == fixed.steps.tolist()
    assert stretched.scale.tolist() == [[2.0], [2.0]]
    blocks = quantize_int4_block(torch.tensor([[-4.0, 11.0, 0.6, -1.4], [3.0, 15.0, 7.4, 7.6]]))
    assert blocks.steps.tolist() == [[-4, 11, 1, -1], [3, 15, 7, 8]]
    assert blocks.scale.tolist() == [[1.0], [1.0]]
    # Both ends lie half a step off the zero-point: the upper one is cut, by that half.
    assert quantize_int4_block(torch.tensor([[-7.5, 7.5]])).steps.tolist() == [[-8, 7]]


@pytest.mark.parametrize("mode", ["int8", "int4-block"])
def test_values_come_back_within_half_a_step(mode: str) -> None:
    x = layer_inputs(7, 130)
    acts = quantize(x, mode)
    step = acts.scale.repeat_interleave(64, -1)[:, :130]
    # The zero-point of a block is a whole step, so an end of an asymmetric range may be cut by half a step more.
    reach = 0.5 if mode == "int8" else 1.0
    assert bool(((acts.dequantize() - x).abs() <= step * reach * 1.001).all())


def test_in_eight_bits_an_extreme_channel_takes_steps_from_its_own_block_only() -> None:
    x = gaussian(50, 130)
    calm = quantize_int8(x).dequantize()
    x[:, 70] = 400.0
    found = quantize_int8(x).dequantize()
    assert torch.equal(found[:, :64], calm[:, :64])
    assert torch.equal(found[:, 128:], calm[:, 128:])
    assert relative(x[:, 64:128], found[:, 64:128]) < 1e-3
    assert float((found - x)[:, 64:128].abs().max()) > 10 * float((found - x)[:, :64].abs().max())


def test_static_channel_scales_fold_into_the_weight_before_the_grid() -> None:
    x, weight = layer_inputs(400, 128), gaussian(16, 128)
    scale = channel_scales(x)
    acts = quantize_int4_channel(x, scale, token_factor=False)
    grid = search_grid(fold_scales(weight, scale), fold_moments(moments_of(x), scale).diagonal())
    codes = quantize_weight(fold_scales(weight, scale), grid)
    assert relative(x @ weight.T, quantized_matmul(acts, codes, grid)) < 0.06
    torch.testing.assert_close((x / scale) @ fold_scales(weight, scale).T, x @ weight.T, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fold_moments(moments_of(x), scale), moments_of(x / scale), rtol=1e-3, atol=1e-3)


def test_on_rotated_inputs_int8_beats_the_block_form_and_that_beats_the_channel_form() -> None:
    x, weight = rotate(layer_inputs(500, 256)), rotate(gaussian(32, 256))
    scale = channel_scales(x)
    errors = {}
    for mode in MODES:
        w = fold_scales(weight, scale) if mode == "int4-channel" else weight
        acts = quantize(x, mode, scale)
        errors[mode] = relative(x @ weight.T, acts.dequantize() @ w.T)
    assert errors["int8"] < errors["int4-block"] < errors["int4-channel"] < 0.1


def test_channel_scales_clip_a_lone_outlier_and_are_above_0_for_unseen_channels() -> None:
    x = gaussian(2000, 3)
    x[:, 1] = 0
    x[5, 2] = 40.0
    scale = channel_scales(x)
    assert bool((scale > 0).all())
    assert float(scale[2]) < 40 / 7
    assert float(scale[1]) == pytest.approx(float((scale[0] + scale[2]) / 2), rel=1e-5)
    assert bool((channel_scales(torch.zeros(4, 3)) > 0).all())


@pytest.mark.parametrize("mode", MODES)
def test_zero_tokens_stay_zero_and_finite(mode: str) -> None:
    acts = quantize(torch.zeros(3, 64), mode, torch.ones(64))
    assert torch.equal(acts.dequantize(), torch.zeros(3, 64))
    assert bool((acts.scale > 0).all())


def test_wrong_modes_and_shapes_are_refused() -> None:
    x, weight = gaussian(2, 64), gaussian(2, 128)
    grid = search_grid(weight)
    with pytest.raises(ValueError, match="'int2'"):
        quantize(x, "int2")
    with pytest.raises(ValueError, match="channel scales"):
        quantize(x, "int4-channel")
    with pytest.raises(ValueError, match="64 channels in blocks of 64, the weight 128"):
        quantized_matmul(quantize_int8(x), quantize_weight(weight, grid), grid)
    wide = search_grid(gaussian(1, 16384), group_size=16384)
    with pytest.raises(ValueError, match="not exact"):
        quantized_matmul(
            quantize_int8(gaussian(1, 16384), group_size=16384), quantize_weight(gaussian(1, 16384), wide), wide
        )
