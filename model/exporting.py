"""Journal + source checkpoint -> INT4 checkpoint folder, one tensor in memory at a time.

For each source tensor: packed in the journal -> the packed parts; replaced in the journal -> that; else a copy (folded
and rotated first where the journal is of a rotated stream). The base is what compressed-tensors calls `pack-quantized`;
what only this package reads goes to the `eampq/` folder. Same inputs, same bytes; a killed export is taken up where it
stopped; a failed one leaves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from glm5_quant.model import atomic, input_scales, sidecar, staging
from glm5_quant.model.card import CARD, CardFacts, as_kept, kept_name, write_card
from glm5_quant.model.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.export_plan import SCALE, ExportPlan, make_plan, tensor_parallel_sizes
from glm5_quant.model.exported import Exported
from glm5_quant.model.families import Linear, family_of, linears, mtp_tensors
from glm5_quant.model.files import INDEX_NAME, expanded
from glm5_quant.model.fp8 import Fp8Scheme
from glm5_quant.model.journal import Journal, file_sha256, open_journal
from glm5_quant.model.rotated import as_rotated
from glm5_quant.model.runtimes import runtime_verdicts
from glm5_quant.model.safetensors_header import read_header
from glm5_quant.model.scheme import FORMAT, NUMERIC_KEY, OWN_FORMAT, InputScheme, Scheme, export_config, rotation_of
from glm5_quant.model.shards import Spec, Written, shard_names, split_into_shards, write_shard
from glm5_quant.model.verifying import check_structure

DEFAULT_SHARD_BYTES = 5_000_000_000
_AGAIN = "Run `glm5-quant calibrate` again with --resume never"
_FINISH_AGAIN = "Remove finish.json of the journal, and run the same `glm5-quant calibrate` again: it makes both anew"
_SLACK_BYTES = 1 << 16  # headers, index, directory blocks
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What `export` wrote.

    Sizes in bytes; `bits_per_weight` counts codes, scales, zero-points and shapes over the quantized weights,
    `bits_per_parameter` all tensors over all parameters. `zero_blocks`: blocks whose weights are all zero, by matrix.
    `tp_sizes`: by role, the tensor-parallel sizes that cut no block. `dropped`: source tensors left out, with the
    reason. `leftovers`: what a killed export had left. `files`: every file, with its SHA-256, in name order.
    """

    output: Path
    files: tuple[Written, ...]
    tensor_bytes: int
    source_bytes: int
    sidecar_bytes: int
    packed_linears: int
    kept_tensors: int
    replaced_tensors: int
    mtp_tensors: int
    symmetric: bool
    bits_per_weight: float
    bits_per_parameter: float
    zero_blocks: dict[str, int]
    tp_sizes: dict[str, list[int]]
    dropped: dict[str, str]
    leftovers: tuple[str, ...]
    shards_reused: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """Source and journal, opened and checked against each other."""

    source: Checkpoint
    journal: Journal
    tensors: Checkpoint
    linears: list[Linear]
    plan: ExportPlan
    inputs: InputScheme


