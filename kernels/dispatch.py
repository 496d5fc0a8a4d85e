"""One place that decides who computes: `linear` and `experts` from codes, `plain` from weights as they are.

Letters: E experts, N out, K in, T tokens, D hidden size, I expert size, A experts a token chooses.

backend: "reference" (plain PyTorch, exact), "cpu" (faster CPU operators), "triton" (GPU). The argument names one call's
backend, the environment variable GLM5_QUANT_BACKEND overrides it for all, and with neither `choose_backend` has a rule.
"""

from __future__ import annotations

import functools
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from glm5_quant.kernels import cpu, reference
from glm5_quant.kernels.layout import PackedMatrix

BACKENDS = ("reference", "cpu", "triton")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
PLAIN = (Tensor, Parameter)


def linear(x_TK: Tensor, packed: PackedMatrix, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """x @ W^T + bias. x: float [..., K]; returns [..., N] in x's dtype. ValueError names what does not fit.

    Where gradients are wanted the reference computes, whatever the backend: the others would cut them off.
    """
    if packed.experts is not None:
        raise ValueError("linear takes one matrix; a stack of experts goes to experts()")
    _check_input(x_TK, packed.k)
    if _learns(x_TK, bias):
        return linear_by("reference", x_TK, packed, bias)
    chosen = choose_backend(x_TK, packed, backend)
    if _watched(x_TK):
        from glm5_quant.kernels import compiled

        return compiled.linear(x_TK, packed, bias, chosen)
    return linear_by(chosen, x_TK, packed, bias)


def linear_by(chosen: str, x_TK: Tensor, packed: PackedMatrix, bias: Tensor | None) -> Tensor:
    """`linear` by a backend that is chosen already."""
    flat_TK = x_TK.reshape(-1, packed.k)
    if chosen == "triton":
        name = "int8_triton" if _integer(packed) else "linear_triton"
        out_TN: Tensor = _triton(name).linear(flat_TK, packed, bias)
    elif chosen == "cpu":
        out_TN = cpu.linear(flat_TK, packed, bias)
    else:
        out_TN = reference.linear(flat_TK, packed, bias)
    return out_TN.reshape(*x_TK.shape[:-1], packed.n)


def experts(
    x_TD: Tensor,
    index_TA: Tensor,
    weight_TA: Tensor,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    *,
    activation: str = "silu",
    backend: str | None = None,
) -> Tensor:
    """A routed feed-forward layer: sum over a token's A experts of weight * down(act(gate x) * up x).

    x: float [T, D]; index: integer [T, A], 0..E-1, or E for "no expert"; weight: float [T, A]; gate_up: E x 2I x D with
    the gate's rows first; down: E x D x I. Returns [T, D] in x's dtype. ValueError names what does not fit. Gradients:
    as for `linear`.
    """
    _check_experts(x_TD, index_TA, weight_TA, gate_up, down, activation)
    if backend is None and (_scaled_by_expert(gate_up) or _scaled_by_expert(down)):
        backend = "reference"
    if _learns(x_TD, weight_TA):
        return experts_by("reference", x_TD, index_TA, weight_TA, gate_up, down, activation)
    chosen = choose_backend(x_TD, gate_up, backend)
    if _watched(x_TD):
        from glm5_quant.kernels import compiled

        return compiled.experts(x_TD, index_TA, weight_TA, gate_up, down, activation, chosen)
    return experts_by(chosen, x_TD, index_TA, weight_TA, gate_up, down, activation)


def experts_by(
    chosen: str, x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor, gate_up: PackedMatrix, down: PackedMatrix,
    activation: str,
) -> Tensor:  # fmt: skip
    """`experts` by a backend that is chosen already."""
    if chosen == "triton":
        out_TD: Tensor = _triton("experts_triton").experts(x_TD, index_TA, weight_TA, gate_up, down, activation)
        return out_TD
    if chosen == "cpu":
        return cpu.experts(x_TD, index_TA, weight_TA, gate_up, down, activation)
    return reference.experts(x_TD, index_TA, weight_TA, gate_up, down, activation)


def plain(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`F.linear`, by a kernel of our own for a few bf16 tokens on a CPU; x [..., K]. Nothing else changes."""
    fits = x_TK.dtype == weight_NK.dtype == HALVES[1] and x_TK.device.type == weight_NK.device.type == "cpu"
    if not fits or _watched(x_TK) or os.environ.get("GLM5_QUANT_BACKEND") == "reference":
        return functional.linear(x_TK, weight_NK, bias_N)
    learns = _learns(x_TK, weight_NK, bias_N)
    return functional.linear(x_TK, weight_NK, bias_N) if learns else cpu.plain(x_TK, weight_NK, bias_N)


def eight(x_TK: Tensor, codes_NK: Tensor, scale_NB: Tensor) -> Tensor | None:
    """x @ ((codes - 128) * scale)^T in bf16 by our CPU kernel, x [..., K], a scale for each 64 inputs.

    None where that kernel does not compute (not bf16, not on a CPU that has it, under torch.compile, gradients are
    wanted): callers restore the weights.
    """
    on_cpu = x_TK.dtype == HALVES[1] and x_TK.device.type == codes_NK.device.type == "cpu"
    reference_only = _learns(x_TK) or os.environ.get("GLM5_QUANT_BACKEND") == "reference"
    if not on_cpu or _watched(x_TK) or reference_only:
        return None
    return cpu.eight(x_TK, codes_NK, scale_NB)


def choose_backend(x: Tensor, packed: PackedMatrix, backend: str | None = None) -> str:
    """The backend that will compute: the environment's, else the argument's, else by this rule.

    On a GPU "triton" for float16 and bfloat16 when triton is installed; on a CPU "cpu" for bfloat16 and for matrices
    resident as int8; everything else "reference", which is exact.
    """
    chosen = os.environ.get("GLM5_QUANT_BACKEND") or backend
    if chosen is None:
        if x.is_cuda:
            return "triton" if x.dtype in HALVES and has_triton() else "reference"
        return "cpu" if x.device.type == "cpu" and (x.dtype == HALVES[1] or packed.resident == "int8") else "reference"
    if chosen not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, found {chosen!r}")
    if chosen == "cpu" and x.device.type != "cpu":
        raise ValueError(f"the cpu backend needs tensors on the CPU, found {x.device}")
    if chosen == "triton" and not has_triton():
        raise ValueError("the triton backend needs the triton package, which is not installed")
    return chosen


def _learns(*tensors: Tensor | None) -> bool:
    """Whether gradients of any of these are wanted."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _watched(x: Tensor) -> bool:
    """Whether something follows what is done to tensors, or stands in for them: it sees nothing of our C kernels."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or is_in_torch_dispatch_mode()
        or type(x) not in PLAIN
    )


@functools.cache
def has_triton() -> bool:
    """Whether the triton package can be imported."""
    return find_spec("triton") is not None


def _triton(name: str) -> Any:
    return import_module(f"glm5_quant.kernels.{name}")


def _scaled_by_expert(packed: PackedMatrix) -> bool:
    """Whether each expert divides its inputs by channel scales of its own, which only the reference computes."""
    scale = None if packed.inputs is None else packed.inputs.channel_scale
    return scale is not None and scale.ndim == 2


def _integer(packed: PackedMatrix) -> bool:
    return packed.inputs is not None and packed.inputs.activations != "none" and packed.shadow is None


def _check_input(x: Tensor, k: int) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(f"input must be float32, float16 or bfloat16, found {x.dtype}")
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"input has {x.shape[-1] if x.ndim else 0} columns, the packed matrix takes {k}")


def _check_experts(
    x: Tensor, index: Tensor, weight: Tensor, gate_up: PackedMatrix, down: PackedMatrix, activation: str
) -> None:
    _check_input(x, gate_up.k)
    if x.ndim != 2 or index.ndim != 2 or index.shape != weight.shape or index.shape[0] != x.shape[0]:
        found = f"x {tuple(x.shape)}, index {tuple(index.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"experts takes x [T, D], index [T, A] and weight [T, A], found {found}")
    if index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"expert index must be an integer tensor, found {index.dtype}")
    if gate_up.experts is None or gate_up.experts != down.experts:
        raise ValueError(f"gate_up and down need the same number of experts, found {gate_up.experts}, {down.experts}")
    if gate_up.n != 2 * down.k or down.n != gate_up.k:
        found = f"{gate_up.n} x {gate_up.k} and {down.n} x {down.k}"
        raise ValueError(f"gate_up must be 2I x D and down D x I, found {found}")
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(reference.ACTIVATIONS)}, found {activation!r}")
