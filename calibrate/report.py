"""What a calibration came to, as one dataclass: the terminal table, JSON and the report all read this."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from glm5_quant.calibrate.coverage import Coverage, summarize
from glm5_quant.model.journal import FinishRecord, Journal, LayerRecord


@dataclass(frozen=True, kw_only=True)
class RoleError:
    """All matrices of one role: mean relative error on calibration tokens, beside plain round-to-nearest's."""

    role: str
    count: int
    error: float
    error_rtn: float


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Result of `calibrate`. Times in seconds, memory in bytes.

    `shadows` is what the model's byte budget bought; `compensation` the gain of each layer that has one, by layer.
    """

    journal: Path
    model: str
    layers: int
    layers_reused: int
    modules: int
    tokens: int
    roles: list[RoleError]
    worst: list[tuple[str, float]]
    coverage: Coverage
    zero_blocks: dict[str, int]
    fallbacks: dict[str, str]
    stream_error: float | None
    seconds: float
    peak_memory_bytes: int
    shadows: FinishRecord = field(default_factory=FinishRecord)
    compensation: dict[int, float] = field(default_factory=dict)
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
    ranked = sorted(modules.items(), key=lambda item: -item[1].error)
    return CalibrationReport(
        journal=journal.folder,
        model=journal.manifest.source.folder,
        layers=len(records),
        layers_reused=reused,
        modules=len(modules),
        tokens=journal.manifest.data.tokens,
        roles=_roles(records),
        worst=[(name, module.error) for name, module in ranked[:5]],
        coverage=summarize([record.coverage for record in records if record.coverage is not None], target),
        zero_blocks={name: module.zero_blocks for name, module in modules.items() if module.zero_blocks},
        fallbacks={name: module.fallback for name, module in modules.items() if module.fallback},
        stream_error=records[-1].stream_error if records else None,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes,
        shadows=journal.finish_record(),
        compensation={r.layer: r.compensation.gain for r in records if r.compensation is not None},
        warnings=warnings,
        notes=[f"layer {record.layer}: {note}" for record in records for note in record.notes],
    )


def _roles(records: list[LayerRecord]) -> list[RoleError]:
    by_role = defaultdict(list)
    for record in records:
        for module in record.modules.values():
            by_role[module.role].append(module)
    return [
        RoleError(
            role=role,
            count=len(items),
            error=sum(item.error for item in items) / len(items),
            error_rtn=sum(item.error_rtn for item in items) / len(items),
        )
        for role, items in sorted(by_role.items())
    ]
