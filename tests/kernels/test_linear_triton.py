"""Triton's linear kernels under the interpreter, in fp16, against float64 and against their plain twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support_kernels import poison, random_packed, random_shadow, random_tokens, relative_error

pytest.importorskip("triton")

from glm5_quant.kernels import linear_triton, triton_host
from glm5_quant.kernels.dispatch import linear
from glm5_quant.kernels.layout import Inputs
from glm5_quant.kernels.table import Config

SPLIT = Config(block_r=32, block_t=8, warps=1, stages=1, split_k=3)
MANY = Config(block_r=32, block_t=64, warps=1, stages=1, split_k=2)
TOKENS = [1, 7, 8, 9, 17, 33, 129]
BOUND = 1e-3


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("n", "k"), [(40, 256), (33, 192), (5, 64), (65, 100)])
def test_linear_is_within_a_thousandth_of_float64(tokens: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, weight = random_packed(n, k, dtype=torch.float16)
    x, bias = random_tokens(tokens, k, torch.float16), random_tokens(1, n, torch.float16)[0]
    poison(monkeypatch)
    found = linear(x, packed, bias, backend="triton")
    assert found.dtype == torch.float16
    assert relative_error(found, x.double() @ weight.T + bias.double()) < BOUND


@pytest.mark.parametrize(("n", "k"), [(2049, 64), (2048, 64), (9, 2049)])
def test_a_row_or_column_beyond_a_power_of_two_is_no_special_case(n: int, k: int) -> None:
    packed, weight = random_packed(n, k, dtype=torch.float16)
    x = random_tokens(3, k, torch.float16)
    assert relative_error(linear(x, packed, backend="triton"), x.double() @ weight.T) < BOUND


@pytest.mark.slow
def test_two_thousand_and_forty_nine_tokens() -> None:
    packed, weight = random_packed(40, 192, dtype=torch.float16)
    x = random_tokens(2049, 192, torch.float16)
    assert relative_error(linear(x, packed, backend="triton"), x.double() @ weight.T) < BOUND


@pytest.mark.parametrize("config", [SPLIT, MANY])
@pytest.mark.parametrize("k", [384, 449])
@pytest.mark.parametrize("int8", [False, True])
def test_parts_and_their_shadow_equal_the_plain_twin(
    config: Config, k: int, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, weight = random_packed(40, k, dtype=torch.float16, shadow=random_shadow(40, k, [19], int8=int8))
    x, scale = triton_host.kernel_input(random_tokens(9, k, torch.float16), packed.scale)
    poison(monkeypatch)
    found = linear_triton.w4a16(x, packed, scale, config)
    plain = linear_triton.w4a16_plain(x, packed, scale, config)
    assert found.shape == plain.shape and 1 < found.shape[0] <= config.split_k
    for part, expected in zip(found, plain, strict=True):
        assert relative_error(part, expected) < BOUND
    assert relative_error(found.sum(0), x[:, :k].double() @ weight.T) < BOUND


@pytest.mark.parametrize("bias", [None, torch.arange(30.0).half()])
def test_finish_adds_parts_and_bias_as_its_plain_twin(bias: torch.Tensor | None) -> None:
    parts = random_tokens(3 * 50, 30).view(3, 50, 30)
    found, plain = (torch.full((50, 30), float("nan"), dtype=torch.float16) for _ in range(2))
    linear_triton.finish(parts, bias, found)
    linear_triton.finish_plain(parts, bias, plain)
    assert torch.equal(found, plain)


@pytest.mark.parametrize("tokens", [3, 20])
def test_strided_inputs_are_read_right(tokens: int) -> None:
    packed, weight = random_packed(33, 128, dtype=torch.float16)
    wide = random_tokens(tokens, 300, torch.float16)
    turned = random_tokens(128, tokens, torch.float16).T
    for x in (wide[:, 7:135], turned, wide[:, :256:2], wide.expand(2, tokens, 300)[:, :, 3:131]):
        assert relative_error(linear(x, packed, backend="triton"), x.double() @ weight.T) < BOUND


def test_a_bias_that_is_a_column_of_a_matrix_is_read_right() -> None:
    packed, weight = random_packed(40, 128, dtype=torch.float16)
    x, bias = random_tokens(3, 128, torch.float16), torch.randn(40, 2)[:, 1]
    assert relative_error(linear(x, packed, bias, backend="triton"), x.double() @ weight.T + bias) < 1e-3


@pytest.mark.parametrize("inputs", [None, Inputs(activations="int8")])
def test_parts_that_are_stored_the_other_way_round_are_read_right(inputs: Inputs | None) -> None:
    packed, _ = random_packed(40, 256, dtype=torch.float16)
    packed = replace(packed, inputs=inputs)
    turned = {name: getattr(packed, name).T.contiguous().T for name in ("codes", "scale", "zero")}
    x = random_tokens(3, 256, torch.float16)
    found = linear(x, replace(packed, **turned), backend="triton")
    assert torch.equal(found, linear(x, packed, backend="triton"))


def test_scales_of_another_dtype_keep_their_range() -> None:
    packed, weight = random_packed(33, 128, dtype=torch.bfloat16)
    small = replace(packed, scale=packed.scale * 2.0**-10)
    for tokens in (3, 20):
        x = random_tokens(tokens, 128, torch.float16)
        assert relative_error(linear(x * 1000, small, backend="triton"), x.double() * 1000 / 1024 @ weight.T) < BOUND


def test_no_tokens_give_no_rows() -> None:
    assert linear(torch.empty(0, 128).half(), random_packed(33, 128)[0], backend="triton").shape == (0, 33)


def test_what_the_kernels_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = random_packed(8, 128)
    with pytest.raises(ValueError, match="interpreter cannot compute in bfloat16"):
        linear(torch.ones(1, 128).bfloat16(), packed, backend="triton")
    with pytest.raises(ValueError, match=r"take float16 or bfloat16 inputs, found torch\.float32"):
        linear(torch.ones(1, 128), packed, backend="triton")
    monkeypatch.setattr(triton_host, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="need a GPU, found an input on cpu"):
        linear(torch.ones(1, 128).half(), packed, backend="triton")
