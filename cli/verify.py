"""`glm5-quant verify`: is this export whole, finite, true to its source, and which runtimes load it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5_quant.cli import options as opt
from glm5_quant.cli.defaults import calibration_folder, existing_export, needed_data, unless_default
from glm5_quant.cli.failures import FAILED, guarded
from glm5_quant.cli.progress import ByteProgress
from glm5_quant.cli.terminal import facts, human_bytes, json_text, say, say_next, table, warn

if TYPE_CHECKING:
    from glm5_quant.model.verifying import VerifyReport


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


@guarded
def verify(
    folder: Annotated[
        str | None, typer.Argument(callback=opt.filled, help="Export folder.", show_default="WORK_DIR/export")
    ] = None,
    model: opt.SourceOfWork = None,
    work_dir: opt.WorkDir = opt.WORK_DIR,
    json: opt.Json = False,
) -> int:
    """Read an export back: every tensor, shape and scale, sampled errors against the source, runtimes that load it.

    Exit code 1 if anything is wrong with it.
    """
    path = str(existing_export(work_dir)) if folder is None else folder
    source = _calibrated_source(work_dir, folder) if model is None else model
    from glm5_quant.model import verifying

    with ByteProgress() as bar:
        report = verifying.verify(path, source, progress=bar.advance)
    if source is None:
        say("Not compared with the source: name it with --model.")
    show_report(report, json)
    if not report.ok:
        return FAILED
    # Without a source both are for the user to fill in: `eval` cannot do without it.
    named, data = (model, needed_data(source)) if source is not None else ("SOURCE", "TEXT.jsonl")
    say_next("eval", quantized=folder, model=named, dataset=data, work_dir=unless_default(work_dir))
    return 0


def _calibrated_source(work_dir: str, folder: str | None) -> str | None:
    """The source of the work folder's own export, if it is still there; nothing is guessed for other folders."""
    if folder is not None or not (calibration_folder(work_dir) / "manifest.json").exists():
        return None
    from glm5_quant.model.journal import open_journal

    source = open_journal(calibration_folder(work_dir)).manifest.source.folder
    return source if Path(source).is_dir() else None


def show_report(report: VerifyReport, json: bool) -> None:
    """Print what was found: warnings and problems as talk, the facts or JSON as data."""
    warn(report.warnings)
    for problem in report.problems:
        say(f"problem: {problem}")
    if json:
        print(json_text(report))
        return
    print(facts(*_facts(report)))
    if report.runtimes:
        rows = [(v.runtime, "yes" if v.loads else "no", v.basis, v.reason or v.how) for v in report.runtimes]
        print(f"\n{table(('runtime', 'loads', 'by', 'why not, or how'), rows, fold=True)}")


def _facts(report: VerifyReport) -> list[tuple[str, object]]:
    errors = sorted(sample.error for sample in report.samples)
    middle = f"median {errors[len(errors) // 2]:.4f}, largest {errors[-1]:.4f}" if errors else None
    eight = f" ({report.eight_bit:,} in 8 bits)" if report.eight_bit else ""
    bits = "" if report.bits_per_weight is None else f", {report.bits_per_weight:.3f} bits a weight"
    return [
        ("folder", report.folder),
        ("verdict", "whole and readable" if report.ok else f"{len(report.problems)} problems"),
        ("tensors", f"{report.tensors:,}, {human_bytes(report.tensor_bytes)}"),
        ("quantized", f"{report.packed_linears:,} matrices{eight}{bits}"),
        ("unpacked", f"{report.unpacked_matrices:,} matrices, all of them in the ignore list" if report.ok else None),
        ("format", None if report.symmetric is None else "symmetric" if report.symmetric else "asymmetric"),
        ("sidecar", ", ".join(report.features) or "nothing"),
        ("same as source", f"{report.compared_tensors:,} tensors bit for bit" if report.compared_tensors else None),
        ("sampled error", f"{len(errors)} matrices, {middle}" if errors else None),
    ]
