"""Synthetic dialogues with exactly one right answer per assistant turn, deterministic by seed.

A dialogue is a ledger of facts: each is stated once by the user and asked for again 1 to 200 turns later. A *turn* is
one user message with the assistant's answer. `distance` of an answer counts turns since the fact was last mentioned,
by the user or in an earlier answer, so it never flatters the model.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from glm5_quant.model.tiny.words import (
    BASES,
    CODE_LETTERS,
    DOMAINS,
    MONTHS,
    NAMES,
    PERCENTS,
    PHRASES,
    UNLESS,
    Attribute,
    Domain,
    Language,
)

CALIBRATION_SEED = 20_000_003
EVALUATION_SEED = 40_000_003
TRAINING_SEED = 1_000_003  # dialogue i of a run uses TRAINING_SEED + a counter far below the two seeds above

LanguageChoice = Literal["en", "zh", "mixed"]
NUMBER_KINDS = frozenset({"amount", "percent", "date", "bound", "small"})


@dataclass
class Fact:
    """One ledger entry: which name and attribute, its value as text, and the turn that last mentioned it."""

    key: str
    value: str
    kind: str
    small: int | None
    last_turn: int
    reference: int = field(default=0)


class _Dialogue:
    """Builds one dialogue turn by turn; everything random comes from one generator."""

    def __init__(self, rng: random.Random, turns: int, language: Language) -> None:
        self.rng, self.turns, self.language = rng, turns, language
        self.phrases = PHRASES[language]
        self.domain: Domain = rng.choice(DOMAINS[language])
        # From few names with many attributes each to many names with the same one: neither alone tells facts apart.
        names = rng.randint(max(3, turns // 8), max(6, turns // 2))
        self.names = rng.sample(NAMES[language], k=min(len(NAMES[language]), names))
        self.attributes = rng.sample(self.domain.attributes, k=rng.choice((1, 2, 3, 5, 10)))
        self.used: set[tuple[str, str]] = set()
        self.facts: list[Fact] = []
        self.due: list[tuple[int, int]] = []
        self.messages: list[dict[str, str]] = []
        self.answers: list[dict[str, Any]] = []

    def build(self) -> None:
        for turn in range(self.turns):
            roll = self.rng.random()
            if self.due and self.due[0][0] <= turn:
                self.ask(turn, heapq.heappop(self.due)[1])
            elif roll < 0.02:
                self.percent(turn)
            elif roll < 0.06 and self.add(turn):
                pass
            elif not self.state(turn):
                self.ask(turn, self.rng.randrange(len(self.facts)))

    def say(self, turn: int, user: str, assistant: str, kind: str, distance: int) -> None:
        self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        self.answers.append({"turn": turn, "kind": kind, "distance": distance})

    def state(self, turn: int) -> bool:
        """State a new fact; False when no unused (name, attribute) was found."""
        for _ in range(8):
            name, attribute = self.rng.choice(self.names), self.rng.choice(self.attributes)
            if (name, attribute.name) not in self.used:
                break
        else:
            return False
        self.used.add((name, attribute.name))
        value, small = self.value(attribute)
        key = self.phrases.key.format(name=name, attribute=attribute.name)
        kind = (
            "number" if attribute.kind in NUMBER_KINDS else "word" if attribute.kind in ("choice", "unless") else "fact"
        )
        self.facts.append(Fact(key, value, kind, small, turn))
        self.schedule(turn, len(self.facts) - 1)
        statement = self.rng.choice(self.phrases.statements).format(key=key, value=value)
        self.say(turn, statement, self.phrases.noted, "noted", 0)
        return True

    def schedule(self, turn: int, index: int) -> None:
        """Choose when a fact is asked for next: half log-uniform (recent), half uniform over what is left."""
        left = self.turns - 1 - turn
        if left < 1:
            return
        share = self.rng.random()
        gap = round(left**share) if self.rng.random() < 0.5 else 1 + int(share * left)
        heapq.heappush(self.due, (turn + max(1, gap), index))

    def ask(self, turn: int, index: int) -> None:
        fact = self.facts[index]
        question = self.rng.choice(self.phrases.questions).format(key=fact.key)
        answer = self.phrases.answer.format(key=fact.key, value=fact.value)
        self.say(turn, question, answer, fact.kind, turn - fact.last_turn)
        fact.last_turn = turn
        if self.rng.random() < 0.6:
            self.schedule(turn, index)

    def add(self, turn: int) -> bool:
        """Ask for the sum of two one-digit facts; False when the ledger has not two yet."""
        small = [fact for fact in self.facts if fact.small is not None]
        if len(small) < 2:
            return False
        first, second = self.rng.sample(small, k=2)
        assert first.small is not None and second.small is not None
        question = self.phrases.sum_question.format(first=first.key, second=second.key)
        answer = self.phrases.sum_answer.format(a=first.small, b=second.small, c=first.small + second.small)
        self.say(turn, question, answer, "sum", turn - min(first.last_turn, second.last_turn))
        return True

    def percent(self, turn: int) -> None:
        p, n = self.rng.choice(PERCENTS), self.rng.choice(BASES)
        question = self.phrases.percent_question.format(p=p, n=n)
        self.say(turn, question, self.phrases.percent_answer.format(p=p, n=n, c=p * n // 100), "sum", 0)

    def value(self, attribute: Attribute) -> tuple[str, int | None]:
        """Text of a fresh value of the attribute's kind, and the integer behind it where sums may use it."""
        rng = self.rng
        if attribute.kind == "amount":
            return self.amount() + attribute.unit, None
        if attribute.kind == "bound":
            pattern = rng.choice((self.phrases.at_most, self.phrases.at_least))
            return pattern.format(value=self.amount() + attribute.unit), None
        if attribute.kind == "percent":
            return f"{rng.randrange(0, 100)}.{rng.randrange(0, 100)}%", None
        if attribute.kind == "date":
            month = rng.randrange(12)
            text = MONTHS[month] if self.language == "en" else str(month + 1)
            return self.phrases.date.format(month=text, day=rng.randrange(1, 29)), None
        if attribute.kind == "code":
            return self.code(), None
        if attribute.kind == "unless":
            return UNLESS[self.language].format(choice=rng.choice(attribute.choices), code=self.code()), None
        if attribute.kind == "small":
            digit = rng.randrange(1, 10)
            return f"{digit}{attribute.unit}", digit
        return rng.choice(attribute.choices), None

    def amount(self) -> str:
        """Three to six digits, so one or two digit pieces."""
        digits = self.rng.choice((3, 4, 5, 6))
        return str(self.rng.randrange(10 ** (digits - 1), 10**digits))

    def code(self) -> str:
        return f"{self.rng.choice(CODE_LETTERS)}{self.rng.randrange(100, 1000)}"


