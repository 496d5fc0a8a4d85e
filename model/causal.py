"""Causal attention of short windows on a CPU, without the scores that no token may use.

Dimensions: B batch, H heads, T tokens, D head size.
PyTorch's kernel for CPUs takes keys 512 at a time, so that windows up to that length get all scores computed and half
of them masked. Queries a few at a time, with the keys up to theirs, take a third less time, rounding apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

KEYS_AT_ONCE = 512
QUERIES = 64


class ShortCausal(TorchFunctionMode):
    """While this is entered, causal attentions of T <= KEYS_AT_ONCE tokens on a CPU go by QUERIES queries."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is scaled_dot_product_attention and len(args) == 3 and options.get("is_causal"):
            query, key, _ = args
            short = QUERIES < query.shape[-2] <= KEYS_AT_ONCE and query.shape[-2] == key.shape[-2]
            if query.is_cpu and short and options.get("attn_mask") is None:
                return _by_queries(*args, **options)
        return func(*args, **options)


def _by_queries(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The same attention, [B, H, T, D] in memory as [B, T, H, D], as PyTorch's kernel leaves it."""
    tokens = query.shape[-2]
    mask_TT = torch.full((tokens, tokens), -torch.inf, dtype=query.dtype).triu_(1)
    parts = []
    for start in range(0, tokens, QUERIES):
        stop = min(start + QUERIES, tokens)
        options |= {"is_causal": False, "attn_mask": mask_TT[start:stop, :stop]}
        part = scaled_dot_product_attention(
            query[..., start:stop, :], key[..., :stop, :], value[..., :stop, :], **options
        )
        parts.append(part.transpose(-3, -2))
    return torch.cat(parts, dim=-3).transpose(-3, -2)
