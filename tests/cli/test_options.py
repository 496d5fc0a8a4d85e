"""Options of commands: empty ones, targets that cannot be written, and what a command says to type next."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from support_models import byte_tokenizer, tiny_q3
from typer.testing import CliRunner

import glm5_quant.cli.main as main
import glm5_quant.eval as room
from glm5_quant.cli.defaults import is_packaged
from glm5_quant.eval.result import EvalResult, Settings
from glm5_quant.model import tiny


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(main.build(), list(arguments), catch_exceptions=False)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and an empty folder to work in."""
    folder = byte_tokenizer(tiny_q3(tmp_path / "my model"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "s.jsonl"
    path.write_text('{"text": ""}\n{"text": "The limit is 12.5%."}\n')
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `eval` asks of a measuring function that measures nothing, and warns of one thing."""
    found: dict[str, Any] = {}

    def evaluate(source: Any, exports: Any, texts: Any, *, warn: Any, **settings: Any) -> EvalResult:
        warn("doubtful")
        found.update(settings, source=source, exports=exports, texts=texts)
        plain: dict[str, Any] = dict.fromkeys(Settings.__dataclass_fields__, 1)
        return EvalResult(schema_version=1, status="ok", settings=Settings(**plain | {"source": "x"}), exports=())

    monkeypatch.setitem(vars(room), "evaluate", evaluate)
    return found


def _next(done: Any) -> list[str]:
    """The words of the one command to type next."""
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Next: ")]
    return shlex.split(line.removeprefix("Next: glm5-quant "))


EMPTY = {
    "calibrate": ("--model", "--dataset", "--preset", "--work-dir", "--device", "--max-memory"),
    "plan": ("--model", "--preset", "--work-dir", "--device", "--max-memory"),
    "export": ("--model", "--work-dir", "--output-dir", "--max-shard-size"),
    "verify": ("--model", "--work-dir"),
    "inspect": ("--work-dir",),
    "eval": (
        *("--model", "--quantized", "--dataset", "--critical-words", "--task", "--gate"),
        *("--work-dir", "--device", "--trace", "--report", "--set"),
    ),
}


@pytest.mark.parametrize(("command", "option"), [(name, option) for name, found in EMPTY.items() for option in found])
def test_an_empty_option_is_wrong_usage_and_named(command: str, option: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main.build(), [command, option, ""], env={"COLUMNS": "200"})
    assert (done.exit_code, done.stdout) == (2, "")
    assert option in done.stderr.partition("Error")[2]


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_an_empty_folder_is_wrong_usage(command: str) -> None:
    assert CliRunner().invoke(main.build(), [command, ""]).exit_code == 2


def test_a_report_that_could_not_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    arguments = ["eval", "--model", "m", "--quantized", "q", "--dataset", "no-such-file.jsonl"]
    (tmp_path / "r.md").mkdir()
    taken = _run(*arguments, "--report", str(tmp_path / "r.md"))
    assert taken.exit_code == 2
    assert "is a folder" in re.sub(r"[\s│]+", " ", taken.stderr)
    shut = _run(*arguments, "--report", "/proc/r.md")
    assert shut.exit_code == 1
    assert "/proc: cannot be written" in shut.stderr
    assert asked == {}


def test_a_trace_that_could_not_be_written_is_refused_and_no_folder_made_for_one_that_could(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    arguments = ["eval", "--model", "m", "--quantized", "q", "--dataset", "no-such-file.jsonl", "--trace", "hi"]
    shut = _run(*arguments, "--work-dir", "/proc/work")
    assert "/proc: cannot be written" in shut.stderr
    (tmp_path / "taken" / "routing_trace.json").mkdir(parents=True)
    taken = _run(*arguments, "--work-dir", str(tmp_path / "taken"))
    assert "routing_trace.json: is a folder" in taken.stderr
    later = _run(*arguments, "--work-dir", str(tmp_path / "new" / "work"))
    assert "no such file or folder" in later.stderr
    assert not (tmp_path / "new").exists()
    assert asked == {}


def test_the_kv_cache_is_no_matter_of_exports_alone() -> None:
    shown = " ".join(_run("eval", "--help").stdout.replace("│", " ").split())
    assert "Also read dialogues with a KV cache of this format" in shown
    listed = " ".join(_run("eval", "--set", "help").stdout.split())
    assert "source and exports read dialogues with such a cache too" in listed
    assert "carried on to the next token (0 to 1;" in listed


def test_eval_says_what_readers_and_folders_warn_of(text: Path, asked: dict[str, Any]) -> None:
    done = _run("eval", "--model", "m", "--quantized", "q", "--dataset", str(text))
    assert f"warning: {text}: 1 of 2 rows are empty and were passed over" in done.stderr
    assert "warning: doubtful" in done.stderr
    assert asked["texts"].rows_empty == 1


@pytest.mark.parametrize(
    ("gate", "said"), [("kl=1", "cannot read"), ("growth<5%", "not be measured"), (",", "no gate")]
)
def test_a_gate_that_cannot_hold_is_wrong_usage_before_the_data_are_read(gate: str, said: str) -> None:
    done = _run("eval", "--model", "m", "--quantized", "q", "--dataset", "no-such-file.jsonl", "--gate", gate)
    assert done.exit_code == 2 and said in " ".join(done.output.split())


def test_a_report_is_never_written_over_what_the_evaluation_reads(tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    data.write_text('[{"text": "The limit is 12.5%."}]')
    for option in ("--dataset", "--task", "--critical-words"):
        done = _run("eval", "--model", "m", "--quantized", "q", option, str(data), "--report", str(data))
        assert done.exit_code == 2 and "would be lost" in " ".join(done.output.split())
    assert data.read_text() == '[{"text": "The limit is 12.5%."}]'


def test_what_eval_says_to_type_next_repeats_what_was_given(text: Path, asked: dict[str, Any]) -> None:
    given = ["--model", "my m", "--quantized", "a", "--quantized", "b", "--dataset", str(text)]
    given += ["--window", "64", "--kv-cache", "fp8", "--gate", "kl<0.05"]
    done = _run("eval", *given, "--set", "stress", "--set", "draws=9")
    more = ["--set", "stress", "--set", "draws=9", "--long-dialogue", "200", "--report", "report.html"]
    assert _next(done) == ["eval", *given, *more]
    after = _run(*_next(done)[:-2])
    assert asked["long_dialogue"] == 200
    assert _next(after) == ["inspect", "a"]


def test_what_plan_and_a_dry_run_say_to_type_next_repeats_every_setting(model: Path, text: Path) -> None:
    settings = ["--num-samples", "4", "--seqlen", "64", "--preset", "high", "--symmetric", "--max-memory", "4GiB"]
    done = _run("plan", "--model", str(model), *settings)
    assert _next(done) == ["calibrate", "--model", str(model), "--dataset", "TEXT.jsonl", *settings]
    own = [*settings[:-2], "--rotation", "none", "--shadow-budget", "0.02", "--all-experts", "--seed", "3"]
    done = _run("calibrate", "--model", str(model), "--dataset", str(text), *own, "--dry-run")
    assert _next(done) == ["calibrate", "--model", str(model), "--dataset", str(text), *own]
    again = _run(*_next(done), "--dry-run")
    assert _next(again) == _next(done)


def test_a_dry_run_writes_nothing_and_refuses_the_data_that_calibrate_would(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = _run("calibrate", "--model", str(model), "--dataset", "missing.jsonl", "--dry-run")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "missing.jsonl: no such file or folder" in missing.stderr
    monkeypatch.setattr(tiny, "folder", lambda: model)
    assert is_packaged(str(model))
    assert _next(_run("calibrate", "--dry-run")) == ["calibrate"]
    assert list(Path().iterdir()) == []
