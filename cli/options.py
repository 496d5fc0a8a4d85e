"""Options that several commands share, each defined once so that it means the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

INPUT, SETTINGS, RUN, OUTPUT = "Input", "Settings", "Run", "Output"
WORK_DIR = "glm5-quant-work"


def filled(value: Any) -> Any:
    """Callback of every option whose text may not be empty: an unset shell variable is no "not given"."""
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str) and not text.strip():
            raise typer.BadParameter("is empty: an unset shell variable?")
    return value


def named_model(value: str | None) -> str | None:
    """A model as named; `glm5-tiny`, the name that help and docs use, is the packaged one unless a folder has it."""
    named = filled(value)
    if named == "glm5-tiny" and not Path(named).exists():
        from glm5_quant.cli.defaults import packaged_model

        return packaged_model()
    return cast("str | None", named)


Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        callback=named_model,
        help="Source model: folder, hub id or glm5-tiny.",
        show_default="glm5-tiny, packaged",
        rich_help_panel=INPUT,
    ),
]
SourceOfWork = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        callback=named_model,
        help="Source model: folder, hub id or glm5-tiny.",
        show_default="as calibrated",
        rich_help_panel=INPUT,
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        metavar="DATA",
        callback=filled,
        help="Sample text: a .txt, .jsonl, .json or .parquet file (or .gz), a folder of them, or a hub id.",
        show_default="the corpus of glm5-tiny",
        rich_help_panel=INPUT,
    ),
]
NumSamples = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Calibration windows.",
        show_default="as many as the model needs, 128 at most",
        rich_help_panel=INPUT,
    ),
]
SeqLen = Annotated[int, typer.Option("--seqlen", min=2, metavar="N", help="Tokens of a window.", rich_help_panel=INPUT)]
WorkDir = Annotated[
    str, typer.Option(metavar="FOLDER", callback=filled, help="Folder for journal and export.", rich_help_panel=RUN)
]
Device = Annotated[
    str, typer.Option(metavar="DEVICE", callback=filled, help="cpu, cuda or cuda:N.", rich_help_panel=RUN)
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=filled,
        help="Stay below this, e.g. 24GiB.",
        show_default="60% of memory",
        rich_help_panel=RUN,
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Decides every random choice.", rich_help_panel=RUN)]
Symmetric = Annotated[
    bool,
    typer.Option(
        "--symmetric",
        metavar="",
        help="No zero-points, for readers that drop them; costs accuracy.",
        rich_help_panel=SETTINGS,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", metavar="", help="Replace what another run left there.", rich_help_panel=OUTPUT)
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print the result as JSON.", rich_help_panel=OUTPUT)]


def size(text: str | None, option: str) -> int | None:
    """Bytes of an option such as `5GB` or `512MiB`.

    Raises typer.BadParameter, which is a usage error.
    """
    from glm5_quant.calibrate.settings import parse_bytes

    try:
        return parse_bytes(text, option)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class Preset(StrEnum):
    fast = "fast"
    default = "default"
    high = "high"


class Resume(StrEnum):
    auto = "auto"
    required = "required"
    never = "never"


class Rotation(StrEnum):
    none = "none"
    folded = "folded"
    full = "full"


class Activations(StrEnum):
    none = "none"
    int8 = "int8"
    int4_channel = "int4-channel"
    int4_block = "int4-block"


def _preset(text: str) -> str:
    """A preset's name or a TOML file's; anything else is a usage error."""
    if text in list(Preset) or text.endswith(".toml"):
        return text
    raise typer.BadParameter(f"{text!r} is neither one of {', '.join(Preset)} nor a .toml file.")


PresetOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE.toml",
        callback=_preset,
        help='fast; default; high, which only this package loads; or a TOML file: base = "default" and single '
        "settings, such as routing_exponent = 2.",
        rich_help_panel=SETTINGS,
    ),
]
AS_PRESET = "by preset"
"""How a default that depends on the preset is shown in the help."""
