"""The same two functions as operators that `torch.compile` keeps whole: no graph break, nothing traced inside.

Letters: E experts, N out, K in, T tokens, D hidden size, A experts a token chooses.

An operator takes tensors and plain values, so a packed matrix travels in parts. Inside it is found again by its codes,
so that what a backend made of it (its `forms`) is made once; it goes when they go, and is made anew when any part was
exchanged or written to. `dispatch` imports this only while something is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from glm5_quant.kernels import dispatch
from glm5_quant.kernels.layout import Inputs, PackedMatrix, Shadow

_KNOWN: Any = WeakTensorKeyDictionary()


def linear(x_TK: Tensor, packed: PackedMatrix, bias_N: Tensor | None, backend: str) -> Tensor:
    """`dispatch.linear` as one operator."""
    tensors, values = _parts(packed)
    out_TN: Tensor = torch.ops.glm5_quant.linear(x_TK, bias_N, tensors, values, packed.n, packed.k, backend)
    return out_TN


def experts(
    x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor, gate_up: PackedMatrix, down: PackedMatrix, activation: str,
    backend: str,
) -> Tensor:  # fmt: skip
    """`dispatch.experts` as one operator."""
    (above, above_values), (below, below_values) = _parts(gate_up), _parts(down)
    out_TD: Tensor = torch.ops.glm5_quant.experts(
        x_TD, index_TA, weight_TA, above, above_values, below, below_values, gate_up.k, down.k, activation, backend
    )
    return out_TD


def _parts(packed: PackedMatrix) -> tuple[list[Tensor], str]:
    """Every tensor of a matrix, and what tells them apart: residence, which optional ones are there, input settings."""
    tensors, marks = [packed.codes, packed.scale, packed.zero], [packed.resident]
    if packed.shadow is not None:
        tensors += [packed.shadow.columns, packed.shadow.residual, packed.shadow.offsets]
        marks.append("shadow")
        if packed.shadow.scale is not None:
            tensors.append(packed.shadow.scale)
            marks.append("factors")
    if packed.inputs is not None:
        marks += [packed.inputs.activations, *(["hadamard"] if packed.inputs.hadamard else [])]
        if packed.inputs.channel_scale is not None:
            tensors.append(packed.inputs.channel_scale)
    return tensors, " ".join(marks)


def _whole(tensors: list[Tensor], values: str, n: int, k: int) -> PackedMatrix:
    """The matrix of `_parts`, the same object again as long as its codes live and every part is what it was."""
    parts = [(part.data_ptr(), -1 if part.is_inference() else part._version) for part in tensors]
    known = _KNOWN.get(tensors[0])
    if known is not None and known[0] == (parts, values, n, k):
        found: PackedMatrix = known[1]
        return found
    resident, *marks = values.split()
    codes, scale, zero, *rest = (part.detach() for part in tensors)  # the tensor itself would keep its own key alive
    shadow = inputs = None
    if "shadow" in marks:
        columns, residual, offsets, *rest = rest
        shadow = Shadow(columns, residual, offsets, rest.pop(0) if "factors" in marks else None)
    formats = [mark for mark in marks if mark not in ("shadow", "factors", "hadamard")]
    if formats:
        channel_scale = rest[0] if rest else None
        inputs = Inputs(hadamard="hadamard" in marks, activations=formats[0], channel_scale=channel_scale)
    whole = PackedMatrix(codes, scale, zero, n, k, shadow, resident, inputs)
    _KNOWN[tensors[0]] = (parts, values, n, k), whole
    return whole


@torch.library.custom_op("glm5_quant::linear", mutates_args=())
def _linear(x: Tensor, bias: Tensor | None, tensors: list[Tensor], values: str, n: int, k: int, backend: str) -> Tensor:
    return dispatch.linear_by(backend, x, _whole(tensors, values, n, k), bias).contiguous()


@_linear.register_fake
def _linear_fake(
    x: Tensor, bias: Tensor | None, tensors: list[Tensor], values: str, n: int, k: int, backend: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


@torch.library.custom_op("glm5_quant::experts", mutates_args=())
def _experts(
    x: Tensor, index: Tensor, weight: Tensor, above: list[Tensor], above_values: str, below: list[Tensor],
    below_values: str, d: int, i: int, activation: str, backend: str,
) -> Tensor:  # fmt: skip
    gate_up, down = _whole(above, above_values, 2 * i, d), _whole(below, below_values, d, i)
    return dispatch.experts_by(backend, x, index, weight, gate_up, down, activation).contiguous()


@_experts.register_fake
def _experts_fake(
    x: Tensor, index: Tensor, weight: Tensor, above: list[Tensor], above_values: str, below: list[Tensor],
    below_values: str, d: int, i: int, activation: str, backend: str,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x, memory_format=torch.contiguous_format)
