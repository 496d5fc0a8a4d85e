from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support_models import byte_tokenizer
from support_stubs import Bigram, CharTokenizer, random_bigram, uniform

from glm5_quant.eval import evaluate, to_html, to_table
from glm5_quant.eval.critical import CriticalWords
from glm5_quant.eval.dialogue import Dialogue, Renderer, Turn, as_dialogue, fit, segments, turns_of
from glm5_quant.eval.drift import Drift, Reader, lay_out, measure_drift
from glm5_quant.eval.growth import band, marks, summarize_drift
from glm5_quant.eval.prefix import find_prefix
from glm5_quant.eval.runner import PlainCache, Runner
from glm5_quant.eval.score import Marker
from glm5_quant.eval.tally import COLUMN, FIELDS
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import load_tokenizer


class ChatTokenizer(CharTokenizer):
    """A template in the manner of GLM: the next message's mark closes an answer."""

    def __init__(self) -> None:
        super().__init__(special=["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"])
        self.chat_template = "glm"

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        text = "[gMASK]<sop>" + "".join(f"<|{m['role']}|>{m['content']}" for m in messages)
        return text + ("<|assistant|>" if add_generation_prompt else "")


def talk(count: int, file: str = "", words: str = "ok") -> Dialogue:
    return Dialogue(turns=tuple(Turn(user=f"ask {i}", answer=f"{words} {i}") for i in range(count)), file=file)


def messages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_neighbours_of_one_role_are_joined_and_unanswered_ends_dropped() -> None:
    spoken = messages(
        ("system", "be brief"),
        ("assistant", "welcome"),
        ("user", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("user", "d"),
    )
    assert turns_of(spoken) == ("be brief", (Turn(user="a\nb", answer="c"),))
    assert as_dialogue({"messages": spoken, "language": "de"}).language == "de"
    assert as_dialogue({"messages": []}) is None
    assert as_dialogue("no messages") is None


def test_longer_dialogues_are_cut_and_shorter_ones_of_one_file_joined_in_order() -> None:
    found, left = fit([talk(3, "a"), talk(7, "b"), talk(1, "a"), talk(2, "a"), talk(4, "c")], 5)
    assert [(len(d.turns), d.file, d.parts) for d in found] == [(5, "b", 1), (5, "a", 3)]
    assert [turn.user for turn in found[1].turns] == ["ask 0", "ask 1", "ask 2", "ask 0", "ask 0"]
    assert left == 1
    assert len(fit([talk(5), talk(5), talk(5)], 5, limit=2)[0]) == 2


@pytest.mark.parametrize("tokenizer", [ChatTokenizer(), CharTokenizer(bos="<s>")])
def test_pieces_put_together_are_the_whole_rendering(tokenizer: CharTokenizer) -> None:
    renderer = Renderer(tokenizer, find_prefix(tokenizer))
    dialogue = Dialogue(turns=talk(3).turns, system="be brief")
    pieces = renderer.pieces(dialogue)
    ids = [token for piece in pieces for token in piece.ids]
    text = "".join(piece.text for piece in pieces)
    assert [piece.is_answer for piece in pieces] == [False, True] * 3
    assert [piece.turn for piece in pieces] == [0, 0, 1, 1, 2, 2]
    assert "be brief" in text
    if renderer.style == "chat template":
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids).count("[gMASK]<sop>") == 1
    else:
        assert ids[0] == tokenizer.bos_token_id
        assert ids[1:] == tokenizer.encode(text, add_special_tokens=False)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    class Rewriting(ChatTokenizer):
        def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):  # type: ignore[no-untyped-def]
            return f"{len(messages)} messages"

    renderer = Renderer(Rewriting(), find_prefix(Rewriting()))
    with pytest.raises(UserError, match="changes what it wrote"):
        renderer.pieces(talk(2))


class ThinkingTokenizer(ChatTokenizer):
    """A template in the manner of Qwen3: the last answer begins with thinking, earlier ones are written without."""

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):  # type: ignore[no-untyped-def]
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        text = "[gMASK]<sop>"
        for number, message in enumerate(messages):
            thought, _, words = message["content"].rpartition("</think>")
            text += f"<|{message['role']}|>"
            if message["role"] == "assistant" and number > last:
                text += f"<think>{thought.removeprefix('<think>')}</think>"
            text += words.strip() + "."
        return text + ("<|assistant|>" if add_generation_prompt else "")


