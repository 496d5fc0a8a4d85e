"""`glm5-quant export`: journal and source become the INT4 checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5_quant.cli import options as opt
from glm5_quant.cli.defaults import calibration_folder, export_folder, needed_data, source_of_work, unless_default
from glm5_quant.cli.failures import guarded
from glm5_quant.cli.progress import ByteProgress
from glm5_quant.cli.terminal import facts, human_bytes, json_text, say, say_next, warn

if TYPE_CHECKING:
    from glm5_quant.model.exporting import ExportReport


def register(app: typer.Typer) -> None:
    app.command("export")(export)


@guarded
def export(
    model: opt.SourceOfWork = None,
    work_dir: opt.WorkDir = opt.WORK_DIR,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            callback=opt.filled,
            help="Folder to write.",
            show_default="WORK_DIR/export",
            rich_help_panel=opt.OUTPUT,
        ),
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(metavar="SIZE", callback=opt.filled, help="Largest weight file.", rich_help_panel=opt.OUTPUT),
    ] = "5GB",
    overwrite: opt.Overwrite = False,
    json: opt.Json = False,
) -> None:
    """Write the INT4 checkpoint of what was calibrated. The model is not run again.

    A killed export is taken up where it stopped when the same command is given again.
    """
    source = source_of_work(model, work_dir)
    from glm5_quant.model import exporting

    output = str(export_folder(work_dir)) if output_dir is None else output_dir
    with ByteProgress() as bar:
        report = exporting.export(
            source,
            calibration_folder(work_dir),
            output,
            max_shard_bytes=opt.size(max_shard_size, "--max-shard-size") or exporting.DEFAULT_SHARD_BYTES,
            overwrite=overwrite or (output_dir is None and _is_own(output)),
            progress=bar.advance,
        )
    show_report(report, json, output)
    say_next("verify", output_dir, model=model, work_dir=unless_default(work_dir) if output_dir is None else None)
    data = needed_data(source)
    say_next("eval", model=model, quantized=output_dir, dataset=data, work_dir=unless_default(work_dir))


def _is_own(folder: str) -> bool:
    """Whether the work folder holds an export of ours, which a second bare `export` renews; nothing else is touched."""
    from glm5_quant.model.sidecar import JSON_NAME

    found = (Path(folder) / JSON_NAME).exists()
    if found:
        say(f"Renewing the export of an earlier run in {folder}")
    return found


def show_report(report: ExportReport, json: bool, written: str) -> None:
    """Print the report: warnings as talk, the facts or JSON as data. written: the folder as the user named it."""
    warn(report.warnings)
    if report.leftovers or report.shards_reused:
        found = f"{len(report.leftovers)} files of a stopped export were found"
        say(f"{found}; {report.shards_reused} finished shards were kept.")
    if json:
        print(json_text(report))
        return
    kept = f"{report.kept_tensors} tensors in source precision"
    print(
        facts(
            ("written", written),
            ("size", f"{human_bytes(report.tensor_bytes)} of {human_bytes(report.source_bytes)} in the source"),
            ("quantized", f"{report.packed_linears} matrices, {report.bits_per_weight:.3f} bits a weight"),
            ("whole model", f"{report.bits_per_parameter:.3f} bits a parameter"),
            ("kept", f"{kept}, {report.mtp_tensors} of them of MTP layers" if report.mtp_tensors else kept),
            ("sidecar", human_bytes(report.sidecar_bytes)),
            ("format", "symmetric" if report.symmetric else "asymmetric"),
            ("zero blocks", sum(report.zero_blocks.values())),
            ("dropped", ", ".join(f"{name} ({why})" for name, why in report.dropped.items()) or "nothing"),
        )
    )
