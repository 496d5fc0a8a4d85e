from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer

from glm5_quant.cli import failures
from glm5_quant.model.errors import UserError

COMMAND = """
import time
from pathlib import Path
import typer
from glm5_quant.cli.failures import guarded, stop_at_safe_points

app = typer.Typer(pretty_exceptions_enable=False)

@app.command()
@guarded
def work(folder: Path) -> None:
    {body}

app()
"""
SLEEP = "(folder / 'ready').touch(); time.sleep(100)"
LAYERS = """
    with stop_at_safe_points() as stop:
        for layer in range(100):
            (folder / 'ready').touch()
            time.sleep(0.2)
            (folder / str(layer)).touch()
            stop.check()
"""


def _signalled(folder: Path, body: str, *signals: int) -> subprocess.CompletedProcess[str]:
    """Run a command, send it the signals, each after it has answered the one before; how it ended.

    Jobs that a shell puts in the background ignore SIGINT, and what they start inherits that: it is set back.
    """
    code = COMMAND.format(body=body)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    answers = []
    for number in signals[:-1]:
        process.send_signal(number)
        assert process.stderr is not None
        answers.append(process.stderr.readline())
    process.send_signal(signals[-1])
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(code, process.returncode, out, "".join(answers) + err)


def test_ctrl_c_ends_at_once_with_130_and_no_traceback(tmp_path: Path) -> None:
    ended = _signalled(tmp_path, SLEEP, signal.SIGINT)
    assert (ended.returncode, ended.stderr) == (130, "Interrupted: run the same command again to go on.\n")


def test_sigterm_ends_with_75_and_says_to_run_again(tmp_path: Path) -> None:
    ended = _signalled(tmp_path, SLEEP, signal.SIGTERM)
    assert (ended.returncode, ended.stderr) == (75, "Stopped safely: run the same command again to go on.\n")


def test_sigterm_during_layers_waits_for_the_layer_in_work(tmp_path: Path) -> None:
    ended = _signalled(tmp_path, LAYERS, signal.SIGTERM)
    assert ended.returncode == 75
    assert ended.stderr.splitlines()[0] == "Stopping after the layer in work; a second signal stops at once."
    assert (tmp_path / "0").exists()


def test_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    ended = _signalled(tmp_path, LAYERS.replace("0.2", "100"), signal.SIGTERM, signal.SIGTERM)
    assert ended.returncode == 75
    assert not (tmp_path / "0").exists()


def test_ctrl_c_during_layers_does_not_wait_either(tmp_path: Path) -> None:
    ended = _signalled(tmp_path, LAYERS.replace("0.2", "100"), signal.SIGINT)
    assert ended.returncode == 130


def test_a_reader_that_stops_reading_causes_no_complaint(tmp_path: Path) -> None:
    code = COMMAND.format(body="[print('line ' * 100) for _ in range(10000)]")
    command = f'{sys.executable} -c "$CODE" {tmp_path} | head -1'
    ended = subprocess.run(["sh", "-c", command], env={**os.environ, "CODE": code}, capture_output=True, text=True)
    assert ended.stdout.startswith("line line")
    assert ended.stderr == ""


def _fails(error: BaseException) -> int:
    def body() -> int:
        raise error

    return failures.exit_code(body)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("is empty", file="a.txt"), "error: a.txt: is empty\n"),
        (OSError(28, "No space left on device", "out/a"), "error: out/a: No space left on device\n"),
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
        (
            MemoryError("12 GiB"),
            "error: out of memory (12 GiB). Fewer --num-samples or a lower --max-memory need less\n",
        ),
        (RuntimeError("odd"), "error: unexpected RuntimeError: odd. GLM5_QUANT_DEBUG=1 shows where\n"),
    ],
)
def test_an_error_is_one_message_without_a_traceback(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fails(error) == 1
    assert capsys.readouterr().err == message


def test_the_debug_variable_shows_where_it_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLM5_QUANT_DEBUG", "1")
    assert _fails(UserError("is empty")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_result_becomes_the_exit_code() -> None:
    assert failures.exit_code(lambda: None) == 0
    assert failures.exit_code(lambda: 3) == 3


def test_usage_errors_are_left_to_the_parser() -> None:
    with pytest.raises(typer.BadParameter):
        _fails(typer.BadParameter("no"))


def test_commands_also_run_outside_the_main_thread() -> None:
    codes: list[int] = []

    def work() -> None:
        try:
            failures.guarded(lambda: 3)()
        except typer.Exit as ended:
            codes.append(ended.exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert codes == [3]


def test_the_signal_handler_of_before_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with failures.stop_at_safe_points() as stop:
        assert signal.getsignal(signal.SIGTERM) == stop.handle
        stop.check()
    assert signal.getsignal(signal.SIGTERM) == before
