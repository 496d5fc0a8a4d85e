"""Greedy answers, one token at a time, with any model and cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from glm5_quant.eval.dialogue import Dialogue, Renderer, Turn
from glm5_quant.eval.prefix import encode


class Stepper(Protocol):
    """What reads tokens on top of a cache: a `Runner`, or a `Reader`."""

    def step(self, ids: torch.Tensor, cache: Any, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [1, T, V] of the next T tokens, or only those at `keep`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Generated ids without the token that ended them; whether a stop token was met before the limit."""

    ids: tuple[int, ...]
    ended: bool


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How answers end: tokens that stop one, and the ids a template writes after it."""

    stops: frozenset[int]
    closing: tuple[int, ...]


def ending_of(renderer: Renderer, config: Any = None) -> Ending:
    """Stop tokens: EOS by tokenizer and config, and what the template writes next after an answer.

    That is its closing mark, or where it has none (GLM) the mark of the next user message.
    """
    tokenizer = renderer.tokenizer
    turns = (Turn(user="a", answer="b"), Turn(user="c", answer="d"))
    pieces = renderer.pieces(Dialogue(turns=turns))
    closing = tuple(encode(tokenizer, pieces[1].text.rpartition("b")[2]))
    found = set(closing[:1] or pieces[2].ids[:1])
    for value in (getattr(tokenizer, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list | tuple):
            found.update(value)
    return Ending(stops=frozenset(found), closing=closing)


def answer(
    runner: Stepper,
    cache: Any,
    prompt: Sequence[int],
    stops: frozenset[int],
    limit: int,
    ended: Callable[[Sequence[int]], bool] = lambda _: False,
) -> Answer:
    """Read `prompt` and pick the most likely token until a stop token, `limit`, or what is made so far has `ended`.

    The cache then holds the prompt and the answer; where the limit cut it, all but its last token.
    """
    ids = torch.tensor([list(prompt)], dtype=torch.int64)
    made: list[int] = []
    while True:
        # Only the last place is asked for: the logits of a long prompt are many times the size of the model's cache.
        logits = runner.step(ids, cache, torch.tensor([ids.shape[1] - 1]))
        token = int(logits[0, -1].float().argmax())
        if token in stops:
            return Answer(ids=tuple(made), ended=True)
        made.append(token)
        if len(made) >= limit or ended(made):
            return Answer(ids=tuple(made), ended=False)
        ids = torch.tensor([[token]], dtype=torch.int64)
