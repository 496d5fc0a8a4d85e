"""The reference computes what the formula says, against float64 loops."""

from __future__ import annotations

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

from glm5_quant.kernels import reference
from glm5_quant.kernels.dispatch import experts, linear


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 63), (64, 128), (33, 190), (5, 257)])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_linear_equals_float64_for_every_shape(n: int, k: int, tokens: int) -> None:
    packed, weight = random_packed(n, k)
    x, bias = random_tokens(tokens, k), random_tokens(1, n)[0]
    found = linear(x, packed, bias, backend="reference")
    assert found.shape == (tokens, n) and found.dtype == torch.float32
    assert torch.allclose(found.double(), x.double() @ weight.T + bias.double(), rtol=1e-4, atol=1e-4)


def test_linear_in_chunks_of_rows_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, weight = random_packed(50, 130)
    x = random_tokens(3, 130)
    monkeypatch.setattr(reference, "CHUNK_WEIGHTS", 7 * 130)
    assert relative_error(linear(x, packed, backend="reference"), x.double() @ weight.T) < 1e-6


def test_half_precision_inputs_are_rounded_only_once_at_the_end() -> None:
    packed, weight = random_packed(40, 256, dtype=torch.bfloat16)
    x = random_tokens(10, 256, torch.bfloat16).view(2, 5, 256)
    found = linear(x, packed, backend="reference")
    expected = (x.double() @ weight.T).to(torch.bfloat16)
    assert found.shape == (2, 5, 40)
    assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("int8", [False, True])
def test_a_shadow_adds_its_columns_to_the_weights(int8: bool) -> None:
    packed, weight = random_packed(40, 200, shadow=random_shadow(40, 200, [9], int8=int8))
    x = random_tokens(6, 200)
    assert relative_error(linear(x, packed, backend="reference"), x.double() @ weight.T) < 1e-6


def test_experts_equal_a_loop_over_tokens_and_choices() -> None:
    gate_up, weight_gate_up = random_packed(2 * 70, 96, 5, shadow=random_shadow(140, 96, [2, 0, 5, 1, 0]))
    down, weight_down = random_packed(96, 70, 5, seed=1, shadow=random_shadow(96, 70, [0, 3, 0, 0, 4], int8=True))
    index, weight = random_routing(11, 5, 3)
    x = random_tokens(11, 96)
    found = experts(x, index, weight, gate_up, down, backend="reference")
    expected = experts_float64(x, index, weight, weight_gate_up, weight_down)
    assert relative_error(found, expected) < 1e-6


def test_index_e_means_no_expert() -> None:
    gate_up, weight_gate_up = random_packed(128, 64, 3)
    down, weight_down = random_packed(64, 64, 3, seed=1)
    index = torch.tensor([[0, 3], [3, 3], [2, 1]])
    weight = torch.full((3, 2), 0.5)
    x = random_tokens(3, 64)
    found = experts(x, index, weight, gate_up, down, backend="reference")
    assert torch.equal(found[1], torch.zeros(64))
    assert relative_error(found, experts_float64(x, index, weight, weight_gate_up, weight_down)) < 1e-6


def test_an_index_outside_the_stack_is_refused() -> None:
    gate_up, _ = random_packed(128, 64, 3)
    down, _ = random_packed(64, 64, 3)
    with pytest.raises(ValueError, match=r"expert index -1 is outside 0\.\.3"):
        experts(random_tokens(1, 64), torch.tensor([[-1]]), torch.ones(1, 1), gate_up, down, backend="reference")
