"""Integer kernels under the interpreter: steps as quant/ defines them, and exact block dots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support_kernels import poison, random_packed, random_shadow, random_tokens, relative_error

pytest.importorskip("triton")

from glm5_quant.kernels import int8_triton, triton_host
from glm5_quant.kernels.dispatch import linear
from glm5_quant.kernels.layout import Inputs
from glm5_quant.kernels.table import Config

FORMATS = ["int8", "int4-channel", "int4-block"]


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("k", [64, 100, 256])
def test_steps_scales_and_sums_equal_the_plain_twin(activations: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tokens(9, k, torch.float16)
    x[3], x[4] = 0, x[4].abs()
    plain = int8_triton.quantize_plain(x, activations)
    poison(monkeypatch)
    found = int8_triton.quantize(x, activations)
    for part, expected in zip(found, plain, strict=True):
        assert torch.equal(part, expected)
    assert not found.codes[3].any()


@pytest.mark.parametrize("tokens", [1, 17, 65])
@pytest.mark.parametrize(("n", "k"), [(40, 256), (33, 190)])
@pytest.mark.parametrize("activations", FORMATS)
def test_products_are_exact_up_to_the_last_rounding(
    tokens: int, n: int, k: int, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, weight = random_packed(n, k, dtype=torch.float16)
    steps = int8_triton.quantize_plain(random_tokens(tokens, k, torch.float16), activations)
    config = Config(block_r=32, block_t=16, warps=1, stages=1, split_k=2)
    poison(monkeypatch)
    found = int8_triton.w4a8(steps, packed, packed.scale, config).sum(0)
    assert relative_error(found, int8_triton.w4a8_plain(steps, packed, packed.scale, config)[0]) < 1e-6
    scale = steps.scale if steps.scale.shape[1] == 1 else steps.scale.repeat_interleave(64, 1)[:, :k]
    assert relative_error(found, (steps.codes[:, :k].double() * scale.double()) @ weight.T) < 1e-6


@pytest.mark.parametrize("activations", FORMATS)
@pytest.mark.parametrize("int8_shadow", [None, True])
def test_dispatch_rounds_tokens_and_agrees_with_the_reference(activations: str, int8_shadow: bool | None) -> None:
    channel = torch.rand(192) + 0.5 if activations == "int4-channel" else None
    shadow = random_shadow(40, 192, [5], int8=True) if int8_shadow else None
    packed, _ = random_packed(40, 192, dtype=torch.float16, shadow=shadow)
    packed = replace(packed, inputs=Inputs(hadamard=True, activations=activations, channel_scale=channel))
    x, bias = random_tokens(5, 192, torch.float16), torch.ones(40).half()
    found = linear(x, packed, bias, backend="triton")
    exact = linear(x, packed, bias, backend="reference")
    assert relative_error(found, exact) < 5e-3


@pytest.mark.parametrize("activations", FORMATS)
def test_a_token_with_an_input_that_is_not_finite_stays_so_and_others_do_not_see_it(activations: str) -> None:
    packed, _ = random_packed(40, 192, dtype=torch.float16)
    channel = torch.ones(192) if activations == "int4-channel" else None
    packed = replace(packed, inputs=Inputs(activations=activations, channel_scale=channel))
    x = random_tokens(5, 192, torch.float16)
    x[0, 7], x[2] = float("nan"), float("nan")
    x[4, 100] = float("inf")
    found, exact = linear(x, packed, backend="triton"), linear(x, packed, backend="reference")
    assert found[[0, 2, 4]].isnan().all() and exact[[0, 2, 4]].isnan().all()
    assert relative_error(found[[1, 3]], exact[[1, 3]]) < 1e-3


def test_the_integer_kernel_says_what_it_needs() -> None:
    packed, _ = random_packed(8, 128, dtype=torch.float16)
    with pytest.raises(ValueError, match="needs an activation format"):
        int8_triton.linear(torch.ones(1, 128).half(), packed)


def test_no_tokens_give_no_rows() -> None:
    packed = replace(random_packed(33, 128)[0], inputs=Inputs(activations="int8"))
    assert linear(torch.empty(0, 128).half(), packed, backend="triton").shape == (0, 33)
    assert triton_host.interpreted()
