from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from glm5_quant.cli import terminal


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (18.4 * 2**30, "18.4 GiB"), (2**51, "2048.0 TiB")],
)
def test_bytes_are_shown_in_powers_of_1024(count: float, shown: str) -> None:
    assert terminal.human_bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0:00"),
        (41.4, "0:41"),
        (59.6, "1:00"),
        (3600, "1:00:00"),
        (10_927, "3:02:07"),
        (184_200, "2 d 03:10"),
        (-1, "0:00"),
    ],
)
def test_times_are_shown_as_clocks_show_them(seconds: float, shown: str) -> None:
    assert terminal.human_time(seconds) == shown


def test_a_table_aligns_text_left_numbers_right_and_chinese_by_width() -> None:
    drawn = terminal.table(("name", "error", "note"), [("下限", "0.5", None), ("long name", "12.25", "ok")])
    assert drawn.splitlines() == [
        "name       error  note",
        "---------  -----  ----",
        "下限         0.5",
        "long name  12.25  ok",
    ]


def test_a_table_without_rows_is_its_heading() -> None:
    assert terminal.table(("a", "b"), []).splitlines() == ["a  b", "-  -"]


def test_a_folded_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    drawn = terminal.table(("reader", "why"), [("vLLM", "word " * 30), ("other", "")], fold=True)
    assert max(map(len, drawn.splitlines())) <= 40
    assert drawn.splitlines()[-1] == "other"


def test_facts_leave_out_what_is_none() -> None:
    assert terminal.facts(("name", "x"), ("missing", None), ("zero", 0)) == "name     x\nzero     0"


class _Color(StrEnum):
    red = "red"


class _Record(BaseModel):
    share: float


@dataclass
class _Result:
    path: Path
    value: float
    parts: tuple[Any, ...]
    color: _Color
    names: frozenset[str]


def test_json_of_a_result_is_strict_and_keeps_chinese_readable() -> None:
    nested = {"下限": _Record(share=float("inf")), 3: None}
    text = terminal.json_text(_Result(Path("a/b"), float("nan"), (1, True, nested), _Color.red, frozenset("ba")))
    assert "NaN" not in text
    assert "Infinity" not in text
    assert "下限" in text
    assert json.loads(text) == {
        "path": "a/b",
        "value": None,
        "parts": [1, True, {"下限": {"share": None}, "3": None}],
        "color": "red",
        "names": ["a", "b"],
    }


def test_the_next_command_can_be_pasted_into_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say_next("verify", "my folder", work_dir=None, num_samples="4")
    shown = capsys.readouterr()
    assert shown.err == "Next: glm5-quant verify 'my folder' --num-samples 4\n"
    assert shown.out == ""


def test_memory_is_read_from_the_system_or_else_from_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal.memory_bytes() > 2**20

    def no_proc(self: Path, *args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", no_proc)
    assert terminal.memory_bytes() > 2**20
