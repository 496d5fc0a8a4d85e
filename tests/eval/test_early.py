"""What a header, a config or a small file can tell is told before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support_models import byte_tokenizer, tiny, tiny_q3
from support_stubs import CharTokenizer, uniform

import glm5_quant.eval.session as session
from glm5_quant.eval import evaluate, to_table
from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.documents import Document
from glm5_quant.eval.report_tables import slice_table
from glm5_quant.model import files
from glm5_quant.model.errors import UserError

TEXTS = ["The rate is 12.5% since May."]
TALK = [{"messages": [{"role": r, "content": f"{r} {i}"} for i in range(4) for r in ("user", "assistant")]}] * 2


@pytest.fixture(scope="module")
def q3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tiny_q3(tmp_path_factory.mktemp("q3") / "model", max_position_embeddings=128))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "open_runner", lambda *_: pytest.fail("a model was loaded"))


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"texts": TEXTS, "window": 129}, "longer than the model's max_position_embeddings"),
        ({"texts": ["", ""]}, "nothing to score.*2 of 2 skipped"),
        ({"texts": []}, "nothing to score"),
        ({"dialogues": ["no messages"], "long_dialogue": 3}, "no dialogues; expected rows with `messages` of user"),
        ({"dialogues": TALK, "long_dialogue": 4, "max_context": 8}, "no dialogue fits the context"),
        ({"dialogues": TALK, "long_dialogue": 4, "kv_cache": "fp8", "kv_scales": "none.json"}, "cannot be read"),
        ({"texts": TEXTS, "tasks": ["none.jsonl"]}, "cannot read this task"),
        ({"texts": TEXTS, "device": "gpu0"}, "unknown device; found gpu0"),
        ({"texts": TEXTS, "device": "cuda:99"}, "PyTorch finds no such device here"),
        ({"dialogues": TALK}, "dialogues are read turn by turn only.*long_dialogue"),
        ({"texts": [{"txt": "a"}]}, "a row without text; found columns txt"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(q3: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        evaluate(q3, [q3], **({"window": 32} | settings))


@pytest.mark.usefixtures("unloaded")
def test_another_vocabulary_is_told_by_the_configs_alone(q3: Path, tmp_path: Path) -> None:
    other = tiny("llama", tmp_path / "other", vocab_size=300)
    with pytest.raises(UserError, match="other: source and export have different vocabularies; found 300"):
        evaluate(q3, [q3, other], TEXTS, window=32)


@pytest.mark.parametrize(
    "setting",
    [
        {"window": 1},
        {"max_answer_tokens": 0},
        {"seed": -1},
        {"kv_recent": -1},
        {"kv_feedback": 1.1},
        {"kv_feedback": -0.1},
    ],
)
def test_numbers_out_of_range_are_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(setting))}: out of range"):
        EvalConfig(**setting)


@pytest.mark.parametrize("setting", [{"kv_feedback": 0.3}, {"kv_recent": 0}])
def test_settings_of_a_quantized_cache_are_refused_without_one(setting: dict[str, Any]) -> None:
    name = next(iter(setting))
    with pytest.raises(UserError, match=f"{name}: no quantized KV cache to use it; found kv_cache=fp16"):
        EvalConfig(**setting)
    assert getattr(EvalConfig(kv_cache="int4", **setting), name) == setting[name]


def test_tasks_without_a_tokenizer_are_refused_before_the_source_runs(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"input": "1+1?", "golden": "2"}))
    model = uniform()
    with pytest.raises(UserError, match="numeric tasks need a tokenizer"):
        evaluate(model, [model], [[1, 2, 3]], tasks=[tmp_path / "t.jsonl"])
    assert model.calls == 0


def test_dialogues_whose_answers_are_all_empty_are_refused_as_nothing_to_score() -> None:
    tokenizer = CharTokenizer()
    tokenizer.chat_template = "words alone"
    tokenizer.apply_chat_template = (  # type: ignore[attr-defined]
        lambda messages, tokenize, add_generation_prompt: "".join(message["content"] for message in messages)
    )
    talk = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}]
    with pytest.raises(UserError, match="nothing to score: every answer is empty; found 1 dialogues"):
        evaluate(uniform(len(tokenizer)), [], dialogues=talk, long_dialogue=1, tokenizer=tokenizer)


def test_a_source_named_by_hub_id_or_from_home_is_read_like_a_folder(q3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_download", lambda hub_id: q3)
    monkeypatch.setenv("HOME", str(q3.parent))
    settings: dict[str, Any] = {"window": 32, "draws": 20, "diagnose": 0}
    found = evaluate("org/name", ["~/model"], TEXTS, **settings)
    assert found.settings.source == "org/name"
    assert found.exports[0].size_bytes == sum(path.stat().st_size for path in q3.glob("*.safetensors")) > 0
    assert found.exports[0].slice("all").kl.value == 0


def test_the_counts_of_texts_are_those_of_the_whole_pass_not_of_the_closer_look_at_its_start() -> None:
    tokenizer = CharTokenizer()
    model, texts = uniform(len(tokenizer)), [*(f"text {i}" for i in range(20)), ""]
    for diagnose in (0, 2):
        found = evaluate(model, [model], texts, tokenizer=tokenizer, draws=20, diagnose=diagnose)
        assert (found.settings.documents, found.settings.skipped_empty) == (21, 1)
    assert "1 of 21 texts skipped" in to_table(found)


def test_stress_shapes_are_no_texts_of_the_users_and_it_is_said_where_they_were_not_reached() -> None:
    tokenizer = CharTokenizer()
    model, texts = uniform(len(tokenizer)), [f"text {i}" for i in range(20)]
    settings: dict[str, Any] = {"tokenizer": tokenizer, "draws": 20, "diagnose": 0, "stress": True}
    found = evaluate(model, [model], texts, **settings)
    assert found.settings.documents == 20
    shapes = sum(part.tokens for part in found.source_slices if part.name.startswith("stress:"))
    assert f"stress: {shapes} of all {found.source_slices[0].tokens} scored tokens" in " ".join(found.notes)
    short = evaluate(model, [model], texts, num_windows=5, **settings)
    assert "stress: lookup, multi-hop, noise, mixed not read: num_windows=5 ended before them" in short.notes


def test_one_script_is_said_only_where_every_text_is_in_it() -> None:
    tokenizer = CharTokenizer()
    model = uniform(len(tokenizer))
    for other, said in (("more text", True), ("1 2 3 привет мир", False)):
        found = evaluate(model, [], ["hello world", other], tokenizer=tokenizer, draws=20)
        assert any("one script" in note for note in found.notes) == said


def test_a_language_that_the_data_name_is_told_as_they_name_it() -> None:
    tokenizer = CharTokenizer()
    model = uniform(len(tokenizer))
    texts = [Document(text=text, language="bengali") for text in ("hello world", "more text")]
    found = evaluate(model, [], texts, tokenizer=tokenizer, draws=20)
    assert any("one script (bengali)" in note for note in found.notes)


def test_a_choice_made_for_the_user_and_a_wish_that_could_not_be_met_are_said(q3: Path) -> None:
    settings: dict[str, Any] = {"window": 32, "num_windows": 2, "num_dialogues": 1, "draws": 20, "diagnose": 0}
    found = evaluate(q3, [q3], TEXTS, free_running=True, **settings)
    assert any(note.startswith("free running: models answer in long dialogues only") for note in found.notes)
    found = evaluate(q3, [], **settings)
    assert any("the text is glm5-tiny's own held-out dialogues" in note for note in found.notes)


BLURRED = "read by 2 tokens at once, each of which sees 15 to 16 tokens in 16 bit"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"kv_recent": 16}, BLURRED),
        ({"kv_recent": 16, "chunk": 1}, ""),
        ({"kv_recent": 1000}, "no token ever left the 16-bit tier of 1000 tokens"),
    ],
)
def test_a_dialogue_of_one_chunk_shows_the_harm_of_a_quantized_cache_and_what_blurs_it_is_said(
    q3: Path, settings: dict[str, Any], said: str
) -> None:
    settings = {"long_dialogue": 2, "kv_cache": "int4", "draws": 20, "diagnose": 0} | settings
    found = evaluate(q3, [], dialogues=TALK, **settings)
    notes = [note for note in found.notes if note.startswith("int4 cache")]
    assert [note.partition(";")[0] for note in notes] == ([f"int4 cache: {said}"] if said else [])
    kl = found.cache_variants[0].dialogue.slices[0].kl.value
    assert (kl == 0) == said.startswith("no token")


def test_layers_that_a_quantized_cache_leaves_alone_are_counted(tmp_path: Path) -> None:
    folder = byte_tokenizer(tiny("mixtral", tmp_path / "m", sliding_window=16))
    found = evaluate(folder, [], dialogues=TALK, long_dialogue=4, kv_cache="int4", draws=20, diagnose=0)
    assert "int4 cache: 2 of 2 layers stay in 16 bit (sliding windows)" in found.notes


def test_a_language_guessed_by_its_script_is_said_to_be_that() -> None:
    tokenizer = CharTokenizer()
    model = uniform(len(tokenizer))
    table = slice_table(evaluate(model, [model], ["der Zins ist hoch"], tokenizer=tokenizer, draws=20))
    assert table is not None and "language:en" in [row[0] for row in table.rows]
    assert "any Latin script is en" in table.note
