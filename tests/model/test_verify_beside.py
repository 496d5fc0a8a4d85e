"""Verify: what lies beside the tensors of an export, held against its source; and a source that is not there."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support_journal import export_of, packed_parts, rtn
from support_models import CHAT_TEMPLATE, byte_tokenizer, edit_config, tiny, tiny_q3

from glm5_quant.model import verify
from glm5_quant.model.errors import UserError


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(source with a tokenizer, its export)."""
    root = tmp_path_factory.mktemp("beside")
    source = byte_tokenizer(tiny_q3(root / "source"), chat_template=CHAT_TEMPLATE)
    (source / "LICENSE").write_text("free")
    return source, export_of(source, root)


@pytest.fixture
def copy(pair, tmp_path):
    """An export to damage."""
    shutil.copytree(pair[1], tmp_path / "copy")
    return tmp_path / "copy"


def test_a_source_that_is_not_there_is_an_error_whatever_the_folder_is(pair, tmp_path):
    plain = tiny_q3(tmp_path / "plain")  # no export at all
    for folder in (plain, pair[1]):
        with pytest.raises(UserError, match="nowhere: folder not found"):
            verify(folder, tmp_path / "nowhere")


def test_a_fresh_export_has_what_lies_beside_its_source(pair):
    report = verify(*reversed(pair))
    assert (report.problems, report.warnings) == ((), ())


@pytest.mark.parametrize(("name", "change", "message"), [
    ("tokenizer.json", b"{}", "tokenizer.json: differs from the source's"),
    ("tokenizer_config.json", None, "tokenizer_config.json: in the source, but not in the export"),
    ("generation_config.json", b"{}", "generation_config.json: differs from the source's"),
    ("chat_template.jinja", b"{{ messages }}", "chat_template.jinja: differs from the source's"),
    ("added_tokens.json", b"{}", "added_tokens.json: not in the source"),
])  # fmt: skip
def test_a_file_that_decides_what_the_model_reads_or_writes_is_a_problem(copy, pair, name, change, message):
    if change is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(change)
    assert verify(copy, pair[0]).problems == (message,)
    assert verify(copy).ok


def test_papers_that_nothing_reads_are_a_warning(copy, pair):
    (copy / "LICENSE").write_text("not free")
    (copy / "README.md").write_text("a card of one's own")
    report = verify(copy, pair[0])
    assert report.ok
    assert report.warnings == ("LICENSE: differs from the source's",)


def test_config_values_that_are_not_the_sources_are_named_by_key(copy, pair):
    parameters = json.loads((pair[0] / "config.json").read_text())["rope_parameters"]
    changed = {"rope_parameters": parameters | {"rope_theta": 5.0}, "eos_token_id": ..., "rms_norm_eps": 0.1, "new": 1}
    edit_config(copy, transformers_version="0", **changed)
    report = verify(copy, pair[0])
    assert report.problems == (
        "config.json: eos_token_id is missing, the source has 246",
        "config.json: new is 1, and the source has no such key",
        "config.json: rms_norm_eps is 0.1, the source has 1e-06",
        f"config.json: rope_parameters.rope_theta is 5.0, the source has {parameters['rope_theta']!r}",
    )
    assert [w.split(" is ")[0] for w in report.warnings] == ["config.json: transformers_version"]


def test_a_link_out_of_the_export_is_a_problem(copy, pair, tmp_path):
    (tmp_path / "stranger").write_text("secret")
    (copy / "tokenizer.model").symlink_to(tmp_path / "stranger")
    assert "a link leads out of the checkpoint folder" in verify(copy, pair[0]).problems[0]


@pytest.mark.parametrize("rotation", ["none", "folded"])
def test_what_an_export_changes_on_purpose_is_no_difference(tmp_path, rotation):
    tied = tiny("qwen3", tmp_path / "tied", tie_word_embeddings=True)
    edit_config(tied, protect_numeric_tokens=False, quantization_config={"quant_method": "fp8"})
    codes, grid = rtn(torch.randn(256, 128) * 0.02)
    packed = packed_parts("lm_head", codes, grid, symmetric=False, scale_dtype=torch.bfloat16)
    export_of(tied, tmp_path, rotation=rotation, extra=packed if rotation == "none" else None)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert verify(tmp_path / "export", tied).problems == ()
