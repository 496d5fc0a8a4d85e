"""Exact-match scores of a model on the synthetic dialogues, and how evenly its experts are used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Score:
    """`exact` maps a row name to (right, asked); `expert_share` [layers, E] is the share of tokens each expert took."""

    exact: dict[str, tuple[int, int]]
    expert_share: Tensor

    def share(self, name: str) -> float:
        """Share of right answers in one row; NaN when nothing was asked."""
        right, asked = self.exact.get(name, (0, 0))
        return right / asked if asked else float("nan")


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a dialogue in the chat format."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def buckets(kind: str, distance: int) -> list[str]:
    """Which rows of the score table an answer counts for."""
    if kind in ("noted", "sum"):
        return [kind]
    near = "1-20" if distance <= 20 else "21-99" if distance < 100 else "100-200"
    return ["asked", kind, f"asked {near}", f"{kind} {near}"]


@torch.no_grad()
def score(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> Score:
    """Score a glm5_ref model on dialogues of `corpus.dialogues`.

    An answer counts when the most likely token is the right one at every place of it, its end included; with the right
    history given, that is what greedy generation would have written.
    """
    user, assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    taken = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    tokens = 0
    for row in rows:
        ids = torch.tensor([[*encode(tokenizer, row["messages"]), user]])
        out = model(input_ids=ids, output_routing=True, use_cache=False)
        right = (out.logits[0, :-1].argmax(-1) == ids[0, 1:]).tolist()
        for answer, (start, end) in zip(row["answers"], _answers(ids[0], user, assistant), strict=True):
            for name in buckets(answer["kind"], answer["distance"]):
                counts[name][0] += all(right[start:end])
                counts[name][1] += 1
        for layer, routing in enumerate(out.routing):
            taken[layer] += torch.bincount(routing["expert_index"].flatten(), minlength=taken.shape[1])
        tokens += ids.numel()
    return Score({name: (right, asked) for name, (right, asked) in sorted(counts.items())}, taken / tokens)


def _answers(ids: Tensor, user: int, assistant: int) -> list[tuple[int, int]]:
    """(position of <|assistant|>, position of the <|user|> that ends the answer) for every answer."""
    ends = (ids == user).nonzero().flatten()
    starts = (ids == assistant).nonzero().flatten()
    following = torch.searchsorted(ends, starts)
    return list(zip(starts.tolist(), ends[following].tolist(), strict=True))
