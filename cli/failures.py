"""How a command ends: exit codes, one message for what went wrong, signals.

    0 done   1 failed   2 wrong usage   3 done, but a gate failed   75 stopped safely, run again to go on   130
    interrupted

SIGINT (Ctrl-C) stops at once. SIGTERM, which schedulers send before they kill, stops a calibration after the layer in
work; everything else at once, since nothing there is ever half written.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import ParamSpec

import typer

from glm5_quant.cli.terminal import say
from glm5_quant.model.errors import UserError

FAILED, USAGE, GATE_FAILED, STOPPED, INTERRUPTED = 1, 2, 3, 75, 130
DEBUG = "GLM5_QUANT_DEBUG"
_P = ParamSpec("_P")
_Handler = Callable[[int, FrameType | None], None]


class StoppedSafely(BaseException):
    """SIGTERM was honoured at a point from which the next run goes on. Not an Exception: nothing may swallow it."""


class StopRequest:
    """Whether SIGTERM came; `check` raises `StoppedSafely` at the caller's safe point if it did."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: the first time remember, the second time stop at once."""
        if self.requested:
            raise StoppedSafely
        self.requested = True
        say("Stopping after the layer in work; a second signal stops at once.")

    def check(self) -> None:
        """Call where everything so far is safe on disk."""
        if self.requested:
            raise StoppedSafely


@contextmanager
def stop_at_safe_points() -> Iterator[StopRequest]:
    """Within this block SIGTERM only asks for a stop; the block calls `check` where it is safe."""
    request = StopRequest()
    with _sigterm(request.handle):
        yield request


def guarded(command: Callable[_P, int | None]) -> Callable[_P, None]:
    """Turn whatever a command raises into one message and the exit code that scripts rely on."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        with _sigterm(_stop_now):
            code = exit_code(lambda: command(*args, **kwargs))
        raise typer.Exit(code)

    return run


def exit_code(body: Callable[[], int | None]) -> int:
    """Run `body`; say what went wrong, if anything, in one message; return the exit code."""
    try:
        return body() or 0
    except KeyboardInterrupt:
        say("Interrupted: run the same command again to go on.")
        return INTERRUPTED
    except StoppedSafely:
        say("Stopped safely: run the same command again to go on.")
        return STOPPED
    except BrokenPipeError:
        # The reader of our output (`| head`) has seen enough. Python would complain once more at exit.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        say(f"error: {describe(error)}")
        return FAILED


def describe(error: Exception) -> str:
    """One message for an error: ours as it is, the system's with the file, anything else marked as unexpected."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory ({error or 'no details'}). Fewer --num-samples or a lower --max-memory need less"
    return f"unexpected {type(error).__name__}: {error}. {DEBUG}=1 shows where"


def _stop_now(number: int, frame: FrameType | None) -> None:
    raise StoppedSafely


@contextmanager
def _sigterm(handler: _Handler) -> Iterator[None]:
    try:
        before = signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not the main thread, as in some notebooks: signals are someone else's business there
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
