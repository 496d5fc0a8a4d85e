"""`glm5-quant inspect`: tables of a journal or an export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm5_quant.cli import options as opt
from glm5_quant.cli.defaults import calibration_folder
from glm5_quant.cli.failures import guarded
from glm5_quant.cli.terminal import ablation, errors, facts, human_bytes, json_text, table
from glm5_quant.model.errors import UserError

if TYPE_CHECKING:
    from glm5_quant.model.checkpoint import Checkpoint
    from glm5_quant.model.journal import Journal


def register(app: typer.Typer) -> None:
    app.command("inspect")(inspect)


@guarded
def inspect(
    folder: Annotated[
        str | None,
        typer.Argument(
            callback=opt.named_model,
            help="Journal, export or model folder, or glm5-tiny.",
            show_default="WORK_DIR/calibration",
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Show every matrix of one layer.", rich_help_panel=opt.OUTPUT)
    ] = None,
    work_dir: opt.WorkDir = opt.WORK_DIR,
    json: opt.Json = False,
) -> None:
    """Show what a journal, an export or a model folder holds."""
    from glm5_quant.model.checkpoint import open_checkpoint
    from glm5_quant.model.files import expanded
    from glm5_quant.model.journal import open_journal

    path = expanded(folder) if folder is not None else calibration_folder(work_dir)
    if not (path / "manifest.json").exists() and (path / "calibration" / "manifest.json").exists():
        path = path / "calibration"
    if (path / "manifest.json").exists() or folder is None:
        _show_journal(open_journal(path), layer, json)
    else:
        _show_checkpoint(open_checkpoint(path), layer, json)


def _show_journal(journal: Journal, layer: int | None, json: bool) -> None:
    finished = journal.finished()
    if layer is not None and layer not in finished:
        there = f"0 to {len(finished) - 1}" if finished else "a later look: no layer is finished yet"
        raise UserError("no such finished layer", file=journal.folder, found=layer, expected=there)
    records = [journal.record(number) for number in (finished if layer is None else [layer])]
    if json:
        print(json_text({"manifest": journal.manifest, "layers": records}))
        return
    manifest = journal.manifest
    print(
        facts(
            ("journal", journal.folder),
            ("model", f"{manifest.source.folder} ({manifest.source.model_type}, {manifest.source.dtype})"),
            ("data", f"{manifest.data.name}: {manifest.data.windows} windows of {manifest.data.seqlen} tokens"),
            ("layers", f"{len(finished)} of {manifest.layers} finished"),
        )
    )
    if records:
        print()
        print(_modules(records[0]) if layer is not None else _layers(records))
        _show_ablation(records)


def _layers(records: list[Any]) -> str:
    from glm5_quant.calibrate.report import layer_errors

    means = {one.layer: one for one in layer_errors(records)}
    rows = []
    for record in records:
        mean = means.get(record.layer)
        worst, module = max(record.modules.items(), key=lambda item: item[1].shown_error, default=("", None))
        seen = record.coverage
        rows.append(
            (
                record.layer,
                len(record.modules),
                None if mean is None else f"{mean.error:.4f}",
                *(errors(mean.held_out, mean.held_out_rtn) if mean is not None else ("-", "-", "-")),
                None if module is None else f"{module.shown_error:.4f}",
                worst.split(".", 3)[-1],
                f"{min(seen)} to {max(seen)}" if seen else None,
                f"{record.seconds:.1f}",
            )
        )
    headers = ("layer", "matrices", "error", "held out", "round-to-nearest", "ratio", "worst", "which")
    return table((*headers, "tokens an expert", "seconds"), rows)


def _show_ablation(records: list[Any]) -> None:
    from glm5_quant.calibrate.ablation import worths

    found = worths(errors for record in records for errors in record.ablation.values())
    if found:
        print()
        print(ablation(found))


def _modules(record: Any) -> str:
    rows = [
        (
            name.split(".", 3)[-1],
            f"{m.n} x {m.k}",
            m.tokens,
            *errors(m.error, m.error_rtn)[:2],
            *errors(m.held_out_error, m.held_out_rtn),
            m.alpha,
            m.zero_blocks,
        )
        for name, m in record.modules.items()
    ]
    headers = ("matrix", "size", "tokens", "error", "round-to-nearest", "held out", "round-to-nearest", "ratio")
    return table((*headers, "alpha", "zero blocks"), rows)


def _show_checkpoint(checkpoint: Checkpoint, layer: int | None, json: bool) -> None:
    infos = list(checkpoint.tensors.values())
    if layer is not None:
        infos = [info for info in infos if f".layers.{layer}." in f".{info.name}"]
        if not infos:
            raise UserError("no tensor of this layer", file=checkpoint.folder, item="--layer", found=layer)
    if json:
        print(json_text({"folder": checkpoint.folder, "tensors": infos}))
        return
    print(
        facts(
            ("folder", checkpoint.folder),
            ("model type", checkpoint.config.get("model_type")),
            ("format", _format(checkpoint.config)),
            ("tensors", len(infos)),
            ("bytes", human_bytes(sum(info.nbytes for info in infos))),
        )
    )
    print()
    if layer is not None:
        rows = [(info.name, info.dtype, "x".join(map(str, info.shape)), human_bytes(info.nbytes)) for info in infos]
        print(table(("tensor", "dtype", "shape", "size"), rows))
    else:
        print(_by_kind(infos))


def _format(config: dict[str, Any]) -> str:
    from glm5_quant.model.fp8 import quantization_config

    found = quantization_config(config)
    return str(found.get("format") or found.get("quant_method") or "not quantized")


def _by_kind(infos: list[Any]) -> str:
    """Tensors grouped by name with numbers blanked: a 60,000-tensor model fits on one screen."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for info in infos:
        name = ".".join("*" if part.isdigit() else part for part in info.name.split("."))
        count = kinds.setdefault((name, info.dtype), [0, 0])
        count[0] += 1
        count[1] += info.nbytes
    rows = [(name, dtype, count, human_bytes(size)) for (name, dtype), (count, size) in sorted(kinds.items())]
    return table(("tensors", "dtype", "count", "size"), rows)
