"""Kept answers of the source: never those of another source, dtype or history, and a broken run can be gone on with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import byte_tokenizer, rewrite, tiny_q3
from support_stubs import CharTokenizer, random_bigram, uniform

from glm5_quant.eval import EvalResult, evaluate
from glm5_quant.model.errors import UserError
from glm5_quant.model.loading import load
from glm5_quant.model.texts import load_tokenizer


@pytest.fixture(scope="module")
def q3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tiny_q3(tmp_path_factory.mktemp("q3") / "model"))


def talk(first: str = "user says 0") -> list[dict[str, Any]]:
    spoken = [{"role": r, "content": f"{r} says {i}"} for i in range(6) for r in ("user", "assistant")]
    return [{"messages": [{"role": "user", "content": first}, *spoken[1:]]}] * 2


def figures(result: EvalResult) -> tuple[Any, ...]:
    found = result.exports[0]
    kl = found.dialogue.slices[0].kl if found.dialogue else found.slices[0].kl
    return result.source_slices[0].perplexity, kl, [layer.routing_changed for layer in found.layers]


def test_a_run_that_was_stopped_within_a_dialogue_goes_on_with_the_context_it_had(q3: Path, tmp_path: Path) -> None:
    source = load(q3, dtype=torch.float32)
    export = copy.deepcopy(source)
    with torch.no_grad():
        export.lm_head.weight.mul_(1.3)
    settings: dict[str, Any] = {"tokenizer": load_tokenizer(q3), "long_dialogue": 6, "chunk": 16, "draws": 20}
    settings |= {"dialogues": talk(), "source_cache": str(tmp_path), "diagnose": 0}
    whole = evaluate(source, [export], **settings)
    kept = sorted((tmp_path / "dialogues").iterdir())
    for file in kept[5:]:
        file.unlink()
    resumed = evaluate(source, [export], **settings)
    assert figures(resumed)[:2] == figures(whole)[:2]
    assert sorted((tmp_path / "dialogues").iterdir()) == kept
    assert resumed.exports[0].layers[0].routing_changed == 0


def test_answers_kept_for_another_question_of_the_same_length_are_refused(q3: Path, tmp_path: Path) -> None:
    source = load(q3, dtype=torch.float32)
    settings: dict[str, Any] = {"tokenizer": load_tokenizer(q3), "long_dialogue": 6, "decode_steps": True, "draws": 20}
    settings |= {"source_cache": str(tmp_path), "diagnose": 0}
    evaluate(source, [source], dialogues=talk(), **settings)
    evaluate(source, [source], dialogues=talk(), **settings)
    with pytest.raises(UserError, match="for another run"):
        evaluate(source, [source], dialogues=talk("user says 9"), **settings)


def test_answers_of_another_source_of_the_same_folder_name_or_dtype_are_refused(q3: Path, tmp_path: Path) -> None:
    other = byte_tokenizer(tiny_q3(tmp_path / "model"))
    rewrite(other, "lm_head.weight", lambda weight: weight * 3)
    text = ["The rate is 12.5% since May."]
    settings: dict[str, Any] = {"window": 32, "draws": 20, "diagnose": 0, "source_cache": str(tmp_path / "kept")}
    evaluate(q3, [q3], text, names=["e"], **settings)
    evaluate(q3, [other], text, names=["e"], **settings)
    with pytest.raises(UserError, match="made_by: the cache of the source's answers is for another run"):
        evaluate(other, [other], text, names=["e"], **settings)
    with pytest.raises(UserError, match=r"made_by: .* for another run"):
        evaluate(q3, [q3], text, names=["e"], dtype="bfloat16", **settings)


def test_kept_answers_that_are_damaged_or_empty_are_named(tmp_path: Path) -> None:
    model, text = random_bigram(0), [list(range(32)) * 4]
    settings: dict[str, Any] = {"window": 17, "source_cache": str(tmp_path), "diagnose": 0, "draws": 20}
    evaluate(model, [model], text, **settings)
    file = sorted((tmp_path / "windows").iterdir())[1]
    for content, found in ((file.read_bytes()[:40], "header"), (b"", "no answers")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"{file.name}: .* or damaged; found .*{found}"):
            evaluate(model, [model], text, **settings)


def test_a_cache_folder_that_cannot_be_made_is_refused_before_the_source_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    model = uniform(len(CharTokenizer()))
    with pytest.raises(UserError, match="this folder cannot be made"):
        evaluate(model, [], ["some text"], tokenizer=CharTokenizer(), source_cache=str(tmp_path / "file" / "kept"))
    assert model.calls == 0
