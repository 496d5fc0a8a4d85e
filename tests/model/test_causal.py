from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from glm5_quant.model.causal import KEYS_AT_ONCE, QUERIES, ShortCausal


def drawn(tokens: int, *, heads: int = 4, key_heads: int = 4, value_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(tokens)
    shapes = ((2, heads, tokens, 16), (2, key_heads, tokens, 16), (2, key_heads, tokens, value_size))
    query, key, value = (torch.randn(shape, generator=draws) for shape in shapes)
    return query, key, value


def by_hand(query: Tensor, key: Tensor, value: Tensor, scale: float = 0.25) -> Tensor:
    """Causal attention in float64, score by score."""
    repeat = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(part.double().repeat_interleave(repeat, dim=1) for part in (key, value))
    hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value


class Calls(TorchFunctionMode):
    """Shapes of the queries that PyTorch's own attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            self.queries.append(args[0].shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [1, 2, QUERIES, QUERIES + 1, 200, KEYS_AT_ONCE, KEYS_AT_ONCE + 1])
@pytest.mark.parametrize("shape", [{}, {"key_heads": 2}, {"value_size": 8}])
def test_it_is_causal_attention(tokens: int, shape: dict[str, int]) -> None:
    query, key, value = drawn(tokens, **shape)
    with ShortCausal():
        found = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa="key_heads" in shape)
        scaled = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=0.5, enable_gqa="key_heads" in shape
        )
    torch.testing.assert_close(found.double(), by_hand(query, key, value), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scaled.double(), by_hand(query, key, value, 0.5), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_attention_as_a_whole() -> None:
    def gradients(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        query, key, value = (part.requires_grad_() for part in drawn(150))
        squares = attention(query, key, value).double().square().sum()
        return list(torch.autograd.grad(squares, (query, key, value)))

    with ShortCausal():
        found = gradients(lambda query, key, value: scaled_dot_product_attention(query, key, value, is_causal=True))
    for one, other in zip(found, gradients(by_hand), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "options", "queries"),
    [
        (200, {"is_causal": True}, [64, 64, 64, 8]),
        (QUERIES, {"is_causal": True}, [QUERIES]),
        (KEYS_AT_ONCE + 1, {"is_causal": True}, [KEYS_AT_ONCE + 1]),
        (200, {}, [200]),
        (200, {"attn_mask": torch.ones(200, 200, dtype=torch.bool)}, [200]),
    ],
)
def test_only_short_causal_ones_go_by_parts(tokens: int, options: dict[str, Any], queries: list[int]) -> None:
    with Calls() as calls, ShortCausal():
        out = scaled_dot_product_attention(*drawn(tokens), **options)
    assert calls.queries == queries
    if len(queries) == 1:
        assert torch.equal(out, scaled_dot_product_attention(*drawn(tokens), **options))


def test_memory_is_laid_out_as_the_model_wants_it() -> None:
    with ShortCausal():
        out = scaled_dot_product_attention(*drawn(200), is_causal=True)
    assert out.transpose(1, 2).is_contiguous()


def test_fewer_keys_than_queries_is_left_alone() -> None:
    query, key, value = drawn(200)
    with ShortCausal():
        found = scaled_dot_product_attention(query, key[:, :, :100], value[:, :, :100], is_causal=True)
    assert torch.equal(found, scaled_dot_product_attention(query, key[:, :, :100], value[:, :, :100], is_causal=True))