def test_a_template_that_drops_the_thinking_of_earlier_answers_is_followed_without_it() -> None:
    tokenizer = ThinkingTokenizer()
    renderer = Renderer(tokenizer, find_prefix(tokenizer))
    turns = (Turn(user="a", answer="<think>hm</think> yes"), Turn(user="b", answer="no"), Turn(user="c", answer="ok"))
    texts = [piece.text for piece in renderer.pieces(Dialogue(turns=turns))]
    assert texts == [
        *("[gMASK]<sop><|user|>a.<|assistant|>", "yes.", "<|user|>b.<|assistant|>", "no."),
        *("<|user|>c.<|assistant|>", "ok."),
    ]
    assert "without the thinking" in renderer.style
    assert texts[0] + texts[1] + texts[2] == tokenizer.apply_chat_template(
        [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", turns[0].answer), ("user", "b"))],
        add_generation_prompt=True,
    )
    plain = Renderer(ChatTokenizer(), find_prefix(ChatTokenizer()))
    plain.pieces(talk(3))
    assert plain.style == "chat template"


def test_a_template_that_knows_no_system_role_is_named_with_what_it_said() -> None:
    class Refusing(ChatTokenizer):
        def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=False):  # type: ignore[no-untyped-def]
            if messages[0]["role"] == "system":
                raise ValueError("System role not supported")
            return super().apply_chat_template(messages, tokenize, add_generation_prompt)

    tokenizer = Refusing()
    model = uniform(len(tokenizer))
    rows = [{"messages": messages(("system", "s"), ("user", "u"), ("assistant", "a"))}] * 2
    refusal = "the chat template refuses these messages; found System role not supported"
    with pytest.raises(UserError, match=f"{refusal}.*leave those out"):
        evaluate(model, [], dialogues=rows, long_dialogue=1, tokenizer=tokenizer)
    with pytest.raises(UserError, match=refusal):
        evaluate(model, [], rows, tokenizer=tokenizer)
    assert model.calls == 0


def test_a_message_without_content_is_empty_and_not_the_word_none() -> None:
    spoken = [{"role": "user", "content": "u"}, {"role": "assistant", "content": None}]
    assert turns_of(spoken) == ("", (Turn(user="u", answer=""),))


@pytest.mark.parametrize("limit", [None, 1000, 120, 90])
def test_every_turn_is_scored_once_in_segments_that_fit_the_context(limit: int | None) -> None:
    tokenizer = ChatTokenizer()
    renderer = Renderer(tokenizer, find_prefix(tokenizer))
    found = segments(renderer, talk(40), limit)
    scored = [
        piece.turn
        for segment in found
        for piece in segment.pieces
        if piece.is_answer and piece.turn >= segment.first_scored_turn
    ]
    assert scored == list(range(40))
    assert all(limit is None or segment.tokens <= limit for segment in found)
    assert (len(found) == 1) == (limit is None or limit == 1000)
    for segment in found[1:]:
        kept = sum(len(p.ids) for p in segment.pieces if p.turn < segment.first_scored_turn)
        assert limit is not None and 0 < kept <= limit // 2 + 20
        assert segment.pieces[0].text.startswith("[gMASK]<sop>")


def test_a_dialogue_whose_turn_fills_half_the_context_is_left_out() -> None:
    tokenizer = ChatTokenizer()
    assert segments(Renderer(tokenizer, find_prefix(tokenizer)), talk(4, words="x" * 60), 80) == []


def read(model: Bigram, tokenizer: CharTokenizer, dialogues: list[Dialogue], chunk: int, source: Bigram) -> Drift:
    renderer = Renderer(tokenizer, find_prefix(tokenizer))
    parts = [segments(renderer, dialogue, None) for dialogue in dialogues]
    readers = [Reader(name=str(i), runner=Runner(m), new_cache=PlainCache) for i, m in enumerate((source, model))]
    marker = Marker(np.array([text.isdigit() for text in tokenizer.vocabulary]))
    return measure_drift(readers[0], readers[1:], parts, len(dialogues[0].turns), marker, chunk=chunk)[1][0]


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_drift_by_turn_equals_sums_made_by_hand_in_every_chunk_size(chunk: int) -> None:
    tokenizer = ChatTokenizer()
    size = len(tokenizer)
    source, export = random_bigram(0, size), random_bigram(1, size)
    dialogues = [talk(4), talk(4, words="fine 12")]
    drift = read(export, tokenizer, dialogues, chunk, source)
    for index, dialogue in enumerate(dialogues):
        ids = [piece.ids for piece in Renderer(tokenizer, find_prefix(tokenizer)).pieces(dialogue)]
        for turn in range(4):
            pairs = list(zip([ids[2 * turn][-1], *ids[2 * turn + 1][:-1]], ids[2 * turn + 1], strict=True))
            found = drift.by_turn[index][turn]
            assert found[COLUMN["tokens"]] == len(pairs)
            assert found[COLUMN["nll"]] == pytest.approx(-sum(float(export.log_table[p]) for p in pairs), rel=1e-6)
            p, q = source.log_table, export.log_table
            kl = sum(float((p[a].exp() * (p[a] - q[a])).sum()) for a, _ in pairs)
            assert found[COLUMN["kl"]] == pytest.approx(kl, rel=1e-5)
            digits = sum(tokenizer.texts[token].isdigit() for _, token in pairs)
            assert drift.numeric_by_turn[index][turn][COLUMN["tokens"]] == digits


