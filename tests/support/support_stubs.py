"""Stub language models whose every figure can be added up by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

VOCABULARY = 256


class Bigram:
    """p(next | current) from a table: `log_table` float [V, V] of log-probabilities. Counts its calls and tokens."""

    def __init__(self, log_table: torch.Tensor) -> None:
        self.log_table = log_table
        self.calls = 0
        self.rows = 0

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        self.rows += ids.shape[0]
        return self.log_table[ids]


def bigram(nll_of: dict[tuple[int, int], float], size: int = 8) -> Bigram:
    """A table with the given negative log-likelihoods for (current, next); what is left is spread evenly."""
    table = torch.zeros(size, size, dtype=torch.float64)
    for current in range(size):
        given = {token: math.exp(-nll) for (first, token), nll in nll_of.items() if first == current}
        rest = (1.0 - sum(given.values())) / (size - len(given))
        for token in range(size):
            table[current, token] = given.get(token, rest)
    return Bigram(table.log())


def uniform(size: int = VOCABULARY) -> Bigram:
    """Every token costs ln(size), so perplexity is the vocabulary size."""
    return Bigram(torch.zeros(size, size))


def random_bigram(seed: int, size: int = 32, noise_of: Bigram | None = None, noise: float = 0.3) -> Bigram:
    """A random table, or another table with noise on its logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, size, generator=generator, dtype=torch.float64)
    if noise_of is not None:
        logits = noise_of.log_table + noise * logits
    return Bigram(torch.log_softmax(logits, dim=-1))


def cycle(size: int = 8) -> Bigram:
    """p(next) = 1 along 0, 1, ..., size - 1, 0: perplexity 1 unless the logits are shifted."""
    table = torch.full((size, size), -math.inf)
    for current in range(size):
        table[current, (current + 1) % size] = 0.0
    return Bigram(table)


class CharTokenizer:
    """One id a character of a fixed alphabet; BOS, EOS and GLM's prefix tokens where asked for."""

    def __init__(
        self, *, bos: str | None = None, adds_bos: bool = False, special: Sequence[str] = (), adds_eos: bool = False
    ) -> None:
        letters = [chr(code) for code in range(32, 127)] + list("０１２３％保守型进取不限额")
        names = [*([bos] if bos else []), *special, "</s>"]
        self.vocabulary = {text: index for index, text in enumerate([*names, *letters])}
        self.texts = {index: text for text, index in self.vocabulary.items()}
        self.bos_token, self.adds_bos, self.adds_eos = bos, adds_bos, adds_eos
        self.bos_token_id = self.vocabulary[bos] if bos else None
        self.eos_token, self.eos_token_id = "</s>", self.vocabulary["</s>"]
        self.all_special_ids = [self.vocabulary[name] for name in names]
        self.chat_template: str | None = None

    def get_vocab(self) -> dict[str, int]:
        return dict(self.vocabulary)

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        ids, names = [], sorted((self.texts[i] for i in self.all_special_ids), key=len, reverse=True)
        while text:
            token = next((name for name in names if text.startswith(name)), text[0])
            if token in self.vocabulary:
                ids.append(self.vocabulary[token])
            text = text[len(token) :]
        if not add_special_tokens:
            return ids
        front = [self.bos_token_id] if self.adds_bos and self.bos_token_id is not None else []
        return [*front, *ids, *([self.eos_token_id] if self.adds_eos else [])]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(self.texts[int(index)] for index in ids)

    def batch_decode(self, batch: Sequence[Sequence[int]], **_: object) -> list[str]:
        return [self.decode(ids) for ids in batch]
