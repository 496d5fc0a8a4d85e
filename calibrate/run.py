"""`calibrate`: the loop over layers, the journal it writes, and how a stopped run goes on.

What is committed when: both streams' hidden states at the next boundary, then the layer's tensors, then its record.
The record is the commit; a kill at any moment loses at most the layer at hand.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from glm5_quant import __version__
from glm5_quant.calibrate.choose import chosen_windows
from glm5_quant.calibrate.context import Context, activation
from glm5_quant.calibrate.data import Packed, pack_windows
from glm5_quant.calibrate.finish import finish
from glm5_quant.calibrate.layer import LayerOutcome, LayerSolver
from glm5_quant.calibrate.markdown import render
from glm5_quant.calibrate.memory import bound_kernel_caches, give_freed_memory_back, run_dtype, trim_freed_memory
from glm5_quant.calibrate.plan import Plan, make_plan
from glm5_quant.calibrate.precision import write_tables
from glm5_quant.calibrate.report import CalibrationReport, build_report
from glm5_quant.calibrate.settings import Resume, Settings, work_folder
from glm5_quant.calibrate.shadows import shadowed
from glm5_quant.calibrate.stream import NAMES, Stream, windows
from glm5_quant.model import atomic, lock
from glm5_quant.model.checkpoint import Checkpoint, open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.journal import (
    DataRecord,
    Journal,
    LayerRecord,
    Manifest,
    SourceRecord,
    config_digest,
    open_journal,
    shard_digest,
    write_record,
)
from glm5_quant.model.layers import LayerRunner
from glm5_quant.model.rotated import as_rotated
from glm5_quant.model.shards import DTYPE_NAMES, Spec, write_shard
from glm5_quant.model.texts import read_texts
from glm5_quant.model.tokenizing import decoded_vocabulary, load_tokenizer
from glm5_quant.quant.numeric import numeric_positions, numeric_token_ids


class StoppedSafely(Exception):
    """Asked to stop between layers; all finished layers are in the journal."""


# What a journal consists of, in the order it is removed.
_CONTENT = (
    "manifest.json", "finish.json", "shadows.safetensors", "log.jsonl", "report.md", "samples.json", "layers", "stream",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerDone:
    """Sent to the progress callback after each layer. `worst` is the largest relative error of its matrices."""

    layer: int
    layers: int
    seconds: float
    worst: float
    worst_name: str


Progress = Callable[[LayerDone], None]


def calibrate(
    model: str | Path,
    dataset: str | Path,
    *,
    work_dir: str | Path = "glm5-quant-work",
    settings: Settings | None = None,
    resume: Resume = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CalibrationReport:
    """Run the model over sample data one layer at a time and decide every scale and code.

    Args:
        model: checkpoint folder or hub id.
        dataset: file, folder or hub id.
        work_dir: the journal goes to `<work_dir>/calibration`.
        resume: `auto` goes on with a journal of the same inputs, `required` fails without one, `never` starts again.
        overwrite: throw away a journal of other inputs.
        progress: called after each layer.
        should_stop: asked between layers; True raises `StoppedSafely`.

    Raises:
        UserError: anything wrong with the inputs, found before any layer is run where headers can tell; or another run
            works in the same folder.
        StoppedSafely: `should_stop` said so.
    """
    started = time.monotonic()
    bound_kernel_caches()
    settings = settings or Settings()
    if resume == "required" and overwrite:
        raise UserError("`--resume required` goes on with a journal, and `--overwrite` throws it away", item="--resume")
    source = open_checkpoint(model)
    checkpoint = as_rotated(source, settings.quant.rotation)
    plan = make_plan(checkpoint, settings, work_dir)
    plan.refuse_impossible()
    settings = replace(settings, num_samples=plan.windows)
    if plan.memory_short:
        give_freed_memory_back()
    packed = _read_data(checkpoint, dataset, settings)
    manifest = _manifest(source, dataset, packed, settings, plan)
    folder = work_folder(work_dir)
    with lock.only_run(folder.parent, lock.CALIBRATION, instead="use another --work-dir"):
        journal = _open_or_start(folder, manifest, resume, overwrite)
        reused = len(journal.finished())
        if not journal.complete:
            _Run(checkpoint, journal, settings, plan, packed.ids, progress, should_stop).run(reused)
        report = build_report(
            journal,
            reused=reused,
            target=settings.coverage_target,
            seconds=time.monotonic() - started,
            peak_memory_bytes=peak_memory_bytes(),
            warnings=[*plan.warnings, *packed.warnings],
        )
        atomic.write_bytes(journal.folder / "report.md", render(report).encode())
    return report


class _Run:
    """One run over the layers that are left."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        journal: Journal,
        settings: Settings,
        plan: Plan,
        ids_WT: Tensor,
        progress: Progress | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self.checkpoint, self.journal, self.progress, self.should_stop = checkpoint, journal, progress, should_stop
        dtype = run_dtype(checkpoint.dtype, settings.device)
        runner = LayerRunner(checkpoint, plan.family, dtype)
        ids_WT = chosen_windows(runner, plan, journal, settings, ids_WT, activation(runner.config))
        numeric_T = token_weight(checkpoint, ids_WT, settings.quant.numeric_weight)
        items = [item for layer in plan.by_layer.values() for item in layer]
        self.offering = shadowed(items, plan.family, plan.eight)
        self.context = Context(
            checkpoint=checkpoint,
            runner=runner,
            settings=settings,
            linears=plan.by_layer,
            eight=plan.eight,
            ids_WT=ids_WT,
            chunks=plan.chunks(len(ids_WT)),
            scale_dtype=checkpoint.dtype,
            dtype=dtype,
            source_first=len(ids_WT) - plan.source_windows(len(ids_WT), settings.held_windows(len(ids_WT))),
            chunk_tokens=plan.chunk_tokens,
            activation=activation(runner.config),
            token_weight_T=None if numeric_T is None else numeric_T.to(settings.device),
            shadowed=frozenset(i.name for i in self.offering) if settings.quant.shadow_budget else frozenset(),
            spill_folder=journal.folder / "stream",
            scratch_folder=journal.folder / "stream",
        )
        names = NAMES if self.context.two_streams else NAMES[1:]
        windows, seqlen = ids_WT.shape
        followed = {"source": windows - self.context.source_first, "quantized": windows}
        self.streams = {
            n: Stream(
                folder=journal.folder / "stream",
                name=n,
                shape=(followed[n], seqlen, runner.config.hidden_size),
                dtype=dtype,
                device=settings.device,
            )
            for n in names
        }

    def run(self, first: int) -> None:
        """Solve layers `first` to the last, then take the step that needs all of them."""
        if first < self.journal.manifest.layers:
            inputs = self._start() if first == 0 else {name: s.open(first) for name, s in self.streams.items()}
        for layer in range(first, self.journal.manifest.layers):
            if self.should_stop():
                raise StoppedSafely(f"{layer} of {self.journal.manifest.layers} layers are finished")
            inputs = self._layer(layer, inputs)
        shutil.rmtree(self.journal.folder / "stream", ignore_errors=True)
        tables = write_tables(self.journal, self.checkpoint, self.context.runner.family, self.context.settings)
        finish(self.journal, self.checkpoint, self.offering, self.context.settings.quant, tables)

    def _start(self) -> dict[str, Tensor]:
        """Embed all windows: the boundary of layer 0, the same in both streams."""
        hidden = {name: stream.create(0) for name, stream in self.streams.items()}
        for first, last in self.context.chunks:
            embedded = self.context.runner.embed(self.context.ids_WT[first:last])
            for tensor in hidden.values():
                offset = len(self.context.ids_WT) - len(tensor)
                if last > offset:
                    tensor[max(first - offset, 0) : last - offset] = embedded[max(offset - first, 0) :]
        self.context.runner.release_embedding()
        for stream in self.streams.values():
            stream.commit(0, None)
        return hidden

    def _layer(self, layer: int, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        started = time.monotonic()
        trim_freed_memory()
        outputs = {name: stream.create(layer + 1) for name, stream in self.streams.items()}
        side = {name: stream.side for name, stream in self.streams.items()}
        outcome = LayerSolver(self.context, layer, inputs, side).run(outputs)
        for name, stream in self.streams.items():
            stream.commit(layer + 1, outcome.side[name])
        record = self._commit(layer, outcome, _stream_error(outputs), time.monotonic() - started)
        for stream in self.streams.values():
            stream.drop(layer)
        if self.progress is not None:
            self.progress(_done(record, self.journal.manifest.layers))
        return outputs

    def _commit(self, layer: int, outcome: LayerOutcome, stream_error: float | None, seconds: float) -> LayerRecord:
        path = self.journal.layer_file(layer)
        if self.context.shadowed:
            save_layer(self.journal.candidates_file(layer), outcome.shadows.tensors, outcome.shadows.parts)
        digest = save_layer(path, outcome.result.tensors, outcome.result.parts)
        record = LayerRecord(
            layer=layer,
            file_sha256=digest,
            modules=outcome.result.modules,
            coverage=outcome.coverage,
            stream_error=stream_error,
            compensation=outcome.compensation,
            seconds=round(seconds, 3),
            notes=outcome.notes,
            ablation=outcome.ablation,
            router=outcome.router,
        )
        write_record(self.journal.record_file(layer), record)
        line = {"layer": layer, "seconds": record.seconds, "memory_bytes": peak_memory_bytes(), "time": time.time()}
        with (self.journal.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        return record


def save_layer(path: Path, tensors: dict[str, Tensor], parts: Sequence[Path] = ()) -> str:
    """Write one layer's tensors, whole or not at all: those in memory and those already moved to `parts`, which go.

    Returns the file's SHA-256. A layer with nothing to quantize is a file without tensors.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(part, framework="pt")) for part in parts]
        home = {name: file for file in files for name in file.keys()}  # noqa: SIM118

        def read(name: str) -> Tensor:
            return tensors[name] if name in tensors else home[name].get_tensor(name)

        specs = [Spec(name, DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in tensors.items()]
        for name, file in home.items():
            part = file.get_slice(name)
            specs.append(Spec(name, part.get_dtype(), tuple(part.get_shape())))
        digest = write_shard(path, specs, read).sha256
    for part in parts:
        part.unlink()
    return digest


def peak_memory_bytes() -> int:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def token_weight(checkpoint: Checkpoint, ids_WT: Tensor, numeric_weight: float) -> Tensor | None:
    """float32 [T]: 1 + numeric_weight for tokens that are numeric or come before one, else 1; None where that is 0."""
    if not numeric_weight:
        return None
    numeric = numeric_token_ids(decoded_vocabulary(load_tokenizer(checkpoint.folder)))
    return 1.0 + numeric_weight * numeric_positions(ids_WT, numeric).reshape(-1).float()


def _read_data(checkpoint: Checkpoint, dataset: str | Path, settings: Settings) -> Packed:
    tokenizer = load_tokenizer(checkpoint.folder)
    texts = read_texts(dataset)
    return pack_windows(
        texts, tokenizer, num_samples=settings.windows_to_read, seqlen=settings.seqlen, seed=settings.seed
    )


def _manifest(checkpoint: Checkpoint, dataset: str | Path, packed: Packed, settings: Settings, plan: Plan) -> Manifest:
    windows = min(len(packed.ids), settings.num_samples)
    return Manifest(
        tool_version=__version__,
        source=SourceRecord(
            folder=_printable(checkpoint.folder),
            model_type=plan.family.model_type,
            dtype=str(checkpoint.dtype).removeprefix("torch."),
            config_sha256=config_digest(checkpoint.config),
            shards={file.name: shard_digest(file) for file in checkpoint.shards},
        ),
        data=DataRecord(
            name=_printable(dataset),
            sha256=packed.sha256,
            windows=windows,
            seqlen=packed.ids.shape[1],
            tokens=windows * packed.ids.shape[1],
        ),
        settings=settings.deciding(),
        layers=plan.layers,
    )


def _printable(path: str | Path) -> str:
    """Names that are no UTF-8 as JSON can hold them."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _open_or_start(folder: Path, manifest: Manifest, resume: Resume, overwrite: bool) -> Journal:
    """The journal to go on with, or a new one. A journal of other inputs is refused by name unless `overwrite`."""
    exists = (folder / "manifest.json").exists()
    if resume == "required" and not exists:
        raise UserError("nothing to resume", file=folder, hint="Run without `--resume required`")
    if exists and not (resume == "never" and overwrite):
        journal = open_journal(folder)
        differences = manifest.differences(journal.manifest)
        if not differences and resume != "never":
            return journal
        if differences and not overwrite:
            raise UserError(
                "this journal belongs to other inputs: " + "; ".join(differences[:4]),
                file=folder,
                hint="Use another --work-dir, or --overwrite to start again",
            )
    foreign = [path.name for path in folder.iterdir() if path.name not in _CONTENT] if folder.is_dir() else []
    if not exists and foreign:
        problem = "folder is not empty and is no journal"
        raise UserError(problem, file=folder, found=min(foreign), hint="Use another --work-dir")
    _remove_journal(folder)
    try:
        (folder / "layers").mkdir(parents=True)
        write_record(folder / "manifest.json", manifest)
    except OSError as error:
        _remove_journal(folder)
        raise UserError(f"cannot be written ({error.strerror})", file=folder, hint="Use another --work-dir") from None
    return Journal(folder=folder, manifest=manifest)


def _remove_journal(folder: Path) -> None:
    """Remove what a journal consists of, the manifest first, and nothing else."""
    for name in _CONTENT:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _stream_error(outputs: dict[str, Tensor]) -> float | None:
    """Squared distance of the quantized stream from the source's, relative to the source's size."""
    if "source" not in outputs:
        return None
    wrong = size = 0.0
    followed = outputs["quantized"][-len(outputs["source"]) :]
    for quantized, source in windows(followed, outputs["source"]):
        wrong += float((quantized.float() - source.float()).square().sum(dtype=torch.float64))
        size += float(source.float().square().sum(dtype=torch.float64))
    return wrong / size if size else None


def _done(record: LayerRecord, layers: int) -> LayerDone:
    name, module = max(record.modules.items(), key=lambda item: item[1].shown_error, default=("", None))
    return LayerDone(
        layer=record.layer,
        layers=layers,
        seconds=record.seconds,
        worst=0.0 if module is None else module.shown_error,
        worst_name=name,
    )