def test_only_answers_are_scored_and_critical_words_are_marked(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer()
    segment = segments(Renderer(tokenizer, find_prefix(tokenizer)), talk(2), None)[0]
    track = lay_out(segment)
    text = "".join(tokenizer.texts[token] for token in track.ids[track.scored])
    assert text == "ok 0ok 1"
    assert not track.critical.any()
    byte_tokenizer(tmp_path)
    fast = load_tokenizer(tmp_path)
    dialogue = Dialogue(turns=(Turn(user="not ok?", answer="ok, not now"), Turn(user="no?", answer="余额不足")))
    segment = segments(Renderer(fast, find_prefix(fast)), dialogue, None)[0]
    track = lay_out(segment, fast, CriticalWords(["not", "no", "不"]))
    assert bytes(track.ids[track.critical].tolist()).decode() == "not不"
    assert track.turn[track.critical].tolist() == [0] * 3 + [1] * 3
    # What an earlier segment scored is neither scored nor marked again.
    again = lay_out(replace(segment, first_scored_turn=1), fast, CriticalWords(["not", "no", "不"]))
    assert bytes(again.ids[again.critical].tolist()).decode() == "不"
    assert set(again.turn[again.scored].tolist()) == {1}


def planted(turns: int, dialogues: int, step: float) -> Drift:
    """Ten tokens a turn; the export's NLL exceeds the source's by `step` times the turn."""
    drift = Drift("planted", turns)
    generator = np.random.default_rng(0)
    for _ in range(dialogues):
        drift.begin()
        rows = drift.by_turn[-1]
        base = generator.normal(2.0, 0.1, size=turns)
        rows[:, COLUMN["tokens"]] = 10
        rows[:, COLUMN["nll_source"]] = 10 * base
        rows[:, COLUMN["nll"]] = 10 * (base + step * np.arange(turns))
        slices = {"all": None, "numeric": np.zeros(1, dtype=bool)}
        drift.tally.add((len(drift.by_turn) - 1, 0), rows.sum(axis=0, keepdims=True), slices)
    return drift


def test_a_planted_slope_is_recovered_as_slope_ratio_and_growth() -> None:
    found = summarize_drift(planted(200, 6, 0.001), 500, 0, 0.01)
    assert found.slope_per_100_turns.value == pytest.approx(0.1, rel=1e-9)
    assert found.slope_per_100_turns.low == pytest.approx(0.1, rel=1e-6)
    assert list(found.ratio_at) == ["1", "50", "100", "200"]
    assert found.ratio_at["1"].value == pytest.approx(math.exp(0.001 * 4.5))
    assert found.ratio_at["200"].value == pytest.approx(math.exp(0.001 * 194.5))
    assert found.relative_growth.value == pytest.approx(math.exp(0.001 * 180) - 1)
    assert found.growth.value == pytest.approx((1 + found.source_growth.value) * math.exp(0.18) - 1)
    assert found.points[9].ratio.value == pytest.approx(math.exp(0.009))
    assert found.equivalence.verdict == "different"
    assert len(FIELDS) == planted(3, 1, 0).by_turn[0].shape[1]


def test_points_are_means_over_the_tokens_of_their_turn() -> None:
    drift = Drift("by hand", 2)
    columns = [COLUMN[name] for name in ("tokens", "nll_source", "nll", "kl", "flips")]
    for tokens, numbers in ((10.0, 3.0), (30.0, 1.0)):
        drift.begin()
        drift.by_turn[-1][1, columns] = [tokens, 1.5 * tokens, 2.0 * tokens, 0.25 * tokens, 2.0]
        drift.numeric_by_turn[-1][1, columns] = [numbers, 0.0, 0.0, 0.0, 1.0]
        slices = {"all": None, "numeric": np.zeros(1, dtype=bool)}
        drift.tally.add((len(drift.by_turn) - 1, 0), drift.by_turn[-1][1:], slices)
    empty, found = summarize_drift(drift, 20, 0, 0.01).points
    assert (empty.turn, empty.tokens, empty.nll, empty.numeric_flips) == (1, 0, None, None)
    assert (found.turn, found.tokens, found.source_nll, found.nll, found.kl) == (2, 40, 1.5, 2.0, 0.25)
    assert (found.flips, found.numeric_tokens, found.numeric_flips) == (0.1, 4, 0.5)
    assert found.ratio.value == pytest.approx(math.exp(0.5))


def test_sums_by_dialogue_give_the_same_growth_again_from_the_report_alone() -> None:
    found = summarize_drift(planted(200, 6, 0.001), 50, 0, 0.01)
    assert found.sums is not None and found.sums.fields == FIELDS
    first, last, whole = (np.array(part) for part in (found.sums.first, found.sums.last, found.sums.whole))
    assert first.shape == (6, len(FIELDS)) and whole[:, COLUMN["tokens"]].tolist() == [2000.0] * 6
    means = [part[:, COLUMN["nll"]].sum() / part[:, COLUMN["tokens"]].sum() for part in (first, last)]
    assert math.exp(means[1] - means[0]) - 1 == pytest.approx(found.growth.value, rel=1e-12)
    assert np.array(found.sums.numeric).sum() == 0


def test_no_planted_slope_gives_zero_growth_and_equivalence() -> None:
    found = summarize_drift(planted(200, 6, 0.0), 500, 0, 0.01)
    assert found.relative_growth.value == 0
    assert found.equivalence.verdict == "equivalent"
    assert marks(3) == (1, 3) and band(1, 3) == slice(0, 1)


def test_dialogues_of_the_wanted_length_are_measured_by_one_call() -> None:
    tokenizer = ChatTokenizer()
    source, export = random_bigram(0, len(tokenizer)), random_bigram(1, len(tokenizer))
    rows = [{"messages": messages(*(("user", f"u {i}"), ("assistant", f"a {i}")))} for i in range(30)]
    result = evaluate(source, [export, source], dialogues=rows, long_dialogue=5, num_dialogues=4, tokenizer=tokenizer)
    first, clean = result.exports
    assert first.dialogue is not None and clean.dialogue is not None
    assert (first.dialogue.turns, first.dialogue.dialogues) == (5, 4)
    assert clean.dialogue.relative_growth.value == 0
    assert clean.equivalence.verdict == "equivalent"
    assert first.dialogue.slices[0].kl.value > 0.1
    assert result.source_dialogue.ratio_at["1"].value == 1
    assert result.settings.scored == "answers of dialogues"
    assert "language:en" in [part.name for part in first.slices]
    assert any("short context" in note for note in result.notes)
    assert "joined" in result.settings.dialogue_rule and "full" in result.settings.context_policy


def test_dialogues_too_cost_one_pass_of_the_source_and_one_of_each_export() -> None:
    tokenizer = ChatTokenizer()
    models = [random_bigram(seed, len(tokenizer)) for seed in range(4)]
    rows = [{"messages": messages(*(("user", f"u {i}"), ("assistant", f"a {i}")))} for i in range(20)]
    settings: dict[str, Any] = {"long_dialogue": 5, "num_dialogues": 4, "tokenizer": tokenizer, "diagnose": 0}
    alone = evaluate(models[0], [], dialogues=rows, draws=20, **settings)
    result = evaluate(models[0], models[1:], dialogues=rows, draws=20, **settings)
    assert alone.forward_tokens == result.forward_tokens > 0
    assert [export.forward_tokens for export in result.exports] == [alone.forward_tokens] * 3


def test_what_the_source_said_by_itself_is_read_once_however_many_exports_there_are() -> None:
    tokenizer = ChatTokenizer()
    models = [random_bigram(seed, len(tokenizer)) for seed in range(2)]
    rows = [{"messages": messages(*[("user", "u"), ("assistant", "a 1")] * 5)}] * 2
    settings: dict[str, Any] = {"dialogues": rows, "long_dialogue": 5, "tokenizer": tokenizer, "free_running": True}
    settings |= {"diagnose": 0, "draws": 20, "max_new_tokens": 6}
    tokens = []
    for count in (1, 2, 3):
        names = [str(index) for index in range(count)]
        tokens.append(evaluate(models[0], models[1:2] * count, names=names, **settings).forward_tokens)
    # Two dialogues of 5 turns: prefix 2, three tokens a question, six an answer, and the last of them predicts nothing.
    assert [tokens[1] - tokens[0], tokens[2] - tokens[1]] == [2 * (2 + 5 * 9 - 1)] * 2


def test_dialogues_that_nobody_answers_are_counted_and_intervals_are_said_to_be_over_dialogues() -> None:
    tokenizer = ChatTokenizer()
    model = uniform(len(tokenizer))
    good = {"messages": messages(("user", "a"), ("assistant", "b"))}
    other = {"messages": messages(("user", "a"), ("model", "b"))}
    found = evaluate(model, [], dialogues=[good, other, good], long_dialogue=1, tokenizer=tokenizer, draws=20)
    assert "1 of 3 dialogues hold no user's turn with an answer" in found.notes
    assert "interval over dialogues" in to_table(found)


def test_fewer_turns_than_wanted_are_measured_and_said() -> None:
    tokenizer = ChatTokenizer()
    model = uniform(len(tokenizer))
    result = evaluate(
        model,
        [model],
        dialogues=[{"messages": messages(("user", "a"), ("assistant", "b"))}] * 3,
        long_dialogue=5,
        tokenizer=tokenizer,
    )
    assert result.exports[0].dialogue.turns == 1
    assert any("no dialogue reaches 5 turns" in note for note in result.notes)
    with pytest.raises(UserError, match="no dialogues"):
        evaluate(model, [model], dialogues=["text"], long_dialogue=5, tokenizer=tokenizer)
    with pytest.raises(UserError, match="need a tokenizer"):
        evaluate(model, [model], dialogues=[], long_dialogue=5)


def test_nan_in_a_dialogue_is_named_by_turn() -> None:
    tokenizer = ChatTokenizer()
    source = random_bigram(0, len(tokenizer))
    table = source.log_table.clone()
    table[tokenizer.get_vocab()["7"]] = float("nan")
    rows = [{"messages": [m for i in range(9) for m in messages(("user", "u"), ("assistant", f"a{i}b"))]}]
    result = evaluate(source, [Bigram(table)], dialogues=rows, long_dialogue=9, tokenizer=tokenizer)
    assert result.status == "invalid"
    assert result.exports[0].invalid.file == "turn 8"
    broken = evaluate(Bigram(table), [source], dialogues=rows, long_dialogue=9, tokenizer=tokenizer)
    assert broken.invalid.file == "turn 8"


def test_free_running_models_are_compared_by_token_and_by_what_they_say() -> None:
    tokenizer = ChatTokenizer()
    size, vocabulary = len(tokenizer), tokenizer.get_vocab()

    def chain(text: str, wrong: str = "") -> Bigram:
        """Answers `text` to everything: each character is followed by the next, the last by the user mark."""
        logits = torch.zeros(size, size)
        steps = ["<|assistant|>", *text, "<|user|>"]
        for one, other in itertools.pairwise(steps):
            logits[vocabulary[one], vocabulary[other]] = 20.0
        if wrong:
            logits[vocabulary["="], vocabulary[wrong]] = 30.0
        return Bigram(logits)

    rows = [{"messages": messages(*[("user", "q"), ("assistant", "x=5")] * 6)} for _ in range(3)]
    options = {"long_dialogue": 6, "tokenizer": tokenizer, "free_running": True, "critical_words": "default"}
    result = evaluate(chain("x=5"), [chain("x=5"), chain("x=5", wrong="7")], dialogues=rows, **options)
    same, other = (export.free_running for export in result.exports)
    assert same.first_divergence_turn == (None, None, None)
    assert same.survival == (1.0,) * 6
    assert same.number_match.value == 1
    assert other.first_divergence_turn == (1, 1, 1)
    assert other.survival == (0.0,) * 6
    assert other.number_match.value == 0 and other.source_number_match.value == 1
    assert other.misreads == {"digit changed": 18}
    assert same.source_nll_of_own == pytest.approx(same.source_nll_of_export)
    assert other.source_nll_of_export > other.source_nll_of_own
    assert other.samples[0].export.startswith("x=7") and other.samples[0].source == "x=5"
    page, table = to_html(result), to_table(result)
    assert "First differences" in page and "Free running" in page and "Misread numbers" in page
    assert "digit changed" in table and "all numbers of an answer right" in table