def export(
    checkpoint: str | Path,
    journal: str | Path,
    output: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the INT4 checkpoint of a calibrated model. `progress(done_bytes, total_bytes, file)` is called per tensor.

    Raises:
        UserError: the journal is incomplete or of another source, the output folder is not empty (without
            `overwrite`), overlaps an input, is being written by another export or cannot be written, the disk is too
            small or fills up, a weight is not finite. Nothing is left behind then.
    """
    if max_shard_bytes < 1:
        raise UserError("setting out of range", item="max_shard_bytes", found=max_shard_bytes, expected="1 or more")
    output, journal = expanded(output).absolute(), expanded(journal)
    source = open_checkpoint(checkpoint)
    staging.check_place(output, source.folder, journal)
    with staging.only_export(output):
        inputs = _open(source, journal)
        layout = _Layout.of(inputs, max_shard_bytes)
        stage = staging.open_stage(output, layout.fingerprint(inputs), set(layout.names), overwrite=overwrite)
        try:
            atomic.check_free_space(output, layout.bytes_to_write(stage.files) + _SLACK_BYTES)
            files, reused = _write(inputs, layout, stage.files, progress)
            made = check_structure(open_checkpoint(stage.files))
            if made.problems:
                found = "; ".join(made.problems[:3])
                raise UserError("the export does not pass its own check", file=output, found=found)
            assert made.exported is not None
            report = _report(inputs, output, layout, stage, files, reused)
            if layout.card is not None:
                report = _with_card(inputs, layout.card, stage.files, report, made.exported)
            stage.publish(layout.names)
        except Exception:
            stage.discard()
            raise
    return report


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Which file holds what: base shards, sidecar shards, side files; `names` lists every file of the export. `card`:
    the source's model card, in whose place the export has its own."""

    shards: dict[str, list[Spec]]
    sidecar: dict[str, list[Spec]]
    side_files: dict[str, Path]
    card: str | None
    names: list[str]

    @classmethod
    def of(cls, inputs: _Inputs, max_shard_bytes: int) -> _Layout:
        base = split_into_shards(inputs.plan.groups, max_shard_bytes)
        extra = split_into_shards(([spec] for spec in inputs.plan.sidecar), max_shard_bytes)
        shards = dict(zip(shard_names(len(base)), base, strict=True))
        names = [f"{sidecar.FOLDER}/{name}" for name in shard_names(len(extra), sidecar.FOLDER)]
        folder = inputs.source.folder
        side = {path.relative_to(folder).as_posix(): path for path in inputs.source.side_files()}
        side = {name: path for name, path in side.items() if not name.startswith(f"{sidecar.FOLDER}/")}
        kept = kept_name(side) if CARD in side else None
        side = as_kept(side)
        everything = [*shards, *names, sidecar.JSON_NAME, *side, *([CARD] if kept else []), INDEX_NAME]
        return cls(
            shards=shards,
            sidecar=dict(zip(names, extra, strict=True)),
            side_files=side,
            card=kept,
            names=[*everything, staging.CONFIG_NAME],
        )

    def bytes_to_write(self, files: Path) -> int:
        """Bytes still to be written, given what a killed run finished."""
        tensors = {**self.shards, **self.sidecar}
        missing = (specs for name, specs in tensors.items() if not (files / name).exists())
        side = sum(path.stat().st_size for path in self.side_files.values())
        return side + sum(spec.nbytes + len(spec.name) + 100 for specs in missing for spec in specs)

    def fingerprint(self, inputs: _Inputs) -> dict[str, Any]:
        """What decides the bytes of the shards, so that a later run knows whether finished ones are its own."""
        journal = inputs.journal
        layers = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in _layer_files(journal)}
        return {
            "manifest": file_sha256(journal.folder / "manifest.json"),
            "layers": layers,
            "shards": {name: [len(specs), sum(s.nbytes for s in specs)] for name, specs in self.shards.items()},
            "names": self.names,
        }


def _open(source: Checkpoint, journal_folder: Path) -> _Inputs:
    journal = open_journal(journal_folder)
    if not journal.complete:
        done = len(journal.finished())
        after = " but not the step after the last" if done == journal.manifest.layers else ""
        raise UserError(
            "calibration is not finished",
            file=journal.folder,
            found=f"{done} of {journal.manifest.layers} layers{after}",
            hint="Run the same `glm5-quant calibrate` command again: it goes on where it stopped",
        )
    _check_source(source, journal)
    source = as_rotated(source, rotation_of(journal.manifest.settings))
    tensors: dict[str, TensorInfo] = {}
    _check_layers(journal)
    for path in _layer_files(journal):
        tensors |= read_header(path)
    found = linears(source, family_of(source.config, file=source.config_file))
    parts = Checkpoint(journal.folder, {}, tensors, {}, Fp8Scheme())
    plan = make_plan(source, found, tensors)
    inputs = InputScheme.of_settings(journal.manifest.settings, file=journal.folder / "manifest.json")
    four = {name: shape for name, shape in plan.packed.items() if name not in plan.eight}
    faults = input_scales.header_faults({spec.name: spec for spec in plan.sidecar}, four, inputs.activations)
    if faults:
        raise UserError(faults[0], file=journal.folder, hint=_AGAIN)
    return _Inputs(source=source, journal=journal, tensors=parts, linears=found, plan=plan, inputs=inputs)


