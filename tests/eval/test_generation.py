from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import byte_tokenizer
from support_stubs import Bigram, uniform

from glm5_quant.eval import evaluate, to_html
from glm5_quant.eval.dialogue import Dialogue, Renderer, Turn
from glm5_quant.eval.drift import Reader
from glm5_quant.eval.free_running import converse, repetition
from glm5_quant.eval.generate import answer, ending_of
from glm5_quant.eval.prefix import find_prefix
from glm5_quant.eval.runner import PlainCache, Runner
from glm5_quant.eval.tasks import read_task, solve
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def saying(text: str, start: str = ":") -> Bigram:
    """After `start`, the UTF-8 bytes of `text`, then a newline."""
    logits = torch.zeros(256, 256)
    steps = [*start.encode(), *text.encode("utf-8"), *b"\n"]
    for one, other in itertools.pairwise(steps):
        logits[one, other] = 20.0
    return Bigram(logits)


def reader(model: Bigram) -> Reader:
    return Reader(name="m", runner=Runner(model), new_cache=PlainCache)


def test_characters_split_over_tokens_come_out_whole_and_drift_is_judged_on_ids(tokenizer: Any) -> None:
    dialogue = Dialogue(turns=(Turn(user="q", answer="a"), Turn(user="r", answer="b")))
    renderer = Renderer(tokenizer, find_prefix(tokenizer))
    found = converse(reader(saying("好😀")), dialogue, renderer, limit=None, max_new_tokens=20)
    assert found.texts == ["好😀", "好😀"]
    assert found.answers[0].ids == tuple("好😀".encode()) and found.answers[0].ended
    cut = converse(reader(saying("好😀")), dialogue, renderer, limit=None, max_new_tokens=5)
    assert not cut.answers[0].ended and len(cut.answers[0].ids) == 5
    assert cut.answers != found.answers


def test_special_tokens_stay_in_transcripts(tokenizer: Any) -> None:
    logits = saying("A").log_table.clone()
    pad = tokenizer.convert_tokens_to_ids("<pad>")
    logits[ord("A")] = 0.0
    logits[ord("A"), pad] = 20.0
    logits[pad, ord("\n")] = 20.0
    dialogue = Dialogue(turns=(Turn(user="q", answer="a"),))
    found = converse(
        reader(Bigram(logits)), dialogue, Renderer(tokenizer, find_prefix(tokenizer)), limit=None, max_new_tokens=9
    )
    assert found.texts == ["A<pad>"]


def test_when_the_context_is_full_the_oldest_turns_are_dropped_and_the_answers_go_on(tokenizer: Any) -> None:
    dialogue = Dialogue(turns=tuple(Turn(user=f"{i}", answer="x") for i in range(12)))
    renderer = Renderer(tokenizer, find_prefix(tokenizer))
    caches: list[PlainCache] = []

    def new_cache() -> PlainCache:
        caches.append(PlainCache())
        return caches[-1]

    watched = Reader(name="m", runner=Runner(saying("ok")), new_cache=new_cache)
    found = converse(watched, dialogue, renderer, limit=80, max_new_tokens=6)
    assert found.texts == ["ok"] * 12
    assert len(caches) > 1
    for cache in caches:
        text = tokenizer.decode(cache.ids[0].tolist())
        assert cache.get_seq_length() <= 80
        assert text.startswith("<s>User: ") and text.count("<s>") == 1
        assert "okk" not in text and (":ok\nUser:" in text or text.count("User") == 1)
    kept = tokenizer.decode(caches[-1].ids[0].tolist())
    assert "User: 11\n" in kept and "User: 0\n" not in kept


def test_answers_end_at_eos_or_at_what_the_template_writes_next(tokenizer: Any) -> None:
    ending = ending_of(Renderer(tokenizer, find_prefix(tokenizer)), type("C", (), {"eos_token_id": [7, 8]}))
    assert ending.stops == {tokenizer.eos_token_id, 7, 8, ord("\n")}
    assert ending.closing == tuple(b"\n")


