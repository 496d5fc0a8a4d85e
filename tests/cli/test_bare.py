"""Commands without `--model` and `--dataset`, on a stand-in for the packaged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support_models import CHAT_TEMPLATE, byte_tokenizer, tiny_q3
from typer.testing import CliRunner

import glm5_quant.cli.main as main
from glm5_quant.model import tiny


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(main.build(), list(arguments), catch_exceptions=False)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packaged model, and an empty folder to work in."""
    model = byte_tokenizer(tiny_q3(tmp_path / "packaged"), chat_template=CHAT_TEMPLATE)
    monkeypatch.setattr(tiny, "folder", lambda: model)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return model


def test_calibrate_and_export_work_bare_twice_in_an_empty_folder(packaged: Path) -> None:
    for _ in range(2):
        done = _run("calibrate", "--num-samples", "4", "--seqlen", "64")
        assert done.exit_code == 0, done.output
        assert done.stderr.splitlines()[-1] == "Next: glm5-quant export"
        done = _run("export")
        assert done.exit_code == 0, done.output
        assert done.stderr.splitlines()[-1] == "Next: glm5-quant eval"
    assert [path.name for path in Path().iterdir()] == ["glm5-quant-work"]
    rows = Path("glm5-quant-work/data/calibration.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[0])["messages"][0]["role"] == "user"


def test_plan_is_bare_too_and_writes_nothing(packaged: Path) -> None:
    done = _run("plan")
    assert done.exit_code == 0
    assert "qwen3_moe" in done.stdout
    assert done.stderr.splitlines()[-1] == "Next: glm5-quant calibrate"
    assert list(Path().iterdir()) == []


def test_naming_the_packaged_model_still_finds_its_corpus(packaged: Path) -> None:
    assert _run("calibrate", "--model", str(packaged), "--dry-run").exit_code == 0


def test_the_packaged_model_goes_by_its_name_unless_a_folder_has_it(packaged: Path) -> None:
    """Help and docs call it glm5-tiny; the name was "folder not found"."""
    assert _run("calibrate", "--model", "glm5-tiny", "--dry-run").exit_code == 0
    done = _run("plan", "--model", "glm5-tiny")
    assert "qwen3_moe" in done.stdout
    assert done.stderr.splitlines()[-1] == "Next: glm5-quant calibrate"
    assert "qwen3_moe" in _run("inspect", "glm5-tiny").stdout
    Path("glm5-tiny").mkdir()
    assert "empty/glm5-tiny/config.json: file not found" in _run("plan", "--model", "glm5-tiny").stderr


def test_an_installation_without_the_packaged_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "folder", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    done = _run("calibrate")
    assert done.exit_code == 1
    assert "glm5-tiny is not in this installation. Name a model of your own with --model" in done.stderr


def test_the_entry_point_ends_with_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["glm5-quant", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 0


@pytest.mark.slow
def test_the_packaged_model_goes_the_whole_road(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (tiny.folder() / "config.json").exists():
        pytest.skip("this checkout has no weights of glm5-tiny")
    monkeypatch.chdir(tmp_path)
    roads = (
        ["calibrate", "--num-samples", "2", "--seqlen", "64"],
        ["export"],
        ["verify"],
        ["eval", "--num-windows", "2", "--window", "64"],
    )
    for arguments in roads:
        done = _run(*arguments)
        assert done.exit_code == 0, done.output
        assert done.stderr.splitlines()[-1].startswith("Next: glm5-quant ")
        assert "glm5-quant calibrate" not in done.stderr
    assert "KL(source || export)" in done.stdout
