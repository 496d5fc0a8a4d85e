"""Linears of an export that stayed in source precision: PyTorch's own, but faster for a few tokens on a CPU.

Letters: N out, K in.
"""

from __future__ import annotations

from torch import Tensor, nn

from glm5_quant.kernels import dispatch


class PlainLinear(nn.Linear):
    """`nn.Linear` through `dispatch.plain`: x [..., K] -> [..., N], the same weights, differentiable as before."""

    def forward(self, input: Tensor) -> Tensor:
        return dispatch.plain(input, self.weight, self.bias)


def make_plain_linears(model: nn.Module) -> None:
    """Turn every `nn.Linear` of a model into a `PlainLinear` in place: parameters, ties and hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = PlainLinear
