"""The model card of an export: it tells what the folder is, and the source's own card is kept beside it."""

from __future__ import annotations

import shutil

import pytest
from support_journal import content, export_of, make_journal
from support_models import tiny_q3

from glm5_quant.model import export, verify
from glm5_quant.model.card import kept_name

CARD = """---
license: other
license_name: ours
license_link: LICENSE
language:
- en
- zh
base_model: someone/else
tags:
- bfloat16
---

A line before.

# Our model

bfloat16, 3.7 MB
"""


@pytest.fixture
def source(tmp_path):
    """A model with a card."""
    folder = tiny_q3(tmp_path / "source")
    (folder / "README.md").write_text(CARD)
    return folder


def test_an_exports_card_says_what_the_folder_is_and_the_sources_card_lies_beside_it(source, tmp_path):
    out = export_of(source, tmp_path)
    assert (out / "SOURCE_README.md").read_text() == CARD
    card = (out / "README.md").read_text()
    front, _, body = card.removeprefix("---\n").partition("---\n")
    assert front.splitlines() == [
        "license: other",
        "license_name: ours",
        "license_link: LICENSE",
        "language:",
        "- en",
        "- zh",
        "tags: [compressed-tensors, int4]",
    ]
    assert body.startswith("\n# Our model, in INT4\n")
    assert "[SOURCE_README.md](SOURCE_README.md)" in body
    assert "INT4, asymmetric, blocks of 64 inputs, 4." in body
    assert "| loaded by | glm5-quant, compressed-tensors; by their code, but not tried: vLLM |" in body
    assert "bfloat16" not in card and "3.7 MB" not in card
    report = verify(out, source)
    assert (report.problems, report.warnings) == ((), ())
    (out / "README.md").write_text("a card of one's own")
    assert verify(out, source).warnings == ()
    (out / "SOURCE_README.md").write_text("changed")
    assert verify(out, source).warnings == ("SOURCE_README.md: differs from the source's",)


def test_a_model_of_the_hubs_cache_is_named_as_the_base_model(source, tmp_path):
    cached = tmp_path / "hub" / "models--org--some-model" / "snapshots" / "0123"
    shutil.copytree(source, cached)
    card = (export_of(cached, tmp_path) / "README.md").read_text()
    assert "\nbase_model: org/some-model\nbase_model_relation: quantized\n" in card
    assert "Quantized from org/some-model by glm5-quant" in card
    assert str(tmp_path) not in card


def test_a_card_without_front_matter_or_heading_and_no_card_at_all(source, tmp_path):
    (source / "README.md").write_bytes(b"\xff plain\r\n")
    out = export_of(source, tmp_path)
    assert (out / "README.md").read_text().startswith("# A model of type qwen3_moe, in INT4\n")
    assert (out / "SOURCE_README.md").read_bytes() == b"\xff plain\r\n"
    (source / "README.md").unlink()
    report = export(source, tmp_path / "journal", out, overwrite=True)
    assert not {"README.md", "SOURCE_README.md"} & content(out).keys()
    assert {file.name for file in report.files} == content(out).keys()


def test_two_exports_have_the_same_card_and_what_the_source_kept_is_not_lost(source, tmp_path):
    (source / "SOURCE_README.md").write_text("older")
    journal = make_journal(source, tmp_path / "journal", symmetric=True, rotation="full")
    one, two = export(source, journal, tmp_path / "a"), export(source, journal, tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert one.files == two.files
    assert {file.name for file in one.files} == content(tmp_path / "a").keys()
    assert (tmp_path / "a" / "SOURCE_README.md").read_text() == "older"
    assert (tmp_path / "a" / "SOURCE_SOURCE_README.md").read_text() == CARD
    card = (tmp_path / "a" / "README.md").read_text()
    assert "INT4, symmetric" in card and "| loaded by | glm5-quant |" in card
    assert verify(tmp_path / "a", source).warnings == ()
    assert kept_name({"README.md", "SOURCE_README.md"}) == "SOURCE_SOURCE_README.md"
