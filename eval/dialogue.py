"""Dialogues of a wanted number of turns, and their token pieces as a server would build them.

A turn is one user message with the assistant's answer. A piece is what a server appends to the context at once: the
user's message up to where the answer begins, or the answer with what closes it. Pieces are encoded one by one, as in
serving, where earlier tokens are never encoded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_quant.eval.documents import language_of
from glm5_quant.eval.prefix import Prefix, encode
from glm5_quant.model.errors import UserError

JOIN_RULE = (
    "longer dialogues are cut after the last wanted turn; shorter ones of the same file and language are joined "
    "in order; a rest that stays too short is left out"
)


DROPPING = "chat template, without the thinking that it drops from all but the last answer"
"""Style of templates such as Qwen3's."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One user message and its answer."""

    user: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """A dialogue of whole turns; `parts` counts the dialogues it was joined from."""

    turns: tuple[Turn, ...]
    system: str = ""
    file: str = ""
    language: str = ""
    parts: int = 1


def words_of(message: Mapping[str, Any]) -> str:
    """The content of a message; "" where it has none, as a call of a tool."""
    content = message["content"]
    return "" if content is None else str(content)


def turns_of(messages: Iterable[Mapping[str, Any]]) -> tuple[str, tuple[Turn, ...]]:
    """System text and turns of chat messages. Neighbours of one role are joined by a newline; an answer before the
    first question and a question without an answer are dropped."""
    system, spoken = "", list[tuple[str, str]]()
    for message in messages:
        role, content = str(message["role"]), words_of(message)
        if role == "system":
            system = content
        elif role in ("user", "assistant"):
            if spoken and spoken[-1][0] == role:
                content = spoken.pop()[1] + "\n" + content
            spoken.append((role, content))
    if spoken and spoken[0][0] == "assistant":
        spoken = spoken[1:]
    pairs = zip(spoken[::2], spoken[1::2], strict=False)
    return system, tuple(Turn(user=user, answer=answer) for (_, user), (_, answer) in pairs)


def as_dialogue(row: Any) -> Dialogue | None:
    """A dialogue from a `Dialogue`, a row with `messages`, a mapping with `messages`, or a list of messages."""
    if isinstance(row, Dialogue):
        return row
    found = row.get("messages") if isinstance(row, Mapping) else getattr(row, "messages", row)
    if not found or isinstance(found, str):
        return None
    system, turns = turns_of(found)
    if not turns:
        return None
    named = row.get("language", "") if isinstance(row, Mapping) else getattr(row, "language", "")
    language = named or language_of(" ".join(turn.answer for turn in turns[:8]))
    return Dialogue(turns=turns, system=system, file=Path(str(getattr(row, "file", ""))).name, language=language)


def fit(dialogues: Iterable[Dialogue], wanted: int, limit: int | None = None) -> tuple[list[Dialogue], int]:
    """Dialogues of exactly `wanted` turns by JOIN_RULE, at most `limit`; and how many short ones were left out."""
    made: list[Dialogue] = []
    waiting: dict[tuple[str, str], list[Dialogue]] = {}
    for dialogue in dialogues:
        if limit is not None and len(made) >= limit:
            break
        group = waiting.setdefault((dialogue.file, dialogue.language), [])
        group.append(dialogue)
        if sum(len(part.turns) for part in group) >= wanted:
            made.append(_join(group, wanted))
            group.clear()
    return made, sum(len(group) for group in waiting.values())