def _layer_files(journal: Journal) -> list[Path]:
    extra = journal.tables_file
    files = [journal.layer_file(layer) for layer in range(journal.manifest.layers)]
    shadows = [journal.shadow_file] if journal.finish_record().shadows_sha256 else []
    return files + ([extra] if extra.exists() else []) + shadows


def _check_layers(journal: Journal) -> None:
    """Every finished layer's file has the bytes it was committed with: a flipped bit in a code shows nowhere else."""
    for layer in range(journal.manifest.layers):
        path = journal.layer_file(layer)
        if not path.exists():
            raise UserError("a finished layer lacks its file", file=path, hint=_AGAIN)
        if file_sha256(path) != journal.record(layer).file_sha256:
            raise UserError("a finished layer's file is not what was written", file=path, hint=_AGAIN)
    record = journal.finish_record()
    for what, path, digest in (
        ("the shadows", journal.shadow_file, record.shadows_sha256),
        ("head and embedding in 8 bits", journal.tables_file, record.tables_sha256),
    ):
        if digest is not None and (not path.exists() or file_sha256(path) != digest):
            raise UserError(f"{what} are missing or not what was written", file=path, hint=_FINISH_AGAIN)


def _check_source(source: Checkpoint, journal: Journal) -> None:
    differing = journal.manifest.source.differing(source.config, source.shards)
    if differing:
        raise UserError(
            "the journal was made from another model",
            file=journal.folder,
            found=f"{', '.join(differing[:3])} differ from {source.folder}",
            hint=f"Run `glm5-quant calibrate --model {source.folder}`, or give the model it was made from",
        )


def _write(inputs: _Inputs, layout: _Layout, files: Path, progress: Progress | None) -> tuple[list[Written], int]:
    """Write every file into the stage; returns them and how many shards a killed run had finished."""
    total = inputs.plan.tensor_bytes + sum(spec.nbytes for spec in inputs.plan.sidecar)
    done, reused = 0, 0
    written = []
    (files / sidecar.FOLDER).mkdir(exist_ok=True)
    for name, specs in {**layout.shards, **layout.sidecar}.items():
        path, is_base = files / name, name in layout.shards
        if path.exists():
            written.append(Written(name=name, size_bytes=path.stat().st_size, sha256=file_sha256(path)))
            reused += 1
            done += sum(spec.nbytes for spec in specs)
            continue

        def read(tensor: str, name: str = name, is_base: bool = is_base) -> Tensor:
            nonlocal done
            value = _read_base(inputs, tensor) if is_base else inputs.tensors.read(sidecar.PREFIX + tensor)
            done += value.nbytes
            if progress is not None:
                progress(done, total, name)
            return value

        shard = write_shard(path, specs, read)
        written.append(Written(name=name, size_bytes=shard.size_bytes, sha256=shard.sha256))
    written += _write_small(inputs, layout, files, written)
    return sorted(written, key=lambda file: file.name), reused


def _read_base(inputs: _Inputs, name: str) -> Tensor:
    if inputs.plan.origin[name] == "source":
        return inputs.source.read(name)
    value = inputs.tensors.read(name)
    if name.endswith(SCALE) and not bool((value > 0).all()):
        raise UserError("a block scale is not above zero", file=inputs.tensors.info(name).file, item=name)
    return value


