from __future__ import annotations

import io
import sys
import time

import pytest

from glm5_quant.cli.progress import ByteProgress, LayerProgress, StageProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_log_file_gets_one_plain_line_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    with LayerProgress() as bar:
        bar.layer_done(3, 6, seconds=10.0, error=0.0123, where="model.layers.3.mlp.up_proj")
        bar.layer_done(4, 6, seconds=20.0, error=None)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("layer 4/6  10.0 s  left 0:20  memory ")
    assert first.endswith("worst error 0.0123 model.layers.3.mlp.up_proj")
    assert second.startswith("layer 5/6  20.0 s  left 0:15  memory ")
    assert "worst" not in second


def test_a_terminal_gets_one_bar_that_begins_where_the_earlier_run_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with LayerProgress() as bar:
        bar.layer_done(3, 6, seconds=10.0, error=0.0123)
        bar.layer_done(4, 6, seconds=20.0, error=0.001)
    shown = terminal.getvalue()
    assert "5/6 layers" in shown
    assert "worst error 0.0123" in shown
    assert "0:15 left" in shown
    assert shown.count("\n") == 1


def test_an_export_shows_bytes_on_a_terminal_and_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with ByteProgress() as bar:
        bar.advance(1024, 4096, "model.safetensors")
        time.sleep(0.15)  # a bar redraws ten times a second at most
        bar.advance(4096, 4096, "model.safetensors")
    assert "model.safetensors" in terminal.getvalue()
    assert "4.00k/4.00k" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()


def test_an_export_writes_nothing_into_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    with ByteProgress() as bar:
        bar.advance(1, 2, "model.safetensors")
    assert capsys.readouterr().err == ""


def test_an_evaluation_names_each_stage_once_in_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress() as bar:
        for done in range(1, 4):
            bar.advance("windows", done, 3)
        bar.advance("turns", 1, None)
    assert capsys.readouterr().err.splitlines() == ["windows  1 of 3", "windows  3 of 3", "turns  1"]


def test_an_evaluation_shows_one_bar_a_stage_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with StageProgress() as bar:
        bar.advance("windows", 1, 4)
        time.sleep(0.15)
        bar.advance("windows", 2, 4)
        bar.advance("turns", 1, None)
        time.sleep(0.15)
        bar.advance("turns", 2, None)
    assert "windows:  50%" in terminal.getvalue()
    assert "turns: 2 step" in terminal.getvalue()
