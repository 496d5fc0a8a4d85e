"""Linears that stay in source precision compute the same, learn as before, and keep their ties."""

from __future__ import annotations

import pytest
import torch
from support_kernels import random_tokens, relative_error
from torch import nn

from glm5_quant.kernels import native
from glm5_quant.model.plain import PlainLinear, make_plain_linears

BF16 = 4e-3


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 48, dtype=torch.bfloat16)
        self.head = nn.Linear(48, 70, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.other = nn.Bilinear(2, 2, 2)


@pytest.mark.parametrize("shape", [(48,), (1, 1, 48), (2, 2, 48), (5, 48), (0, 48)])
@pytest.mark.parametrize("found", [True, False])
def test_the_same_product_with_and_without_the_native_kernels(
    shape: tuple[int, ...], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not found:
        monkeypatch.setattr(native, "suits", lambda tokens: False)
    layer = PlainLinear(48, 70, dtype=torch.bfloat16)
    x = random_tokens(7, 48, torch.bfloat16).flatten()[: torch.Size(shape).numel()].reshape(shape)
    with torch.no_grad():
        out = layer(x)
    assert out.shape == (*shape[:-1], 70) and out.dtype == torch.bfloat16
    expected = x.double() @ layer.weight.double().T + layer.bias.double()
    assert not x.numel() or relative_error(out, expected.detach()) < BF16


def test_float32_inputs_take_pytorchs_product_to_the_bit() -> None:
    layer = PlainLinear(48, 70)
    x = random_tokens(1, 48)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_a_layer_that_learns_still_learns() -> None:
    layer = PlainLinear(48, 70, dtype=torch.bfloat16)
    layer(random_tokens(1, 48, torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None and bool(layer.weight.grad.any())


def test_linears_are_turned_where_they_are_and_stay_tied() -> None:
    model = _Tied()
    names = list(model.state_dict())
    make_plain_linears(model)
    assert type(model.head) is PlainLinear and type(model.other) is nn.Bilinear
    assert model.head.weight is model.embedding.weight and list(model.state_dict()) == names
