"""Free-running drift: the same user turns, but each model answers by itself and lives with its own answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from glm5_quant.eval.critical import CriticalWords
from glm5_quant.eval.dialogue import Dialogue, Piece, Renderer, Segment
from glm5_quant.eval.drift import Reader, measure_drift
from glm5_quant.eval.generate import Answer, answer, ending_of
from glm5_quant.eval.numbers import compare_numbers, find_numbers, same_numbers
from glm5_quant.eval.result import FreeRunningResult, Sample
from glm5_quant.eval.score import Marker
from glm5_quant.eval.statistics import Estimate, estimate
from glm5_quant.eval.tally import COLUMN


@dataclass
class Transcript:
    """What one model said in one dialogue: answer ids and texts by turn, and the pieces as they went into the
    context."""

    answers: list[Answer] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


def converse(
    reader: Reader, dialogue: Dialogue, renderer: Renderer, *, limit: int | None, max_new_tokens: int
) -> Transcript:
    """Let a model answer every user turn greedily. When the context is full (`limit` tokens), the oldest turns are
    dropped until half of it is left, as in the teacher-forced measurement."""
    ending = ending_of(renderer, getattr(reader.runner, "config", None))
    closing = ending.closing
    made, cache, pending = Transcript(), reader.new_cache(), list[int]()
    for turn, asked in enumerate(renderer.pieces(dialogue)[::2]):
        room = len(asked.ids) + len(pending) + max_new_tokens + len(closing)
        if limit is not None and cache.get_seq_length() + room > limit:
            cache, pending = reader.new_cache(), _recent(made.pieces, renderer, dialogue, limit // 2 - room)
            if not pending:
                asked = renderer.pieces(dialogue, turn, turn + 1)[0]
        found = answer(reader, cache, [*pending, *asked.ids], ending.stops, max_new_tokens)
        # A cut answer's last token has not been read yet; closing ids stand in for the stop token. Both wait for the
        # next turn.
        pending = [*(() if found.ended else found.ids[-1:]), *closing]
        text = renderer.tokenizer.decode(list(found.ids), skip_special_tokens=False)
        made.answers.append(found)
        made.texts.append(text)
        made.pieces += [asked, Piece(ids=(*found.ids, *closing), text=text, turn=turn, is_answer=True)]
    return made


def _recent(pieces: Sequence[Piece], renderer: Renderer, dialogue: Dialogue, room: int) -> list[int]:
    """Ids of the newest whole turns that fit, the first of them asked as a dialogue's first turn is."""
    kept: list[tuple[Piece, Piece]] = []
    for asked, said in zip(pieces[-2::-2], pieces[-1::-2], strict=True):
        room -= len(asked.ids) + len(said.ids)
        if room < 0:
            break
        kept.insert(0, (asked, said))
    if not kept:
        return []
    oldest = kept[0][0].turn
    first = renderer.pieces(dialogue, oldest, oldest + 1)[0]
    later = [token for turn in kept[1:] for piece in turn for token in piece.ids]
    return [*first.ids, *kept[0][1].ids, *later]


def first_divergence(one: Transcript, other: Transcript) -> int | None:
    """Turn (from 1) of the first answer that is not the same token by token; None where all are."""
    for turn, (first, second) in enumerate(zip(one.answers, other.answers, strict=True)):
        if first != second:
            return turn + 1
    return None


def survival(divergences: Sequence[int | None], turns: int) -> tuple[float, ...]:
    """Share of dialogues whose answers are all the same through turn 1, 2, ..., N."""
    firsts = np.array([turns + 1 if turn is None else turn for turn in divergences])
    return tuple(float((firsts > turn).mean()) for turn in range(1, turns + 1))


def repetition(transcripts: Sequence[Transcript]) -> float | None:
    """Share of 4-token runs inside an answer that already stood in the same answer."""
    total = fresh = 0
    for transcript in transcripts:
        for found in transcript.answers:
            runs = [found.ids[start : start + 4] for start in range(len(found.ids) - 3)]
            total += len(runs)
            fresh += len(set(runs))
    return 1 - fresh / total if total else None


