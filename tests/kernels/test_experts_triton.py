"""Triton's mixture-of-experts kernels under the interpreter, in fp16, against float64 loops and their plain twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support_kernels import (
    experts_float64,
    poison,
    random_packed,
    random_routing,
    random_shadow,
    random_tokens,
    relative_error,
)

pytest.importorskip("triton")

from glm5_quant.kernels import experts_triton as kernels
from glm5_quant.kernels.dispatch import experts
from glm5_quant.kernels.layout import Inputs, PackedMatrix
from glm5_quant.kernels.table import Config

FEW = Config(block_r=32, block_t=8, warps=1, stages=1)
MANY = Config(block_r=32, block_t=64, warps=1, stages=1)
BOUND = 1e-3


def layer(experts: int, d: int, i: int, shadow: bool = False) -> tuple:
    counts = [e % 3 for e in range(experts)]
    above = random_shadow(2 * i, d, counts) if shadow else None
    below = random_shadow(d, i, counts[::-1], int8=True) if shadow else None
    gate_up, weight_gate_up = random_packed(2 * i, d, experts, dtype=torch.float16, shadow=above)
    down, weight_down = random_packed(d, i, experts, seed=1, dtype=torch.float16, shadow=below)
    return gate_up, down, weight_gate_up, weight_down


@pytest.mark.parametrize("tokens", [1, 9, 33, 129])
@pytest.mark.parametrize(("d", "i", "shadow"), [(128, 64, False), (72, 40, True)])
def test_a_layer_is_within_a_thousandth_of_float64(
    tokens: int, d: int, i: int, shadow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down, weight_gate_up, weight_down = layer(5, d, i, shadow)
    index, weight = random_routing(tokens, 5, 2)
    index[0, 1] = 5
    x = random_tokens(tokens, d, torch.float16)
    poison(monkeypatch)
    found = experts(x, index, weight.half(), gate_up, down, backend="triton")
    expected = experts_float64(x, index, weight.half(), weight_gate_up, weight_down)
    assert relative_error(found, expected) < BOUND


def test_experts_with_no_token_and_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down, weight_gate_up, weight_down = layer(4, 64, 64)
    index = torch.zeros(70, 1, dtype=torch.int64)
    index[17] = 2
    weight, x = torch.ones(70, 1), random_tokens(70, 64, torch.float16)
    poison(monkeypatch)
    found = experts(x, index, weight, gate_up, down, backend="triton")
    assert relative_error(found, experts_float64(x, index, weight, weight_gate_up, weight_down)) < BOUND


@pytest.mark.parametrize("tokens", [3, 70])
def test_tokens_without_any_expert_give_zeros(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down, _, _ = layer(3, 64, 64)
    poison(monkeypatch)
    index, weight = torch.full((tokens, 2), 3), torch.ones(tokens, 2)
    found = experts(random_tokens(tokens, 64, torch.float16), index, weight, gate_up, down, backend="triton")
    assert torch.equal(found, torch.zeros(tokens, 64, dtype=torch.float16))


def test_tokens_beyond_one_part_and_no_tokens_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down, weight_gate_up, weight_down = layer(3, 64, 64)
    monkeypatch.setattr(kernels, "TOKENS_AT_ONCE", 4)
    index, weight = random_routing(10, 3, 2)
    x = random_tokens(10, 64, torch.float16)
    found = experts(x, index, weight, gate_up, down, backend="triton")
    assert relative_error(found, experts_float64(x, index, weight, weight_gate_up, weight_down)) < BOUND
    assert experts(x[:0], index[:0], weight[:0], gate_up, down, backend="triton").shape == (0, 64)


@pytest.mark.parametrize("pairs", [64, 65, 500])
@pytest.mark.parametrize("tile", [8, 16])
def test_every_pair_with_an_expert_lies_in_one_tile_of_that_expert(pairs: int, tile: int) -> None:
    index = torch.randint(0, 8, (pairs, 1), generator=torch.Generator().manual_seed(3))
    tiles = kernels.route(index, 7, tile)
    assert tiles.pair_GM.shape == (tiles.expert_G.numel(), tile)
    seen = []
    for slots, e in zip(tiles.pair_GM.tolist(), tiles.expert_G.tolist(), strict=True):
        inside = [pair for pair in slots if pair < pairs]
        assert all(int(index[pair]) == e for pair in inside)
        seen += inside if e < 7 else []
    assert sorted(seen) == [pair for pair in range(pairs) if int(index[pair]) < 7]


@pytest.mark.parametrize("config", [FEW, MANY])
def test_each_kernel_equals_its_plain_twin(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down, _, _ = layer(4, 72, 40, shadow=True)
    index, weight = random_routing(40, 4, 2)
    index = index.to(torch.int32)
    index[5] = 4
    x, tiles = random_tokens(40, 72, torch.float16), kernels.route(index, 4, config.block_t)
    valid = (index < 4).reshape(-1)
    poison(monkeypatch)
    hidden = kernels.gate_up_silu(x, index, tiles, gate_up, config)
    plain = kernels.gate_up_silu_plain(x, index, tiles, gate_up, config)
    assert hidden.shape == plain.shape
    assert relative_error(hidden[valid], plain[valid]) < BOUND
    parts = kernels.down_weighted(plain, weight, tiles, down, config)
    plain_parts = kernels.down_weighted_plain(plain, weight, tiles, down, config)
    assert relative_error(parts[valid], plain_parts[valid]) < BOUND
    found, expected = (torch.full((40, 72), float("nan"), dtype=torch.float16) for _ in range(2))
    kernels.combine(plain_parts, index, 4, found)
    kernels.combine_plain(plain_parts, index, 4, expected)
    assert torch.equal(found, expected)


def test_inputs_are_rotated_before_each_projection() -> None:
    gate_up, down, _, _ = layer(3, 128, 64)
    gate_up, down = replace(gate_up, inputs=Inputs(hadamard=True)), replace(down, inputs=Inputs(hadamard=True))
    index, weight = random_routing(5, 3, 2)
    x = random_tokens(5, 128, torch.float16)
    found = experts(x, index, weight, gate_up, down, backend="triton")
    exact = experts(x.float(), index, weight, gate_up, down, backend="reference")
    assert relative_error(found, exact) < 2 * BOUND


def test_a_stack_whose_parts_are_views_of_a_larger_one_is_read_right() -> None:
    gate_up, down = random_packed(128, 64, 3, dtype=torch.float16)[0], random_packed(64, 64, 3, seed=1)[0]
    wide = [part.repeat_interleave(2, 1)[:, ::2] for part in (gate_up.codes, gate_up.scale, gate_up.zero)]
    high = [part.repeat_interleave(2, 1)[:, ::2] for part in (down.codes, down.scale, down.zero)]
    index, weight = random_routing(5, 3, 2)
    x = random_tokens(5, 64, torch.float16)
    found = experts(x, index, weight, PackedMatrix(*wide, 128, 64), PackedMatrix(*high, 64, 64), backend="triton")
    assert torch.equal(found, experts(x, index, weight, gate_up, down, backend="triton"))


def test_only_silu_experts_are_computed() -> None:
    gate_up, down, _, _ = layer(3, 64, 64)
    x, index, weight = torch.ones(1, 64).half(), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    with pytest.raises(ValueError, match="compute silu experts, found 'gelu'"):
        experts(x, index, weight, gate_up, down, activation="gelu", backend="triton")
