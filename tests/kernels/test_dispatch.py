"""The one function that chooses: overrides, and what it refuses with a reason."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support_kernels import random_packed

from glm5_quant.kernels import dispatch
from glm5_quant.kernels.dispatch import choose_backend, experts, linear


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
