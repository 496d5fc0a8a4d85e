"""Computing with codes in plain PyTorch, exactly: the values every other backend is judged by.

Letters: E experts, N out, K in, T tokens, D hidden size, I expert size, A experts a token chooses.

Weights are (code - zero) * scale in float32, inputs are widened to float32, sums run in float32 and are rounded once,
at the end, to the input's dtype. Works on any device; large matrices are widened a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from glm5_quant.kernels.inputs import prepare, quantize
from glm5_quant.kernels.layout import GROUP_SIZE, PackedMatrix, Shadow, dequantize, expert, rows, to_codes, weights
from glm5_quant.quant.activation import Quantized, quantized_matmul
from glm5_quant.quant.grid import Grid

CHUNK_WEIGHTS = 1 << 23
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
    "relu": functional.relu,
}


def linear(x_TK: Tensor, packed: PackedMatrix, bias_N: Tensor | None = None) -> Tensor:
    """x @ W^T + bias, [T, N] in x's dtype."""
    return _matmul(x_TK.float(), packed, bias_N).to(x_TK.dtype)


def experts(
    x_TD: Tensor,
    index_TA: Tensor,
    weight_TA: Tensor,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    activation: str = "silu",
) -> Tensor:
    """Sum of weight * down(act(gate x) * up x) over each token's experts, [T, D]; index E means "no expert"."""
    count = gate_up.codes.shape[0]
    x_TD_float = x_TD.float()
    out_TD = torch.zeros_like(x_TD_float)
    for e in torch.unique(index_TA).tolist():
        if e == count:
            continue
        if not 0 <= e < count:
            raise ValueError(f"expert index {e} is outside 0..{count}, where {count} means no expert")
        token, choice = (index_TA == e).nonzero(as_tuple=True)
        gate, up = _matmul(x_TD_float[token], expert(gate_up, e)).chunk(2, dim=-1)
        hidden = ACTIVATIONS[activation](gate) * up
        part = _matmul(hidden, expert(down, e)) * weight_TA[token, choice, None].float()
        out_TD.index_add_(0, token, part)
    return out_TD.to(x_TD.dtype)


def weights_with_shadow(packed: PackedMatrix) -> Tensor:
    """Float32 weights [N, K] of a single matrix with its shadow's columns added."""
    weight_NK, shadow = dequantize(packed), packed.shadow
    return weight_NK if shadow is None else weight_NK.index_add_(1, shadow.columns.long(), _residual(shadow).T)


def shadow_term(x_TK: Tensor, shadow: Shadow) -> Tensor:
    """What a single matrix's shadow adds to the output, float32 [T, N]."""
    return x_TK.float()[:, shadow.columns.long()] @ _residual(shadow)


def _residual(shadow: Shadow) -> Tensor:
    residual_CN = shadow.residual.float()
    return residual_CN if shadow.scale is None else residual_CN * shadow.scale[:, None]


def _product(x_TK: Tensor, steps: Quantized | None, packed: PackedMatrix) -> Tensor:
    """Plain x @ W^T, from the integer steps of x where it has some."""
    if steps is None:
        return x_TK @ weights(packed).T
    return quantized_matmul(steps, to_codes(packed), Grid(scale=packed.scale.float(), zero=packed.zero))


def _matmul(x_TK: Tensor, packed: PackedMatrix, bias_N: Tensor | None = None) -> Tensor:
    """float32 in, float32 out. Inputs of fewer bits meet the codes as integers, by exact dots of blocks."""
    steps: Quantized | None = None
    if packed.inputs is not None:
        x_TK = prepare(x_TK, packed.inputs)
        if packed.inputs.activations != "none":
            codes_TK, scale, _ = quantize(x_TK, packed.inputs.activations)
            steps = Quantized(steps=codes_TK, scale=scale, group_size=GROUP_SIZE)
            x_TK = steps.dequantize()
    step = max(1, CHUNK_WEIGHTS // packed.k)
    if step >= packed.n:
        out_TN = _product(x_TK, steps, packed)
    else:
        parts = [_product(x_TK, steps, rows(packed, start, start + step)) for start in range(0, packed.n, step)]
        out_TN = torch.cat(parts, dim=-1)
    if packed.shadow is not None:
        out_TN += shadow_term(x_TK, packed.shadow)
    if bias_N is not None:
        out_TN += bias_N.float()
    return out_TN