def own_nll(
    source: Reader, transcripts: Sequence[Transcript], turns: int, limit: int | None, chunk: int
) -> float | None:
    """Mean NLL per token that the source gives to the answers of a model (first `limit` tokens of each dialogue)."""
    dialogues = []
    for transcript in transcripts:
        size, kept = 0, list[Piece]()
        for piece in transcript.pieces:
            size += len(piece.ids)
            if limit is not None and size > limit:
                break
            kept.append(piece)
        dialogues.append([Segment(pieces=tuple(kept), first_scored_turn=0)])
    base, _ = measure_drift(source, [], dialogues, turns, Marker(None), chunk=chunk)
    total = np.stack(base.by_turn).sum(axis=(0, 1))
    tokens = total[COLUMN["tokens"]]
    return float(total[COLUMN["nll_source"]] / tokens) if tokens and base.invalid is None else None


def number_match(dialogues: Sequence[Dialogue], transcripts: Sequence[Transcript], draws: int, seed: int) -> Estimate:
    """Share of answers with numbers in the reference in which exactly those numbers are said, resampled by dialogue."""
    sums = np.zeros((len(dialogues), 2))
    for row, (dialogue, transcript) in enumerate(zip(dialogues, transcripts, strict=True)):
        for turn, text in zip(dialogue.turns, transcript.texts, strict=True):
            wanted = find_numbers(turn.answer)
            if wanted:
                sums[row] += (1, same_numbers(wanted, find_numbers(text)))
    return estimate(sums, lambda totals: np.asarray(totals[:, 1] / totals[:, 0]), draws=draws, seed=seed)


def misreads(dialogues: Sequence[Dialogue], transcripts: Sequence[Transcript]) -> dict[str, int]:
    """Kinds of misreading over all answers, `equal` among them."""
    counts: dict[str, int] = {}
    for dialogue, transcript in zip(dialogues, transcripts, strict=True):
        for turn, text in zip(dialogue.turns, transcript.texts, strict=True):
            for kind, times in compare_numbers(find_numbers(turn.answer), find_numbers(text)).items():
                counts[kind] = counts.get(kind, 0) + times
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def critical_match(
    dialogues: Sequence[Dialogue], transcripts: Sequence[Transcript], words: CriticalWords | None
) -> float | None:
    """Share of answers with critical words in the reference that hold the same critical words in the same order."""
    if words is None:
        return None
    hits = [
        words.find(turn.answer) == words.find(text)
        for dialogue, transcript in zip(dialogues, transcripts, strict=True)
        for turn, text in zip(dialogue.turns, transcript.texts, strict=True)
        if words.find(turn.answer)
    ]
    return sum(hits) / len(hits) if hits else None


def compare_transcripts(
    dialogues: Sequence[Dialogue],
    base: Sequence[Transcript],
    other: Sequence[Transcript],
    *,
    words: CriticalWords | None,
    nll: Callable[[Sequence[Transcript]], float | None],
    draws: int,
    seed: int,
) -> FreeRunningResult:
    """All free-running figures of one export against the source."""
    turns = max(len(dialogue.turns) for dialogue in dialogues)
    divergences = tuple(first_divergence(one, two) for one, two in zip(base, other, strict=True))
    return FreeRunningResult(
        dialogues=len(dialogues),
        answers=sum(len(transcript.answers) for transcript in other),
        first_divergence_turn=divergences,
        survival=survival(divergences, turns),
        source_nll_of_own=nll(base),
        source_nll_of_export=nll(other),
        source_repetition=repetition(base),
        repetition=repetition(other),
        source_number_match=number_match(dialogues, base, draws, seed),
        number_match=number_match(dialogues, other, draws, seed),
        source_misreads=misreads(dialogues, base),
        misreads=misreads(dialogues, other),
        source_critical_match=critical_match(dialogues, base, words),
        critical_match=critical_match(dialogues, other, words),
        samples=tuple(_samples(dialogues, base, other, divergences)),
    )


def _samples(
    dialogues: Sequence[Dialogue],
    base: Sequence[Transcript],
    other: Sequence[Transcript],
    divergences: Sequence[int | None],
) -> list[Sample]:
    found = list[Sample]()
    for index, turn in enumerate(divergences):
        if turn is not None and len(found) < 5:
            at = turn - 1
            wanted = dialogues[index].turns[at]
            texts = base[index].texts[at], other[index].texts[at]
            found.append(
                Sample(
                    dialogue=index, turn=turn, user=wanted.user, wanted=wanted.answer, source=texts[0], export=texts[1]
                )
            )
    return found
