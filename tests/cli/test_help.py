from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import glm5_quant.cli.main as main

COMMANDS = ("calibrate", "export", "eval", "verify", "plan", "inspect")
HEAVY = ("torch", "transformers", "numpy", "datasets", "safetensors", "tqdm")


def _options(command: str) -> list[Any]:
    group: Any = typer.main.get_command(main.build())
    return [item for item in group.commands[command].params if item.param_type_name == "option"]


@pytest.mark.parametrize("arguments", [["--help"], ["calibrate", "--help"], ["eval", "-h"], ["--version"]])
def test_help_loads_none_of_the_heavy_libraries(arguments: list[str]) -> None:
    code = (
        "import sys; from glm5_quant.cli.main import run\n"
        f"sys.argv = ['glm5-quant', *{arguments!r}]\n"
        "try: run()\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_at_most_18_options_grouped_and_in_kebab_case(command: str) -> None:
    options = [option for option in _options(command) if option.name != "help"]
    assert len(options) <= 18
    for option in options:
        assert re.fullmatch(r"--[a-z0-9]+(-[a-z0-9]+)*", option.opts[0])
        assert option.help
        assert option.rich_help_panel in ("Input", "Settings", "Run", "Output")


def test_calibrate_has_the_options_that_scripts_rely_on() -> None:
    names = {name for option in _options("calibrate") for name in option.opts}
    wanted = """--model --dataset --num-samples --seqlen --work-dir --device --max-memory --seed --resume --symmetric
    --preset --rotation --activations --shadow-budget --dry-run --overwrite --json"""
    assert set(wanted.split()) <= names


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_help_in_a_narrow_terminal(command: str) -> None:
    result = CliRunner().invoke(main.build(), [command, "--help"], env={"COLUMNS": "60"})
    assert result.exit_code == 0
    assert command in result.stdout


def test_the_version_is_the_package_version() -> None:
    from glm5_quant import __version__

    assert CliRunner().invoke(main.build(), ["--version"]).stdout == f"glm5-quant {__version__}\n"


WRONG = [
    ["calibrate", "--preset", "best"],
    ["calibrate", "--num-samples", "0"],
    ["calibrate", "--seqlen", "many"],
    ["calibrate", "--shadow-budget", "2"],
    ["calibrate", "--max-memory", "lots", "--model", "m", "--dataset", "d"],
    ["calibrate", "--model", "own"],
    ["eval", "--long-dialogue", "0"],
    ["eval", "--no-such-option"],
    ["verify", "one", "two"],
    ["no-such-command"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: " ".join(arguments))
def test_wrong_usage_ends_with_2_and_names_what_is_wrong(arguments: list[str]) -> None:
    result = CliRunner().invoke(main.build(), arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "Usage" in result.stderr
    assert result.stdout == ""