def dialogue(seed: int, turns: int, language: LanguageChoice = "mixed") -> dict[str, Any]:
    """One dialogue of `turns` user/assistant exchanges.

    Returns {"messages": [...], "answers": [{"turn", "kind", "distance"}, ...], "language", "domain"}. `answers[i]`
    scores the assistant message `messages[2 * i + 1]`; kind is noted, fact, number, word or sum; distance counts turns
    since the fact was last mentioned.
    """
    rng = random.Random(seed)
    chosen: Language = rng.choice(("en", "zh")) if language == "mixed" else language
    made = _Dialogue(rng, turns, chosen)
    made.build()
    return {
        "messages": made.messages,
        "answers": made.answers,
        "language": chosen,
        "domain": made.domain.name,
    }


def dialogues(seed: int, count: int, turns: int, language: LanguageChoice = "mixed") -> list[dict[str, Any]]:
    """`count` dialogues of `turns` exchanges each; the same arguments always give the same text."""
    if count < 1 or turns < 1:
        raise ValueError(f"count and turns must be at least 1, got count={count}, turns={turns}")
    if language not in ("en", "zh", "mixed"):
        raise ValueError(f"language must be en, zh or mixed, got {language!r}")
    return [dialogue(seed + index, turns, language) for index in range(count)]


def export_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one dialogue a line, keys in a fixed order, so equal seeds give equal bytes."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def calibration_dialogues(count: int = 128, turns: int = 100) -> list[dict[str, Any]]:
    """The default calibration corpus: never shares a seed with training or evaluation."""
    return dialogues(CALIBRATION_SEED, count, turns)


def evaluation_dialogues(count: int = 16, turns: int = 200) -> list[dict[str, Any]]:
    """The default held-out corpus: never shares a seed with training or calibration."""
    return dialogues(EVALUATION_SEED, count, turns)


def texts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Every message on its own, for training the tokenizer."""
    for row in rows:
        messages: list[Mapping[str, str]] = row["messages"]
        for message in messages:
            yield message["content"]
