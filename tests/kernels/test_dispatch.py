"""The one function that chooses: overrides, and what it refuses with a reason."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support_kernels import random_packed

from glm5_quant.kernels import dispatch
from glm5_quant.kernels.dispatch import choose_backend, experts, linear
from glm5_quant.kernels.inputs import rotate
from glm5_quant.kernels.layout import Inputs
from glm5_quant.model.modules import EightLinear


def test_the_environment_overrides_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM5_QUANT_BACKEND", "reference")
    assert choose_backend(torch.ones(1, 64), random_packed(8, 64)[0], "triton") == "reference"
    monkeypatch.setenv("GLM5_QUANT_BACKEND", "fastest")
    with pytest.raises(ValueError, match="one of reference, cpu, triton, found 'fastest'"):
        choose_backend(torch.ones(1, 64), random_packed(8, 64)[0])


@pytest.mark.parametrize(
    ("dtype", "triton", "chosen"),
    [
        (torch.bfloat16, True, "triton"),
        (torch.float16, True, "triton"),
        (torch.float32, True, "reference"),
        (torch.bfloat16, False, "reference"),
    ],
)
def test_on_a_gpu_halves_go_to_triton_where_it_is_installed(
    dtype: torch.dtype, triton: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: triton)
    x = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda"))
    assert choose_backend(cast(torch.Tensor, x), random_packed(8, 64)[0]) == chosen


def test_triton_is_asked_for_but_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="needs the triton package, which is not installed"):
        choose_backend(torch.ones(1, 64), random_packed(8, 64)[0], "triton")


def test_the_package_imports_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from glm5_quant.kernels import compiled, cpu, dispatch, tune"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_linear_cannot_take_is_named() -> None:
    packed, _ = random_packed(8, 64)
    stack, _ = random_packed(8, 64, 2)
    with pytest.raises(ValueError, match="input has 65 columns, the packed matrix takes 64"):
        linear(torch.ones(1, 65), packed)
    with pytest.raises(ValueError, match=r"float32, float16 or bfloat16, found torch\.float64"):
        linear(torch.ones(1, 64, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match="a stack of experts goes to experts"):
        linear(torch.ones(1, 64), stack)


def test_what_experts_cannot_take_is_named() -> None:
    gate_up, _ = random_packed(128, 64, 2)
    down, _ = random_packed(64, 64, 2)
    x, index, weight = torch.ones(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"index \(2, 2\)"):
        experts(x, index[:2], weight[:2], gate_up, down)
    with pytest.raises(ValueError, match="must be an integer tensor"):
        experts(x, index.float(), weight, gate_up, down)
    with pytest.raises(ValueError, match="same number of experts, found 2, None"):
        experts(x, index, weight, gate_up, random_packed(64, 64)[0])
    with pytest.raises(ValueError, match=r"gate_up must be 2I x D and down D x I, found 128 x 64 and 64 x 65"):
        experts(x, index, weight, gate_up, random_packed(64, 65, 2)[0])
    with pytest.raises(ValueError, match="activation must be one of silu, gelu"):
        experts(x, index, weight, gate_up, down, activation="swish")


@pytest.mark.parametrize("inputs", [None, Inputs(hadamard=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_through_whatever_the_backend(dtype: torch.dtype, inputs: Inputs | None) -> None:
    """d sum(y) / d x = column sums of W, also after a pass in inference mode."""
    packed, weight = random_packed(24, 128, dtype=torch.bfloat16)
    packed = replace(packed, inputs=inputs)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        linear(x, packed)
    leaf = x.clone().requires_grad_(True)
    linear(leaf, packed, backend="cpu").float().sum().backward()
    want = weight.double().sum(0)
    want = want if inputs is None else rotate(want.float()[None])[0].double()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad[0].double(), want, rtol=1e-2, atol=1e-2)


def test_gradients_go_through_experts_and_eight_bit_heads() -> None:
    gate_up, down = random_packed(64, 64, 2)[0], random_packed(64, 32, 2)[0]
    x = torch.randn(3, 64).bfloat16().requires_grad_(True)
    index, weight = torch.tensor([[0], [1], [2]]), torch.ones(3, 1, requires_grad=True)
    experts(x, index, weight, gate_up, down, backend="cpu").float().sum().backward()
    assert x.grad is not None and weight.grad is not None
    assert bool((x.grad.abs().sum(-1) > 0).tolist() == [True, True, False])
    head = EightLinear(torch.randint(0, 256, (7, 64), dtype=torch.uint8), torch.ones(7, 1).bfloat16(), group_size=64)
    assert head(x).requires_grad
