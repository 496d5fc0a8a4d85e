"""What an evaluation says about the folders it compares: not quantized, of another source, not to be had in a dtype."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_models import byte_tokenizer, edit_config, rewrite, tiny_q3
from support_stubs import CharTokenizer, uniform

import glm5_quant.eval.session as session
from glm5_quant.eval import evaluate, to_html, to_json, to_markdown, to_table
from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.provenance import Provenance, look_at
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.journal import config_digest, shard_digest
from glm5_quant.model.sidecar import JSON_NAME, VERSION
from glm5_quant.model.texts import Text, Texts, read_texts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return byte_tokenizer(tiny_q3(tmp_path / "source"))


def _say_source(export: Path, source: Path) -> None:
    """The sidecar of an export made from `source`, as far as it matters here."""
    checkpoint = open_checkpoint(source)
    shards = {path.name: shard_digest(path) for path in checkpoint.shards}
    record: dict[str, Any] = {
        "format": "eampq",
        "version": VERSION,
        "tool_version": "0",
        "features": [],
        "replaced": [],
        "tensors": {},
    }
    record["source"] = {"config_sha256": config_digest(checkpoint.config), "shards": shards}
    record["source"] |= {"model_type": "qwen3_moe", "dtype": "bfloat16"}
    (export / JSON_NAME).parent.mkdir(exist_ok=True)
    (export / JSON_NAME).write_text(json.dumps(record | {"data": {}, "settings": {}, "modules": {}}))


def _look(source: Any, *exports: Any, **settings: Any) -> Provenance:
    return look_at(source, exports, [f"e{i}" for i in range(len(exports))], EvalConfig(**settings))


def test_a_source_given_as_its_own_export_is_said_at_once_and_in_every_report(source: Path) -> None:
    said: list[str] = []
    result = evaluate(source, [source], ["a text of 12 EUR"], window=16, diagnose=0, draws=20, warn=said.append)
    assert said == ["source: not quantized: 0 packed linears, it is the source itself"]
    assert said[0] in result.notes
    assert result.exports[0].packed_linears == 0
    for report in (to_table(result), to_markdown(result), to_html(result), to_json(result)):
        assert said[0] in report
    assert "0: not quantized" in to_table(result) and "0: not quantized" in to_html(result)


def test_a_gate_that_a_plain_folder_passed_is_no_good_news(source: Path) -> None:
    result = evaluate(source, [source], ["a text of 12 EUR"], window=16, diagnose=0, draws=20, gates="kl<0.05")
    assert result.gates_passed
    assert 'class="card good"' not in to_html(result)


def test_an_export_of_another_model_is_told_by_its_config_shards_and_their_bytes(source: Path, tmp_path: Path) -> None:
    export = tiny_q3(tmp_path / "export")
    _say_source(export, source)
    plain = "e0: not quantized: 0 packed linears"
    assert _look(source, export).warnings == (plain,)
    rewrite(source, "model.layers.0.mlp.gate.weight", lambda weight: weight.mul_(2))
    shard = open_checkpoint(source).info("model.layers.0.mlp.gate.weight").file
    assert _look(source, export).warnings[1:] == (
        f"e0: export was made from another model: {shard.name} differ from {source}",
    )
    edit_config(source, rope_theta=5.0)
    assert f"config.json, {shard.name} differ from {source}" in _look(source, export).warnings[1]
    (other := tmp_path / "renamed").mkdir()
    for path in source.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    index = json.loads((other / "model.safetensors.index.json").read_text())
    (other / shard.name).rename(other / "weights.safetensors")
    index["weight_map"] = {
        name: "weights.safetensors" if file == shard.name else file for name, file in index["weight_map"].items()
    }
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"config.json, {shard.name}, weights.safetensors differ" in _look(other, export).warnings[1]


def test_models_that_are_no_folders_say_how_many_linears_they_packed_if_they_do(source: Path) -> None:
    found = _look(uniform(), SimpleNamespace(packed_count=7), uniform())
    assert (found.packed, found.warnings) == ((7, None), ())


def test_float16_of_wider_weights_is_refused_before_any_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = byte_tokenizer(tiny_q3(tmp_path / "f32", dtype=torch.float32))
    monkeypatch.setattr(session, "open_runner", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=r"^dtype: .* found float16, with F32 weights in .*; expected auto, float32"):
        evaluate(folder, [folder], ["a text"], dtype="float16")


def test_float16_runs_where_the_weights_are_and_names_the_tensor_that_is_not(tmp_path: Path) -> None:
    folder = byte_tokenizer(tiny_q3(tmp_path / "f16", dtype=torch.float16))
    settings: dict[str, Any] = {"window": 16, "diagnose": 0, "draws": 20, "dtype": "float16"}
    assert evaluate(folder, [], ["a text of 12 EUR"], **settings).status == "ok"
    rewrite(folder, "model.norm.weight", lambda weight: weight.float())
    with pytest.raises(UserError, match=r"dtype: not a dtype for this model; found float16, with model.norm.weight"):
        evaluate(folder, [], ["a text of 12 EUR"], **settings)


def test_rows_that_the_reader_passed_over_as_empty_are_counted_and_said(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": ""}\n{"text": "normal"}\n')
    tokenizer = CharTokenizer()
    model = uniform(len(tokenizer))
    for texts in (path, read_texts(path)):
        result = evaluate(model, [], texts, tokenizer=tokenizer)
        assert (result.settings.skipped_empty, result.settings.documents) == (1, 2)
        assert "1 of 2 texts skipped as empty" in to_table(result)
        assert any("1 of 2 rows are empty" in note for note in result.notes)


def test_of_a_text_read_in_part_only_what_was_read_is_counted() -> None:
    tokenizer = CharTokenizer()
    model = uniform(len(tokenizer))
    rows = tuple(Text(file="f", line=line, text="normal") for line in range(4))
    texts = Texts(source="f", rows=rows, rows_in=9, rows_empty=5, files=("f",))
    result = evaluate(model, [], texts, tokenizer=tokenizer, num_windows=2)
    assert result.settings.skipped_empty == 0
