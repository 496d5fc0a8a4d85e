"""`glm5-quant eval`: how far exports are from their source, on text, over long dialogues, on numbers."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm5_quant.cli import options as opt
from glm5_quant.cli.defaults import existing_export, given, is_packaged, source_of_work, unless_default
from glm5_quant.cli.failures import FAILED, GATE_FAILED, guarded
from glm5_quant.cli.progress import StageProgress
from glm5_quant.cli.terminal import say, say_next, table, warn
from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded

if TYPE_CHECKING:
    from glm5_quant.eval import EvalResult
    from glm5_quant.model.texts import Texts


class KvCache(StrEnum):
    fp16 = "fp16"
    fp8 = "fp8"
    int4 = "int4"
    tiered = "tiered"


Quantized = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FOLDER",
        callback=opt.filled,
        help="Export folder; give it several times to compare.",
        show_default="WORK_DIR/export",
        rich_help_panel=opt.INPUT,
    ),
]
Window = Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of a window.", rich_help_panel=opt.SETTINGS)]
NumWindows = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Stop after so many.", show_default="all", rich_help_panel=opt.SETTINGS),
]
LongDialogue = Annotated[
    int | None,
    typer.Option(min=1, metavar="TURNS", help="Measure drift over this many turns.", rich_help_panel=opt.SETTINGS),
]
FreeRunning = Annotated[
    bool,
    typer.Option("--free-running", metavar="", help="Models also answer by themselves.", rich_help_panel=opt.SETTINGS),
]
KvCacheOption = Annotated[
    KvCache,
    typer.Option(help="Also read dialogues with a KV cache of this format.", rich_help_panel=opt.SETTINGS),
]
CriticalWords = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        callback=opt.filled,
        help="Words to watch, one a line; 'default' for ours.",
        rich_help_panel=opt.SETTINGS,
    ),
]
Task = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        callback=opt.filled,
        help="Number problems: GSM8K, SVAMP, CMATH; repeatable.",
        rich_help_panel=opt.INPUT,
    ),
]
Gate = Annotated[
    str | None,
    typer.Option(
        metavar="GATES",
        callback=opt.filled,
        help="Exit code 3 unless all hold, e.g. 'kl<0.05,numeric<0.5%'.",
        rich_help_panel=opt.SETTINGS,
    ),
]
Trace = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PROMPT",
        callback=opt.filled,
        help="Write how each token of it is routed to WORK_DIR/routing_trace.json; repeatable.",
        rich_help_panel=opt.OUTPUT,
    ),
]
Report = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        callback=opt.filled,
        help="Also write a .html page with plots, .md or .json; repeatable.",
        rich_help_panel=opt.OUTPUT,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME[=VALUE]",
        callback=opt.filled,
        help="Any other setting, e.g. num-dialogues=4, stress, decode-steps, sequential, source-cache=FOLDER; "
        "'help' lists all. Repeatable.",
        rich_help_panel=opt.SETTINGS,
    ),
]
FORMS = {".html": "to_html", ".md": "to_markdown", ".json": "to_json"}


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


@guarded
def evaluate(
    model: opt.SourceOfWork = None,
    quantized: Quantized = None,
    dataset: opt.Dataset = None,
    window: Window = 512,
    num_windows: NumWindows = None,
    long_dialogue: LongDialogue = None,
    free_running: FreeRunning = False,
    kv_cache: KvCacheOption = KvCache.fp16,
    critical_words: CriticalWords = None,
    task: Task = None,
    gate: Gate = None,
    settings: Set = None,
    work_dir: opt.WorkDir = opt.WORK_DIR,
    device: opt.Device = "cpu",
    seed: opt.Seed = 0,
    trace: Trace = None,
    report: Report = None,
    json: opt.Json = False,
) -> int:
    """Measure perplexity, divergence, number errors and drift of exports against their source."""
    if settings and "help" in settings:
        return _list_settings()
    _check_targets(report or (), _trace_file(work_dir) if trace else None, (dataset, critical_words, *(task or ())))
    chosen: dict[str, Any] = {
        "window": window,
        "num_windows": num_windows,
        "long_dialogue": long_dialogue,
        "free_running": free_running,
        "kv_cache": kv_cache.value,
        "critical_words": "" if critical_words is None else critical_words,
        "gates": "" if gate is None else gate,
        "seed": seed,
        "device": device,
    }
    chosen |= _other_settings(settings or [], chosen)
    _check_gates(chosen)
    exports = quantized or [str(existing_export(work_dir))]
    source = source_of_work(model, work_dir)
    texts, dialogues = _data(dataset, source, long_dialogue)
    inputs: dict[str, Any] = {"dialogues": dialogues, "tasks": task or (), "prompts": trace or ()}
    from glm5_quant.eval import evaluate as measure

    with StageProgress() as bar:
        result = measure(source, exports, texts, progress=bar.advance, warn=_warn_one, **inputs, **chosen)
    result = replace(result, command=shlex.join(["glm5-quant", *sys.argv[1:]]))
    show_result(result, report or [], json)
    if trace:
        write_traces(result, _trace_file(work_dir))
    repeated = given(
        evaluate,
        model=model,
        quantized=quantized,
        dataset=dataset,
        window=window,
        num_windows=num_windows,
        free_running=free_running,
        kv_cache=kv_cache,
        critical_words=critical_words,
        task=task,
        gate=gate,
        work_dir=work_dir,
        device=device,
        seed=seed,
    )
    if long_dialogue is None:
        say_next("eval", **repeated, set=settings, long_dialogue="200", report="report.html")
    elif quantized:
        say_next("inspect", quantized[0])
    else:
        say_next("inspect", work_dir=unless_default(work_dir))
    if result.status != "ok":
        return FAILED
    return 0 if result.gates_passed else GATE_FAILED


def _trace_file(work_dir: str) -> Path:
    return expanded(work_dir) / "routing_trace.json"


def _check_targets(reports: Sequence[str], trace: Path | None, inputs: Iterable[str | None]) -> None:
    """Refuse at the start what could not be written at the end, or would be written over what is read."""
    from glm5_quant.model.atomic import check_writable

    for name in reports:
        path = expanded(name)
        if path.suffix not in FORMS:
            raise typer.BadParameter(f"{name} ends in none of {', '.join(FORMS)}", param_hint="--report")
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{name}: no such folder", param_hint="--report")
        if path.is_dir():
            raise typer.BadParameter(f"{name}: is a folder, not a file to write", param_hint="--report")
        if any(path.resolve() == expanded(read).resolve() for read in inputs if read):
            raise typer.BadParameter(f"{name}: is read by this command, and would be lost", param_hint="--report")
        check_writable(path.parent)
    if trace is not None:
        if trace.is_dir():
            raise UserError("is a folder, not a file to write", file=trace, hint="Choose another --work-dir")
        # The work folder itself is made only when there is something to write.
        check_writable(next(folder for folder in trace.absolute().parents if folder.exists()))


def _warn_one(message: str) -> None:
    warn([message])


def _data(dataset: str | None, source: str, long_dialogue: int | None) -> tuple[Texts | None, Texts | None]:
    """Texts to score and dialogues to follow; None leaves the choice, which is the packaged corpus, to the evaluator.

    With `--long-dialogue`, rows of the data set that hold messages are the dialogues, and the others are texts.
    """
    if dataset is None:
        if long_dialogue is None and not is_packaged(source):
            message = "A model of your own needs text that it was not calibrated on."
            raise typer.BadParameter(message, param_hint="--dataset")
        return None, None
    from glm5_quant.model.texts import read_texts

    found = read_texts(dataset, split="test")
    warn(found.warnings)
    if long_dialogue is None:
        return found, None
    texts = tuple(row for row in found.rows if row.messages is None)
    dialogues = tuple(row for row in found.rows if row.messages is not None)
    return replace(found, rows=texts) if texts else None, replace(found, rows=dialogues) if dialogues else None


def _list_settings() -> int:
    """All settings with what they mean and their defaults, on stdout."""
    from glm5_quant.eval.config import EvalConfig

    print(inspect.cleandoc(EvalConfig.__doc__ or ""), end="\n\n")
    print(table(("setting", "default"), [(found.name, repr(found.default)) for found in fields(EvalConfig)]))
    return 0


def _other_settings(pairs: list[str], chosen: dict[str, Any]) -> dict[str, object]:
    """What `--set` asks for; wrong usage where it is no setting, or one that has its own option."""
    from glm5_quant.eval.config import parse_settings

    try:
        found = parse_settings(pairs)
    except UserError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error
    own = sorted(found.keys() & chosen.keys())
    if own:
        raise typer.BadParameter(f"has an option of its own: {', '.join(own)}", param_hint="--set")
    return found


def _check_gates(chosen: dict[str, Any]) -> None:
    """Wrong usage for a gate that cannot be read, or that asks for what will not be measured."""
    from glm5_quant.eval.config import EvalConfig
    from glm5_quant.eval.gates import check_measured, parse_gates

    config = EvalConfig(**chosen)
    try:
        check_measured(parse_gates(config.gates), config)
    except UserError as error:
        raise typer.BadParameter(str(error).removeprefix("--gate: "), param_hint="--gate") from error


def show_result(result: EvalResult, reports: list[str], json: bool) -> None:
    """Print the tables or JSON; write the report files that were asked for, in the form that their endings name."""
    from glm5_quant import eval as room
    from glm5_quant.model.atomic import write_bytes

    # First what is sure to arrive: a disk that is full by now must not cost the result.
    print(room.to_json(result) if json else room.to_table(result), end="", flush=True)
    for name in reports:
        path = expanded(name)
        write_bytes(path, getattr(room, FORMS[path.suffix])(result).encode())
        say(f"Report: {name}")


def write_traces(result: EvalResult, path: Path) -> None:
    """Write the routing traces of all models as JSON."""
    from glm5_quant.eval import traces_json
    from glm5_quant.model.atomic import write_bytes

    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, traces_json(result).encode())
    say(f"Routing: {path}")