def test_of_a_long_prompt_only_the_logits_of_its_last_token_are_asked_for(tokenizer: Any) -> None:
    asked: list[tuple[int, list[int]]] = []

    class Watched:
        def step(self, ids: torch.Tensor, cache: Any, keep: torch.Tensor | None = None) -> torch.Tensor:
            asked.append((ids.shape[1], [] if keep is None else keep.tolist()))
            return torch.zeros(1, 1, 8).index_fill(2, torch.tensor([3]), 1.0)

    found = answer(Watched(), None, [1] * 50, frozenset(), 3)
    assert found.ids == (3, 3, 3)
    assert asked == [(50, [49]), (1, [0]), (1, [0])]


def test_repeated_runs_are_counted_within_an_answer(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, find_prefix(tokenizer))
    dialogue = Dialogue(turns=(Turn(user="q", answer="a"),))
    loop = saying("abc")
    loop.log_table[ord("c")] = 0.0
    loop.log_table[ord("c"), ord("a")] = 20.0
    again = converse(reader(loop), dialogue, renderer, limit=None, max_new_tokens=15)
    assert repetition([again]) == pytest.approx(1 - 3 / 12)
    assert repetition([converse(reader(saying("ab")), dialogue, renderer, limit=None, max_new_tokens=9)]) is None


def test_numeric_tasks_are_answered_by_every_model_and_compared(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text(
        '{"input": "1+4?", "golden": "5"}\n{"input": "2+3?", "golden": "5.0"}\n{"input": "9?", "golden": "12%"}\n'
    )
    result = evaluate(
        saying("it is 5"), [saying("it is 50")], ["some text"], tasks=[file], tokenizer=tokenizer, draws=50, names=["e"]
    )
    task = result.exports[0].tasks[0]
    assert (task.name, task.problems) == ("sums", 3)
    assert task.source_exact.value == pytest.approx(2 / 3) and task.exact.value == 0
    assert task.difference.value == pytest.approx(-2 / 3)
    assert task.source_misreads == {"equal": 2, "other number": 1}
    assert task.misreads == {"digit added": 1, "point shifted": 1, "other number": 1}
    assert "sums" in to_html(result)


def test_in_the_plain_form_a_calculation_of_several_lines_is_read_to_its_result(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "sum.jsonl").write_text('{"input": "1+4, doubled?", "golden": "8"}\n')
    limit = 12
    # After the result the model goes on as the next user would, and says 9.
    steps = iter(b"1\n=8\nUser:9" + b"9" * limit)

    def scripted(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, 300)
        logits[0, -1, next(steps)] = 20.0
        return logits

    problems = read_task(tmp_path / "sum.jsonl")
    watched = Reader(name="m", runner=Runner(scripted), new_cache=PlainCache)
    found = solve(watched, problems, Renderer(tokenizer, find_prefix(tokenizer)), limit)
    assert [answer.value for answer in found if answer is not None] == [8]
    assert bytes(steps) == b"9" * (limit + 1)


def test_one_script_short_text_and_few_clusters_are_said_in_notes(tokenizer: Any) -> None:
    result = evaluate(uniform(), [uniform()], ["only English here"], tokenizer=tokenizer, draws=20)
    assert any("one script (Latin letters)" in note for note in result.notes)
    assert any("short text only" in note for note in result.notes)
    assert any("intervals rest on 1 windows" in note for note in result.notes)


def test_without_the_harness_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from glm5_quant.eval.lm_harness import harness_model

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="lm-eval"):
        harness_model(tmp_path)


def test_a_list_of_critical_words_that_no_token_touches_is_told(tmp_path: Path, tokenizer: Any) -> None:
    for word, told in (("hello", False), ("h\u00f6chstens", True)):
        (tmp_path / "words").write_text(word, encoding="utf-8")
        words = str(tmp_path / "words")
        found = evaluate(uniform(), [], ["hello world"], tokenizer=tokenizer, critical_words=words, draws=20)
        assert any("critical word" in note for note in found.notes) == told
        assert ("critical" in [part.name for part in found.source_slices]) != told
