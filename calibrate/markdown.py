"""A calibration's report as Markdown: `report.md` in the journal, from the same dataclass as table and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from glm5_quant.calibrate.report import CalibrationReport, MeanError
from glm5_quant.model.errors import human_bytes

MOST_STARVED = 50


def render(report: CalibrationReport) -> str:
    """The whole report."""
    parts = [
        f"# Calibration of {report.model}",
        _facts(report),
        _errors(report),
        _ablation(report),
        _coverage(report),
        _notes(report),
    ]
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
            ("routers", routers(report) or "as in the source"),
            ("compensation", f"{len(report.compensation)} of {report.layers} layers"),
            ("peak memory", human_bytes(report.peak_memory_bytes)),
        ],
    )


def routers(report: CalibrationReport) -> str | None:
    """What refitting routers came to; None where it was not tried."""
    if not report.routers:
        return None
    kept = [record for record in report.routers.values() if record.kept]
    if not kept:
        return f"0 of {len(report.routers)} refitted: none chose more of the source's experts"
    before, after = (sum(getattr(r, f"agreement_{when}") for r in kept) / len(kept) for when in ("before", "after"))
    return f"{len(kept)} of {len(report.routers)} refitted, where experts agree {before:.2%} -> {after:.2%} held out"


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


def _ablation(report: CalibrationReport) -> str:
    if not report.ablation:
        return ""
    rows = [
        (w.part, w.matrices, f"{w.of_rtn:.1%}", f"{w.gain:.1%} +- {w.gain_error:.1%}" if number else "")
        for number, w in enumerate(report.ablation)
    ]
    text = "## What each part was worth\n\nHeld-out error against the source stream, each part put to those before it, "
    text += "for the matrices that have it."
    return f"{text}\n\n{table(('part', 'matrices', 'of round-to-nearest', 'gain'), rows)}\n\n{after(report)}"


def after(report: CalibrationReport) -> str:
    """What compensation was worth: it is fitted to a whole layer's output, so it has no row of its own."""
    if report.compensation_left is None:
        return "Compensation: none."
    layers, less = len(report.compensation), 1 - report.compensation_left
    return f"Compensation takes {less:.1%} off the stream's held-out error in the {layers} layers that have one."


def _coverage(report: CalibrationReport) -> str:
    if not report.coverage.layers:
        return ""
    parts = ["## Coverage", f"Target {report.coverage.target} tokens an expert."]
    if report.samples is not None:
        chosen = report.samples
        parts.append(f"Windows chosen out of {chosen.candidates} by who is routed where:")
        ways = (("the first windows", chosen.before), ("the chosen ones", chosen.after))
        counts = ((name, c.least, c.unseen, c.below_target) for name, c in ways)
        parts.append(table(("", "least tokens", "experts unseen", "below the target"), counts))
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
