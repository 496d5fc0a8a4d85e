"""`torch.compile` keeps the two functions whole: one graph, the same numbers, for every kind of matrix."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from support_kernels import random_packed, random_routing, random_shadow, random_tokens
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from glm5_quant.kernels import compiled
from glm5_quant.kernels.dispatch import experts, linear
from glm5_quant.kernels.layout import Inputs, PackedMatrix
from glm5_quant.model.modules import PackedLinear


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [None, False, True])
def test_a_linear_is_one_graph_with_the_same_numbers(dtype: torch.dtype, int8: bool | None) -> None:
    shadow = None if int8 is None else random_shadow(40, 192, [5], int8=int8)
    packed, _ = random_packed(40, 192, dtype=torch.bfloat16, shadow=shadow)
    packed = replace(packed, inputs=Inputs(hadamard=True, activations="int4-channel", channel_scale=torch.ones(192)))
    x, bias = random_tokens(6, 192, dtype).view(2, 3, 192), torch.ones(40)

    def layer(x: torch.Tensor) -> torch.Tensor:
        rebuilt = PackedMatrix(packed.codes, packed.scale, packed.zero, 40, 192, packed.shadow, "int4", packed.inputs)
        return linear(x, rebuilt, bias) * 2

    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found, layer(x))


def test_a_routed_layer_is_one_graph_although_experts_differ_in_tokens() -> None:
    gate_up, _ = random_packed(128, 64, 4)
    down, _ = random_packed(64, 64, 4, seed=1)
    layer = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for tokens in (5, 9):
        index, weight = random_routing(tokens, 4, 2, seed=tokens)
        x = random_tokens(tokens, 64)
        assert torch.equal(layer(x, index, weight, gate_up, down), experts(x, index, weight, gate_up, down))


def test_what_a_backend_made_of_a_matrix_is_made_once() -> None:
    packed, _ = random_packed(32, 64, dtype=torch.bfloat16)
    tensors, values = compiled._parts(packed)
    first = compiled._whole(tensors, values, 32, 64)
    assert compiled._whole(tensors, values, 32, 64) is first
    moved = [tensors[0], tensors[1].clone(), tensors[2]]
    assert compiled._whole(moved, values, 32, 64) is not first


def test_matrices_that_share_their_codes_are_told_apart() -> None:
    packed, _ = random_packed(32, 64)
    eight, shaded = (
        replace(packed, inputs=Inputs(activations="int8")),
        replace(packed, shadow=random_shadow(32, 64, [3])),
    )
    x = random_tokens(2, 64)
    for one in (packed, eight, shaded, packed):
        assert torch.equal(torch.compile(partial(linear, packed=one), backend="eager")(x), linear(x, one))


def test_codes_that_are_overwritten_count_in_a_compiled_layer_at_once() -> None:
    (packed, _), (other, _) = random_packed(32, 64), random_packed(32, 64, seed=1)
    layer, wanted, x = PackedLinear(packed), PackedLinear(other), random_tokens(2, 64)
    fast = torch.compile(layer, backend="eager")
    assert torch.equal(fast(x), layer(x))
    layer.load_state_dict(wanted.state_dict())
    assert torch.equal(fast(x), wanted(x))


def test_a_compiled_layer_leaves_no_codes_behind() -> None:
    for make in (lambda: PackedLinear(random_packed(32, 64)[0]), lambda: PackedLinear(random_packed(512, 256)[0])):
        layer = make()
        codes = weakref.ref(layer.get_buffer("weight_codes"))
        torch.compile(layer, backend="eager")(random_tokens(2, layer.in_features))
        assert codes() in compiled._KNOWN
        del layer
        torch._dynamo.reset()
        gc.collect()
        assert codes() is None


@pytest.mark.parametrize("int8", [None, False, True])
def test_the_operators_are_plain_functions_too(int8: bool | None) -> None:
    shadow = None if int8 is None else random_shadow(40, 128, [3], int8=int8)
    packed, _ = random_packed(40, 128, shadow=shadow)
    x = random_tokens(3, 128)
    assert torch.equal(compiled.linear(x, packed, None, "reference"), linear(x, packed))
    gate_up, down = random_packed(128, 64, 4)[0], random_packed(64, 64, 4, seed=1)[0]
    index, weight = random_routing(3, 4, 2)
    found = compiled.experts(x[:, :64], index, weight, gate_up, down, "silu", "reference")
    assert torch.equal(found, experts(x[:, :64], index, weight, gate_up, down))


def test_what_only_follows_or_stands_in_for_tensors_gets_the_operators_too() -> None:
    gate_up, down = random_packed(128, 64, 4)[0], random_packed(64, 64, 4, seed=1)[0]
    index, weight = random_routing(3, 4, 2)
    x, y = random_tokens(3, 64, torch.bfloat16), random_tokens(3, 64, torch.bfloat16, seed=1)
    layer = PackedLinear(random_packed(32, 64)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(layer, (x,), check_trace=False)
    assert torch.equal(traced(y), layer(y))
    assert torch.equal(make_fx(layer)(x)(y), layer(y))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor) for tensor in (x, index, weight)]
        assert layer(fake[0]).shape == (3, 32)
        assert experts(*fake, gate_up, down).shape == (3, 64)


def test_gradients_go_through_a_compiled_layer() -> None:
    layer = PackedLinear(random_packed(32, 64)[0])
    plain, fast = (random_tokens(3, 64, torch.bfloat16).requires_grad_() for _ in range(2))
    layer(plain).float().square().sum().backward()
    torch.compile(layer, backend="aot_eager", fullgraph=True)(fast).float().square().sum().backward()
    assert plain.grad is not None and fast.grad is not None
    assert torch.allclose(plain.grad, fast.grad, rtol=1e-2)
