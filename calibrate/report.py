"""What a calibration came to, as one dataclass: the terminal table, JSON and Markdown all read this."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_quant.calibrate.ablation import PartWorth, worths
from glm5_quant.calibrate.coverage import Coverage, summarize
from glm5_quant.calibrate.starved import Starved, starved_experts
from glm5_quant.model.journal import (
    FinishRecord,
    Journal,
    LayerRecord,
    ModuleRecord,
    RouterRecord,
    SamplesRecord,
    read_model,
)


@dataclass(frozen=True, kw_only=True)
class MeanError:
    """Mean relative error of some matrices, beside plain round-to-nearest's.

    `error`, `error_rtn`: on calibration tokens, relative to the source's weight; where the target correction is at
    work this says little. `held_out`, `held_out_rtn`: against the source stream, of the `judged` matrices for which
    tokens were kept out of the solve; None where there are none.
    """

    count: int
    error: float
    error_rtn: float
    judged: int
    held_out: float | None
    held_out_rtn: float | None


@dataclass(frozen=True, kw_only=True)
class RoleError(MeanError):
    """All matrices of one role."""

    role: str


@dataclass(frozen=True, kw_only=True)
class LayerError(MeanError):
    """All matrices of one layer. `stream_error`: distance of the two streams behind it, relative to the source's."""

    layer: int
    stream_error: float | None


@dataclass(frozen=True, kw_only=True)
class SampleChoice:
    """Windows chosen by expert coverage: out of how many, and coverage with the first windows and with the chosen."""

    candidates: int
    before: Coverage
    after: Coverage


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Result of `calibrate`. Times in seconds, memory in bytes.

    `shadows` is what the model's byte budget bought; `compensation` the gain of each layer that has one, by layer;
    `worst` the matrices of the largest error, held out where there is such a figure; `starved` the experts below the
    coverage target and what was done for each; `ablation` what each part of the method was worth, part after part.
    """

    journal: Path
    model: str
    layers: int
    layers_reused: int
    modules: int
    tokens: int
    roles: list[RoleError]
    by_layer: list[LayerError]
    worst: list[tuple[str, float]]
    coverage: Coverage
    starved: list[Starved]
    zero_blocks: dict[str, int]
    fallbacks: dict[str, str]
    stream_error: float | None
    seconds: float
    peak_memory_bytes: int
    shadows: FinishRecord = field(default_factory=FinishRecord)
    compensation: dict[int, float] = field(default_factory=dict)
    routers: dict[int, RouterRecord] = field(default_factory=dict)
    samples: SampleChoice | None = None
    ablation: list[PartWorth] = field(default_factory=list)
    compensation_left: float | None = None
    """Mean share of the stream's held-out error that is left by the compensation of the layers that have one."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def build_report(
    journal: Journal,
    *,
    reused: int,
    target: int,
    seconds: float,
    peak_memory_bytes: int,
    warnings: list[str],
) -> CalibrationReport:
    """Read every layer's record and add them up."""
    records = [journal.record(layer) for layer in journal.finished()]
    modules = {name: module for record in records for name, module in record.modules.items()}
    ranked = sorted(modules.items(), key=lambda item: -item[1].shown_error)
    settings, finish = journal.manifest.settings, journal.finish_record()
    return CalibrationReport(
        journal=journal.folder,
        model=journal.manifest.source.folder,
        layers=len(records),
        layers_reused=reused,
        modules=len(modules),
        tokens=journal.manifest.data.tokens,
        roles=_roles(records),
        by_layer=layer_errors(records),
        worst=[(name, module.shown_error) for name, module in ranked[:5]],
        coverage=summarize([record.coverage for record in records if record.coverage is not None], target),
        starved=[one for record in records for one in starved_experts(record, target, settings)],
        zero_blocks={name: module.zero_blocks for name, module in modules.items() if module.zero_blocks},
        fallbacks={name: module.fallback for name, module in modules.items() if module.fallback},
        stream_error=records[-1].stream_error if records else None,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        shadows=finish,
        compensation={r.layer: r.compensation.gain for r in records if r.compensation is not None},
        routers={r.layer: r.router for r in records if r.router is not None},
        samples=_samples(journal, target),
        ablation=worths(errors for record in records for errors in record.ablation.values()),
        compensation_left=_compensation_left(records),
        warnings=warnings,
        notes=_notes(records, finish),
    )


def _samples(journal: Journal, target: int) -> SampleChoice | None:
    if not journal.samples_file.exists():
        return None
    record = read_model(journal.samples_file, SamplesRecord)
    before, after = summarize(record.before, target), summarize(record.after, target)
    return SampleChoice(candidates=record.candidates, before=before, after=after)


def _compensation_left(records: Iterable[LayerRecord]) -> float | None:
    left = [record.compensation.error_left for record in records if record.compensation is not None]
    return sum(left) / len(left) if left else None


def layer_errors(records: Iterable[LayerRecord]) -> list[LayerError]:
    """One entry a layer that has quantized matrices."""
    return [
        LayerError(layer=record.layer, stream_error=record.stream_error, **_means(list(record.modules.values())))
        for record in records
        if record.modules
    ]


def _roles(records: list[LayerRecord]) -> list[RoleError]:
    by_role = defaultdict(list)
    for record in records:
        for module in record.modules.values():
            by_role[module.role].append(module)
    return [RoleError(role=role, **_means(items)) for role, items in sorted(by_role.items())]


def _means(items: Sequence[ModuleRecord]) -> dict[str, Any]:
    judged = [m for m in items if m.held_out_error is not None and m.held_out_rtn is not None]
    return {
        "count": len(items),
        "error": sum(item.error for item in items) / len(items),
        "error_rtn": sum(item.error_rtn for item in items) / len(items),
        "judged": len(judged),
        "held_out": sum(m.held_out_error or 0.0 for m in judged) / len(judged) if judged else None,
        "held_out_rtn": sum(m.held_out_rtn or 0.0 for m in judged) / len(judged) if judged else None,
    }


def _notes(records: list[LayerRecord], finish: FinishRecord) -> list[str]:
    """Each layer's notes, equal ones told once for all their layers; and the layers whose shadows were refused."""
    layers: dict[str, list[int]] = defaultdict(list)
    for record in records:
        for note in record.notes:
            layers[note].append(record.layer)
    if finish.refused_layers:
        layers["shadows refused: they would have raised the error of held-out tokens"] = finish.refused_layers
    return [f"{spans(numbers)}: {note}" for note, numbers in layers.items()]


def spans(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 0, 4 to 7`; numbers ascending."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in runs)
    return f"layer{'' if len(layers) == 1 else 's'} {text}"
