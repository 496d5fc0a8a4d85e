"""What loading a model would refuse is found from headers alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from support_journal import export_of
from support_models import (
    ALL_TYPES,
    edit_config,
    glm5_shapes,
    hollow,
    read_tensors,
    rewrite,
    stack_experts,
    tiny,
    tiny_q3,
    write_tensors,
)

from glm5_quant.calibrate.plan import make_plan
from glm5_quant.calibrate.settings import Settings
from glm5_quant.model import verify
from glm5_quant.model.build import build_empty, check_parameters, fill
from glm5_quant.model.checkpoint import Checkpoint, open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import family_of


def check(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    check_parameters(checkpoint, family_of(checkpoint.config))


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_a_whole_model_of_each_family_passes_unread(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(model_type, tmp_path)
    monkeypatch.setattr(Checkpoint, "_raw", None)
    check(tmp_path)


def test_stacked_experts_and_a_tied_head_pass(tmp_path: Path) -> None:
    check(stack_experts(tiny("qwen3_moe", tmp_path / "stacked")))
    tied = tiny("qwen3_moe", tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in read_tensors(tied)
    check(tied)


def test_rotary_settings_that_give_no_numbers_are_told_before_work(tmp_path: Path) -> None:
    folder = tiny_q3(tmp_path)
    edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": -10_000.0})
    with pytest.raises(UserError, match=r"config.json: Qwen3MoeRotaryEmbedding.inv_freq: no numbers come out of this"):
        check(folder)


@pytest.mark.parametrize("text", ["", "[]", '{"cache_implementation": "none of them"}'])
def test_generation_settings_that_no_model_can_be_loaded_with_are_told_before_work(tmp_path: Path, text: str) -> None:
    source = tiny_q3(tmp_path / "source")
    out = export_of(source, tmp_path)
    for folder in (source, out):
        (folder / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config.json: not usable"):
        make_plan(open_checkpoint(source), Settings(), tmp_path / "work")
    report = verify(out)
    assert "generation_config.json: not usable" in report.problems[0]
    assert not any(verdict.loads for verdict in report.runtimes)


NARROW = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("fault", ["no norm", "no head", "vocabulary", "no expert", "narrow expert", "norm of a layer"])
def test_what_fill_refuses_is_refused_in_the_same_words(tmp_path: Path, fault: str) -> None:
    folder = tiny_q3(tmp_path)
    if fault == "no norm":
        rewrite(folder, "model.norm.weight", lambda old: None)
    elif fault == "no head":
        rewrite(folder, "lm_head.weight", lambda old: None)
    elif fault == "vocabulary":
        edit_config(folder, vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"] + 1)
    elif fault == "no expert":
        rewrite(folder, NARROW, lambda old: None)
    elif fault == "narrow expert":
        rewrite(folder, NARROW, lambda old: old[:-1].clone())
    else:
        rewrite(folder, "model.layers.1.input_layernorm.weight", lambda old: torch.ones(3))
    checkpoint = open_checkpoint(folder)
    family = family_of(checkpoint.config)
    with pytest.raises(UserError) as filled:
        fill(build_empty(checkpoint, torch.bfloat16), "", checkpoint, family, torch.bfloat16)
    with pytest.raises(UserError) as checked:
        check_parameters(checkpoint, family)
    # fill looks at one layer's experts, the check at all of them.
    assert str(checked.value) == str(filled.value).replace("1 of 12 weights", "1 of 24 weights")


def test_a_vocabulary_of_another_size_names_the_embedding(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"embed_tokens.weight: a tensor does not fit the model that the config"):
        check(edit_config(tiny("llama", tmp_path), vocab_size=7))


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    tensors = read_tensors(tiny("llama", tmp_path))
    write_tensors(tmp_path, {name: value for name, value in tensors.items() if "norm" not in name})
    with pytest.raises(UserError, match=r"model.layers.0.input_layernorm.weight: 5 tensors are not in the checkpoint"):
        check(tmp_path)


@pytest.mark.slow
def test_glm5_itself_is_checked_in_seconds(tmp_path: Path) -> None:
    try:
        hollow(tmp_path, glm5_shapes(), {"model_type": "glm_moe_dsa"}, shards=282)
    except OSError as error:
        pytest.skip(f"this file system has no sparse files of this size: {error}")
    begin = time.monotonic()
    check(tmp_path)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(("model_type", "settings", "reason"), [
    ("qwen3_moe", {"decoder_sparse_step": 0}, "ZeroDivisionError"),
    ("glm4", {"pad_token_id": 151329}, "Padding_idx must be within num_embeddings"),
    ("glm5_ref", {"pad_token_id": "x"}, "TypeError"),
    ("granitemoe", {"head_dim": None}, "TypeError"),
])  # fmt: skip
def test_a_config_that_transformers_takes_and_cannot_build_is_a_message(
    tmp_path: Path, model_type: str, settings: dict[str, object], reason: str
) -> None:
    edit_config(tiny(model_type, tmp_path), **settings)
    with pytest.raises(UserError, match=rf"config.json: no model can be built from this config: .*{reason}"):
        check(tmp_path)


def test_a_count_of_experts_that_is_no_number_is_a_message(tmp_path: Path) -> None:
    edit_config(tiny_q3(tmp_path), num_local_experts="many")
    with pytest.raises(UserError, match=r"config.json: transformers refuses this config: ValueError: .*many"):
        check(tmp_path)
