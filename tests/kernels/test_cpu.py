"""The CPU paths compute what they say: 4-bit weights in bf16 arithmetic, or 8-bit weights and tokens."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from support_kernels import (
    experts_float64,
    random_packed,
    random_routing,
    random_shadow,
    random_tokens,
    relative_error,
)

from glm5_quant.kernels import cpu, int8_cpu, native
from glm5_quant.kernels.dispatch import choose_backend, experts, linear
from glm5_quant.kernels.layout import Inputs, dequantize

BF16, INT8 = 6e-3, 3e-2
needs_vnni = pytest.mark.skipif(not int8_cpu.has_vnni(), reason="this CPU has no VNNI instructions")


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SMALL_WEIGHTS", 0)


@pytest.fixture(params=["native", "torch"])
def four_bit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "suits", lambda tokens: False)
    elif not native.suits(1):
        pytest.skip("no native kernels on this machine")
    return str(request.param)


@pytest.fixture(params=["fbgemm", "onednn"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if not int8_cpu.has_vnni():
        pytest.skip("this CPU has no VNNI instructions")
    if request.param == "fbgemm" and not hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation"):
        pytest.skip("this PyTorch has lost FBGEMM's operators")
    monkeypatch.setattr(int8_cpu, "engine", lambda: request.param)
    monkeypatch.setattr(native, "suits", lambda tokens: False)
    return str(request.param)


@pytest.mark.parametrize("tokens", [1, 2, 7, 48, 49, 129])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (1, 64), (40, 190), (130, 100)])
def test_four_bit_weights_in_bf16_arithmetic(four_bit: str, tokens: int, n: int, k: int) -> None:
    packed, weight = random_packed(n, k, dtype=torch.bfloat16)
    x, bias = random_tokens(tokens, k, torch.bfloat16), random_tokens(1, n, torch.bfloat16)[0]
    found = linear(x, packed, bias, backend="cpu")
    assert found.dtype == torch.bfloat16 and found.shape == (tokens, n)
    assert relative_error(found, x.double() @ weight.T + bias.double()) < BF16


def test_a_small_matrix_is_widened_once_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(native, "suits", lambda tokens: False)
    packed, weight = random_packed(40, 190, dtype=torch.bfloat16)
    x = random_tokens(3, 190, torch.bfloat16)
    assert relative_error(linear(x, packed), x.double() @ weight.T) < BF16
    assert list(packed.forms) == [torch.bfloat16]
    linear(x.float(), packed)
    assert torch.equal(packed.forms[torch.float32], dequantize(packed))


def test_a_matrix_of_many_slices_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, weight = random_packed(200, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(native, "suits", lambda tokens: False)
    monkeypatch.setattr(cpu, "SLICE_WEIGHTS", 70 * 128)
    monkeypatch.setattr(cpu, "WIDE_WEIGHTS", 70 * 128)
    for tokens in (3, 40):
        x = random_tokens(tokens, 128, torch.bfloat16)
        assert relative_error(linear(x, packed, backend="cpu"), x.double() @ weight.T) < BF16


def test_the_four_bit_form_holds_the_same_weights_as_the_codes(four_bit: str) -> None:
    packed, _ = random_packed(96, 192, dtype=torch.bfloat16)
    packed = replace(packed, zero=torch.full_like(packed.zero, 8))
    identity = torch.eye(192, dtype=torch.bfloat16)
    rows = [cpu._four(identity[start : start + 32], packed) for start in range(0, 192, 32)]
    assert torch.equal(torch.cat(rows).T, dequantize(packed, torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 2, 17, 129])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (9, 64), (40, 190)])
def test_eight_bit_weights_and_tokens(engine: str, tokens: int, n: int, k: int) -> None:
    packed, weight = random_packed(n, k)
    x = random_tokens(tokens, k)
    assert relative_error(linear(x, replace(packed, resident="int8"), backend="cpu"), x.double() @ weight.T) < INT8


def test_eight_bit_products_are_exact_integer_sums(engine: str) -> None:
    weight = torch.randint(-127, 128, (48, 256)).float()
    weight[:, 0] = 127
    x = torch.randint(-127, 128, (9, 256)).float()
    x[:, 0], x[:, 1] = 127, -127
    found = int8_cpu.linear(int8_cpu.Rows.of(x), int8_cpu.pack(weight))
    assert relative_error(found, x.double() @ weight.double().T) < (1e-6 if engine == "onednn" else INT8)


def test_a_loud_token_does_not_drown_a_quiet_one(engine: str) -> None:
    packed, weight = random_packed(64, 128)
    x = random_tokens(2, 128)
    x[0] *= 1e4
    found = linear(x, replace(packed, resident="int8"), backend="cpu")
    assert relative_error(found[1], x[1].double() @ weight.T) < INT8


def test_rows_of_zeros_give_zeros(engine: str) -> None:
    packed, _ = random_packed(64, 128)
    packed.scale[3] = 0
    x = random_tokens(3, 128)
    x[1] = 0
    found = linear(x, replace(packed, resident="int8"), backend="cpu")
    assert torch.equal(found[1], torch.zeros(64)) and torch.equal(found[:, 3], torch.zeros(3))


@pytest.mark.parametrize("resident", ["int4", pytest.param("int8", marks=needs_vnni)])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_experts_with_shadows_equal_a_loop(four_bit: str, resident: str, tokens: int) -> None:
    gate_up, weight_gate_up = random_packed(2 * 96, 128, 5, shadow=random_shadow(192, 128, [2, 0, 5, 1, 0]))
    down, weight_down = random_packed(128, 96, 5, seed=1, shadow=random_shadow(128, 96, [0, 3, 0, 0, 4], int8=True))
    gate_up, down = replace(gate_up, resident=resident), replace(down, resident=resident)
    index, weight = random_routing(tokens, 5, 3)
    index[0, 1] = 5
    x = random_tokens(tokens, 128, torch.bfloat16)
    found = experts(x, index, weight, gate_up, down, backend="cpu")
    expected = experts_float64(x, index, weight, weight_gate_up, weight_down)
    assert relative_error(found, expected) < (BF16 if resident == "int4" else INT8) * 1.5


def test_a_token_that_chooses_an_expert_twice_gets_it_twice(four_bit: str) -> None:
    gate_up, weight_gate_up = random_packed(128, 64, 3)
    down, weight_down = random_packed(64, 64, 3, seed=1)
    index, weight, x = torch.tensor([[1, 1, 3]]), torch.tensor([[0.25, 0.5, 9.0]]), random_tokens(1, 64)
    found = experts(x, index, weight, gate_up, down, backend="cpu")
    assert relative_error(found, experts_float64(x, index, weight, weight_gate_up, weight_down)) < 2 * BF16


def test_the_rule_takes_the_cpu_path_for_bfloat16_and_for_int8_residents_only() -> None:
    packed, _ = random_packed(64, 128)
    assert choose_backend(torch.ones(1, 128), packed) == "reference"
    assert choose_backend(torch.ones(1, 128).half(), packed) == "reference"
    assert choose_backend(torch.ones(1, 128).bfloat16(), packed) == "cpu"
    assert choose_backend(torch.ones(1, 128), replace(packed, resident="int8")) == "cpu"


def test_what_the_cpu_path_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = random_packed(64, 64, 2)
    down, _ = random_packed(64, 32, 2)
    x, index, weight = torch.ones(1, 64), torch.tensor([[-1]]), torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"expert indices are -1\.\.-1, outside 0\.\.2"):
        experts(x, index, weight, packed, down, backend="cpu")
    with pytest.raises(ValueError, match="need the same residence, found int4 and int8"):
        experts(x, index, weight, packed, replace(down, resident="int8"), backend="cpu")
    with pytest.raises(ValueError, match="needs tensors on the CPU, found meta"):
        choose_backend(x.to("meta"), packed, "cpu")
    monkeypatch.setattr(int8_cpu, "has_vnni", lambda: False)
    monkeypatch.setattr(native, "suits", lambda tokens: False)
    with pytest.raises(ValueError, match="need a CPU with VNNI"):
        linear(x.expand(2, -1), replace(random_packed(8, 64)[0], resident="int8"), backend="cpu")


@pytest.mark.skipif(not native.suits(1), reason="no native kernels on this machine")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_native_eight_bit_tokens_need_no_second_copy_of_the_weights(dtype: torch.dtype) -> None:
    packed, weight = random_packed(64, 128)
    packed, bias = replace(packed, resident="int8"), random_tokens(1, 64, dtype, seed=5)[0]
    for tokens in (1, 2, 9):
        x = random_tokens(tokens, 128, dtype)
        found = linear(x, packed, bias)
        assert found.dtype == dtype and "int8" not in packed.forms
        assert relative_error(found, x.double() @ weight.T + bias.double()) < INT8


@pytest.mark.skipif(not native.suits(1), reason="no native kernels on this machine")
@pytest.mark.parametrize("hadamard", [False, True])
def test_native_eight_bit_tokens_are_what_int8_activations_ask_for(hadamard: bool) -> None:
    inputs = Inputs(hadamard=hadamard, activations="int8")
    packed = replace(random_packed(40, 190)[0], inputs=inputs)
    x = random_tokens(5, 190)
    exact = linear(x, packed, backend="reference")
    assert relative_error(linear(x, replace(packed, resident="int8")), exact) < 1e-6
    gate_up, down = (replace(random_packed(n, k, 3)[0], inputs=inputs) for n, k in ((192, 64), (64, 96)))
    index, weight = random_routing(5, 3, 2)
    x = random_tokens(5, 64)
    exact = experts(x, index, weight, gate_up, down, backend="reference")
    found = experts(x, index, weight, *(replace(part, resident="int8") for part in (gate_up, down)))
    assert relative_error(found, exact) < 3e-3  # an input at the border of two steps may be rounded the other way


@needs_vnni
def test_users_see_no_warning_about_operators_they_did_not_choose() -> None:
    packed, _ = random_packed(64, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear(random_tokens(3, 128), replace(packed, resident="int8"))