def _write_small(inputs: _Inputs, layout: _Layout, files: Path, weights: Sequence[Written]) -> list[Written]:
    """Sidecar description, side files, index, config.json. `weights`: the weight files, which are written."""
    plan, settings = inputs.plan, inputs.journal.manifest.settings
    weight_map = {spec.name: shard for shard, specs in layout.shards.items() for spec in specs}
    index = {"metadata": {"total_size": plan.tensor_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    scheme = Scheme(
        symmetric=plan.symmetric,
        group_size=group_size(settings),
        ignore=plan.ignore,
        inputs=inputs.inputs,
        eight=plan.eight,
    )
    protect = inputs.source.config.get(NUMERIC_KEY, sidecar.protects_numeric(settings, plan.sidecar))
    config = export_config(inputs.source.config, scheme, protect_numeric=bool(protect), untie=plan.untie)
    replaced = sorted(n for n, where in plan.origin.items() if where == "journal" and n in inputs.source.tensors)
    texts = {
        sidecar.JSON_NAME: sidecar.describe(inputs.journal, layout.sidecar, replaced, inputs.inputs, weights),
        INDEX_NAME: index,
        staging.CONFIG_NAME: config,
    }
    written = []
    for name, path in layout.side_files.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        digest = atomic.copy_file(path, files / name)
        written.append(Written(name=name, size_bytes=path.stat().st_size, sha256=digest))
    for name, value in texts.items():
        data = atomic.json_bytes(value)
        written.append(Written(name=name, size_bytes=len(data), sha256=atomic.write_bytes(files / name, data)))
    return written


def _with_card(inputs: _Inputs, kept: str, files: Path, report: ExportReport, made: Exported) -> ExportReport:
    """Write the export's card; the report with it among its files."""
    settings, plan = inputs.journal.manifest.settings, inputs.plan
    features = sidecar.features((spec.name for spec in plan.sidecar), inputs.inputs)
    facts = CardFacts(
        manifest=inputs.journal.manifest,
        packed=report.packed_linears,
        eight=len(plan.eight),
        kept=report.kept_tensors,
        symmetric=report.symmetric,
        group_size=group_size(settings),
        form=FORMAT if not inputs.inputs.changes_weights else OWN_FORMAT,
        bits_per_weight=report.bits_per_weight,
        tensor_bytes=report.tensor_bytes,
        source_bytes=report.source_bytes,
        verdicts=runtime_verdicts(made, features, ()),
    )
    data = write_card(inputs.source.folder, files / kept, kept, facts).encode()
    written = Written(name=CARD, size_bytes=len(data), sha256=atomic.write_bytes(files / CARD, data))
    return replace(report, files=tuple(sorted((*report.files, written), key=lambda file: file.name)))


def group_size(settings: dict[str, Any]) -> int:
    """Inputs a block, from a journal's settings (64 where they do not say)."""
    quant = settings.get("quant", settings)
    return int(quant.get("group_size", 64)) if isinstance(quant, dict) else 64


def _report(
    inputs: _Inputs, output: Path, layout: _Layout, stage: staging.Stage, files: Iterable[Written], reused: int
) -> ExportReport:
    plan, source = inputs.plan, inputs.source
    weights = sum(n * k for n, k in plan.packed.values())
    kept = [name for name, where in plan.origin.items() if where == "source"]
    kept_elements = sum(math.prod(source.tensors[name].shape) for name in kept)
    replaced = [s for g in plan.groups for s in g if plan.origin[s.name] == "journal" and ".weight_" not in s.name]
    parameters = weights + kept_elements + sum(math.prod(spec.shape) for spec in replaced)
    records = [inputs.journal.record(layer).modules for layer in range(inputs.journal.manifest.layers)]
    zero = {name: record.zero_blocks for modules in records for name, record in modules.items() if record.zero_blocks}
    mtp = mtp_tensors(source, family_of(source.config))
    return ExportReport(
        output=output,
        files=tuple(files),
        tensor_bytes=plan.tensor_bytes,
        source_bytes=sum(info.nbytes for info in source.tensors.values()),
        sidecar_bytes=sum(spec.nbytes for spec in plan.sidecar),
        packed_linears=len(plan.packed),
        kept_tensors=len(kept),
        replaced_tensors=len(replaced),
        mtp_tensors=len(mtp),
        symmetric=plan.symmetric,
        bits_per_weight=8 * plan.packed_bytes / weights,
        bits_per_parameter=8 * plan.tensor_bytes / parameters,
        zero_blocks=zero,
        tp_sizes=tensor_parallel_sizes(inputs.linears, symmetric=plan.symmetric),
        dropped=dict(source.dropped),
        leftovers=stage.leftovers,
        shards_reused=reused,
        warnings=_warnings(source, mtp),
    )


def _warnings(source: Checkpoint, mtp: list[str]) -> tuple[str, ...]:
    declared = source.config.get("num_nextn_predict_layers") or 0
    if declared and not mtp:
        return (f"config.json declares {declared} MTP layer(s) of which the source holds no tensor",)
    return ()