def _join(parts: Sequence[Dialogue], wanted: int) -> Dialogue:
    turns = tuple(turn for part in parts for turn in part.turns)[:wanted]
    first = parts[0]
    return Dialogue(turns=turns, system=first.system, file=first.file, language=first.language, parts=len(parts))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Token ids appended to the context at once, with their text; `turn` counts from 0."""

    ids: tuple[int, ...]
    text: str
    turn: int
    is_answer: bool


class Renderer:
    """Pieces of dialogues by the tokenizer's chat template, or in a plain form where it has none.

    State: the tokenizer, the prefix, and `style`: "plain", "chat template", or DROPPING once that is found out.
    """

    def __init__(self, tokenizer: Any, prefix: Prefix) -> None:
        self.tokenizer, self.prefix = tokenizer, prefix
        self.style = "chat template" if getattr(tokenizer, "chat_template", None) else "plain"

    def pieces(self, dialogue: Dialogue, start: int = 0, stop: int | None = None) -> list[Piece]:
        """User and answer pieces of turns `start` to `stop`, as if the dialogue began there (its system text is kept).

        The first piece carries the prefix. Raises UserError when the template rewrites what it has written before,
        since such a dialogue cannot be continued token by token. Thinking that it drops from earlier answers is no such
        rewriting: all answers are then written without it.
        """
        turns = dialogue.turns[start:stop]
        write = self._plain_texts if self.style == "plain" else self._template_texts
        texts = write(dialogue.system, turns)
        made = []
        for number, text in enumerate(texts):
            ids = encode(self.tokenizer, text)
            if number == 0:
                ids = [*self.prefix.ids, *self.prefix.strip(ids)]
            made.append(Piece(ids=tuple(ids), text=text, turn=start + number // 2, is_answer=number % 2 == 1))
        return made

    def _plain_texts(self, system: str, turns: Sequence[Turn]) -> list[str]:
        texts: list[str] = []
        for turn in turns:
            system = f"{system}\n" if system and not texts else ""
            texts += [f"{system}User: {turn.user}\nAssistant:", f" {turn.answer}\n"]
        return texts

    def _template_texts(self, system: str, turns: Sequence[Turn]) -> list[str]:
        messages = [{"role": "system", "content": system}] if system else []
        texts, before, shorter = list[str](), "", ""
        for turn in turns:
            messages.append({"role": "user", "content": turn.user})
            asked = self._render(messages, True)
            if shorter and asked.startswith(before + shorter) and not asked.startswith(before + texts[-1]):
                self.style, texts[-1] = DROPPING, shorter
            before += texts[-1] if texts else ""
            messages.append({"role": "assistant", "content": turn.answer})
            answered = self._render(messages, False)
            if not (asked.startswith(before) and answered.startswith(asked)):
                raise UserError(
                    "the chat template changes what it wrote for earlier turns",
                    item=f"turn {len(texts) // 2 + 1}",
                    hint="Drift cannot be measured with such a template; use a tokenizer without it for a plain form.",
                )
            said = answered[len(asked) :]
            texts += [asked[len(before) :], said]
            before, shorter = asked, _without_thinking(said, turn.answer)
        if self.style == DROPPING and shorter:
            texts[-1] = shorter
        return texts

    def _render(self, messages: list[dict[str, str]], prompt: bool) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
        except Exception as error:  # a template is a program: it may raise anything
            hint = "Some templates know no system messages: leave those out of the data."
            raise UserError("the chat template refuses these messages", found=str(error), hint=hint) from error


def _without_thinking(said: str, answer: str) -> str:
    """What stays of a written answer when the template drops what it writes before the words; "" where none are."""
    words = answer.rpartition("</think>")[2].strip()
    at = said.rfind(words) if words else -1
    return "" if at < 0 else said[at:]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a dialogue that fits the context: pieces from some turn on, scored from `first_scored_turn` on."""

    pieces: tuple[Piece, ...]
    first_scored_turn: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole stretch."""
        return sum(len(piece.ids) for piece in self.pieces)


def context_policy(limit: int | None) -> str:
    """The context policy in words."""
    if limit is None:
        return "full: every turn sees all earlier ones"
    return (
        f"full up to {limit} tokens; where a dialogue is longer, the oldest turns are dropped until the rest fills "
        "at most half of that, and the dialogue goes on from there"
    )


def segments(renderer: Renderer, dialogue: Dialogue, limit: int | None) -> list[Segment]:
    """A dialogue as stretches of at most `limit` tokens; [] when one turn alone is longer than half of it."""
    start, scored, made = 0, 0, list[Segment]()
    stop = None if limit is None or len(dialogue.turns) <= 16 else 16
    while scored < len(dialogue.turns):
        pieces = renderer.pieces(dialogue, start, stop)
        sizes = [len(asked.ids) + len(said.ids) for asked, said in zip(pieces[::2], pieces[1::2], strict=True)]
        end = _fits(sizes, limit)
        if end == len(sizes) and start + end < len(dialogue.turns):
            # All rendered turns fit and more are waiting: render twice as many rather than all of a long dialogue.
            stop = start + 2 * len(sizes)
            continue
        if limit is not None and (start + end <= scored or max(sizes) > limit // 2):
            return []
        made.append(Segment(pieces=tuple(pieces[: 2 * end]), first_scored_turn=scored))
        scored = start + end
        kept = _fits(sizes[end - 1 :: -1], None if limit is None else limit // 2)
        start = scored - min(kept, end - 1)
        stop = None if limit is None else start + end + 2
    return made


def _fits(sizes: Sequence[int], limit: int | None) -> int:
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if limit is not None and total > limit:
            return count
    return len(sizes)
