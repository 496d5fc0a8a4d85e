"""A calibration's report as Markdown: `report.md` in the journal, from the same dataclass as table and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from glm5_quant.calibrate.report import CalibrationReport, MeanError
from glm5_quant.model.errors import human_bytes

MOST_STARVED = 50


def render(report: CalibrationReport) -> str:
    """The whole report."""
    parts = [f"# Calibration of {report.model}", _facts(report), _errors(report), _coverage(report), _notes(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell."""
    cells = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join("" if c is None else str(c) for c in row) + " |" for row in cells)


def _facts(report: CalibrationReport) -> str:
    bought = report.shadows
    return table(
        ("", ""),
        [
            ("layers", report.layers),
            ("matrices", report.modules),
            ("tokens", f"{report.tokens:,}"),
            ("coverage", report.coverage.line),
            ("shadows", f"{bought.columns} columns, {len(bought.experts)} whole experts, {bought.spent_bytes:,} bytes"),
            ("compensation", f"{len(report.compensation)} of {report.layers} layers"),
            ("peak memory", human_bytes(report.peak_memory_bytes)),
        ],
    )


def _errors(report: CalibrationReport) -> str:
    """Errors by role and by layer. Held-out ones are against the source stream, on tokens kept out of the solve."""
    headers = ("matrices", "judged", "held-out error", "round-to-nearest", "error on calibration tokens", "the same")
    roles = table(("role", *headers), ((role.role, *_means(role)) for role in report.roles))
    by_layer = table(
        ("layer", *headers, "streams apart"),
        ((one.layer, *_means(one), _number(one.stream_error)) for one in report.by_layer),
    )
    return f"## Errors\n\n{roles}\n\n{by_layer}"


def _means(one: MeanError) -> tuple[object, ...]:
    numbers = (one.held_out, one.held_out_rtn, one.error, one.error_rtn)
    return one.count, one.judged, *map(_number, numbers)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _coverage(report: CalibrationReport) -> str:
    if not report.coverage.layers:
        return ""
    parts = ["## Coverage", f"Target {report.coverage.target} tokens an expert."]
    bins = ((f"{one.low:,} to {one.high:,}", one.experts) for one in report.coverage.histogram)
    parts.append(table(("tokens", "experts"), bins))
    if report.starved:
        worst = sorted(report.starved, key=lambda one: one.tokens)[:MOST_STARVED]
        parts.append(f"{len(report.starved)} experts saw fewer than that; the {len(worst)} that saw fewest:")
        rows = ((s.layer, s.expert, s.tokens, f"{s.effective_tokens:.0f}", s.done) for s in worst)
        parts.append(table(("layer", "expert", "tokens", "effective", "what was done"), rows))
    return "\n\n".join(parts)


def _notes(report: CalibrationReport) -> str:
    lines = [*report.notes, *report.warnings, *(f"{name}: {why}" for name, why in report.fallbacks.items())]
    return "## Notes\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""
