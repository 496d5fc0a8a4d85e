"""`glm5-quant`: the command line. Commands import what they need when they run, so that `--help` never loads torch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from glm5_quant import __version__
from glm5_quant.cli import calibrate, eval, export, inspect, plan, verify
from glm5_quant.cli.failures import exit_code

HELP = """Turn a Mixture-of-Experts language model into an INT4 checkpoint, and measure how good it is.

The usual order, bare on the packaged model: [bold]calibrate[/bold], [bold]export[/bold], [bold]eval[/bold].
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a gate failed, 75 stopped safely, 130 interrupted."""


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="glm5-quant",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_common)
    for module in (calibrate, export, eval, verify, plan, inspect):
        module.register(app)
    return app


def run() -> None:
    """Entry point of the `glm5-quant` script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a letter shows its code, instead of ending the run.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(exit_code(build()))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"glm5-quant {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass
