"""Greedy answers, one token at a time, with any model and cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Stepper(Protocol):
    """What reads tokens on top of a cache: a `Runner`, or a `Reader`."""

    def step(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits [1, T, V] of the next T tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Generated ids without the token that ended them; whether a stop token was met before the limit."""

    ids: tuple[int, ...]
    ended: bool


def stop_tokens(tokenizer: Any, config: Any, closing: Sequence[int] = ()) -> frozenset[int]:
    """Tokens that end an answer: EOS by tokenizer and config, and the first token of what the template closes with."""
    found: set[int] = set(closing[:1])
    for value in (getattr(tokenizer, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list | tuple):
            found.update(value)
    return frozenset(found)


def answer(runner: Stepper, cache: Any, prompt: Sequence[int], stops: frozenset[int], limit: int) -> Answer:
    """Read `prompt` and pick the most likely token until a stop token or `limit`. The cache then holds the prompt and
    the answer but its last token."""
    ids = torch.tensor([list(prompt)], dtype=torch.int64)
    made: list[int] = []
    while True:
        logits = runner.step(ids, cache)
        token = int(logits[0, -1].float().argmax())
        if token in stops:
            return Answer(ids=tuple(made), ended=True)
        made.append(token)
        if len(made) >= limit:
            return Answer(ids=tuple(made), ended=False)
        ids = torch.tensor([[token]], dtype=torch.int64)
