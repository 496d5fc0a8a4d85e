"""Rotation changes nothing about a layer's outputs, and spreads what is extreme."""

from __future__ import annotations

import pytest
import torch
from quant_samples import gaussian, layer_inputs, moments_of

from glm5_quant.quant.rotation import fold_gain, hadamard, heads_can_rotate, rotate, rotate_moments, rotate_rows


def test_the_matrix_is_orthonormal_symmetric_and_made_of_plus_and_minus_an_eighth() -> None:
    matrix = hadamard()
    assert torch.equal(matrix @ matrix, torch.eye(64))
    assert torch.equal(matrix, matrix.T)
    assert set(matrix.flatten().tolist()) == {0.125, -0.125}
    assert hadamard(2, dtype=torch.float64).tolist() == [[2**-0.5, 2**-0.5], [2**-0.5, -(2**-0.5)]]


@pytest.mark.parametrize("size", [0, 3, 96])
def test_sizes_that_are_no_power_of_two_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="power of 2"):
        hadamard(size)


@pytest.mark.parametrize("k", [64, 96, 640, 30])
def test_rotated_weights_and_rotated_inputs_give_the_same_outputs(k: int) -> None:
    weight, x = gaussian(7, k).double(), layer_inputs(20, k).double()
    torch.testing.assert_close(rotate(x) @ rotate(weight).T, x @ weight.T)
    torch.testing.assert_close(rotate(rotate(x)), x)


def test_the_ragged_tail_is_left_alone_and_blocks_do_not_mix() -> None:
    x = gaussian(3, 150)
    turned = rotate(x)
    assert torch.equal(turned[:, 128:], x[:, 128:])
    assert torch.equal(turned[:, :64], rotate(x[:, :64].contiguous()))


def test_the_dtype_is_kept() -> None:
    x = gaussian(3, 64).bfloat16()
    assert rotate(x).dtype == torch.bfloat16
    torch.testing.assert_close(rotate(x).float(), rotate(x.float()), rtol=0.01, atol=0.01)


def test_moments_of_rotated_inputs_are_the_rotated_moments() -> None:
    x = layer_inputs(300, 96)
    torch.testing.assert_close(rotate_moments(moments_of(x)), moments_of(rotate(x)), rtol=1e-4, atol=1e-4)


def test_a_writer_and_a_reader_rotated_together_cancel_out() -> None:
    writer, reader, x = gaussian(128, 40), gaussian(9, 128), gaussian(5, 40)
    stream = x @ rotate_rows(writer).T
    torch.testing.assert_close(stream @ rotate(reader).T, x @ writer.T @ reader.T, rtol=1e-4, atol=1e-3)


def test_a_norm_without_gain_commutes_with_the_rotation_once_its_gain_is_folded() -> None:
    x, gain, weight = layer_inputs(10, 128), gaussian(128).abs() + 0.1, gaussian(6, 128)

    def normed(stream: torch.Tensor) -> torch.Tensor:
        return stream / stream.square().mean(-1, keepdim=True).sqrt()

    plain = (normed(x) * gain) @ weight.T
    turned = normed(rotate(x)) @ rotate(fold_gain(weight, gain)).T
    torch.testing.assert_close(turned, plain, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="64 channels does not fit 128"):
        fold_gain(weight, gain[:64])


def test_one_extreme_channel_is_spread_over_its_block() -> None:
    x = torch.zeros(1, 64)
    x[0, 17] = 80.0
    assert float(rotate(x).abs().max()) == 10.0


def test_only_heads_that_hold_whole_blocks_can_rotate() -> None:
    assert [dim for dim in (32, 64, 96, 128, 192, 256) if heads_can_rotate(dim)] == [64, 128, 192, 256]
