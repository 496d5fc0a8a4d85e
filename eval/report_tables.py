"""The tables of a report, as plain strings: terminal, Markdown and HTML only differ in how they draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm5_quant.eval.report_dialogue_tables import (
    cache_table,
    dialogue_table,
    free_table,
    layer_table,
    misread_table,
    task_table,
)
from glm5_quant.eval.result import EvalResult, ExportResult, GateResult, SliceResult
from glm5_quant.eval.statistics import Estimate
from glm5_quant.eval.table import INTERVALS, MISSING, Table, number, with_interval

Pick = Callable[[SliceResult], Estimate]


def _row(
    result: EvalResult, label: str, slice_name: str, source: Pick | None, export: Pick, percent: bool
) -> list[str]:
    base = next((found for found in result.source_slices if found.name == slice_name), None)
    cells = [label, with_interval(source(base), percent) if source and base else MISSING]
    for found in result.exports:
        part = found.slice(slice_name)
        cells.append("invalid" if found.status != "ok" else with_interval(export(part), percent) if part else MISSING)
    return cells


def agreement(part: SliceResult) -> Estimate:
    """Share of tokens on which both models' most likely token is the same."""
    flips = part.flips
    if flips.value is None:
        return flips
    low = None if flips.high is None else 1 - flips.high
    high = None if flips.low is None else 1 - flips.low
    return Estimate(value=1 - flips.value, low=low, high=high)


def text_table(result: EvalResult) -> Table:
    """Perplexity, divergence and number errors on the text."""
    lines: list[tuple[str, str, Pick | None, Pick, bool]] = [
        ("perplexity per token", "all", lambda s: s.source_perplexity, lambda s: s.perplexity, False),
        ("perplexity / source", "all", None, lambda s: s.perplexity_ratio, False),
        ("KL(source || export), nats", "all", None, lambda s: s.kl, False),
        ("top-1 agrees with source", "all", None, agreement, True),
        ("top-1 is right", "all", lambda s: s.source_accuracy, lambda s: s.accuracy, True),
        ("numeric tokens: KL", "numeric", None, lambda s: s.kl, False),
        ("numeric tokens: top-1 differs", "numeric", None, lambda s: s.flips, True),
        ("numeric tokens: right only in source", "numeric", None, lambda s: s.lost, True),
        ("critical words: top-1 differs", "critical", None, lambda s: s.flips, True),
    ]
    rows = [_row(result, *line) for line in lines]
    rows = [row for row in rows if any(cell != MISSING for cell in row[1:])]
    for label in ("max", "p99", "p50"):
        cells = [number(found.kl_percentiles.get("all", {}).get(label)) for found in result.exports]
        rows.insert(4, [f"KL {label}", MISSING, *cells])
    settings = result.settings
    read = f"{settings.windows} windows of {settings.window}, stride {settings.stride}"
    if settings.scored != "text":
        read = f"the answers of {settings.documents} dialogues"
    note = (
        f"{settings.scored_tokens} tokens scored ({settings.scored_numeric} numeric) in {read}, prefix "
        f"{settings.prefix or 'none'} ({settings.prefix_rule}); {settings.skipped_empty} of {settings.documents} texts "
        f"skipped as empty; {INTERVALS.format(kind=f'bootstrap interval over {settings.cluster_unit}s')} "
        f"({settings.draws} draws, seed {settings.seed})."
    )
    if result.noise_kl is not None:
        note += f" The source against itself at another batch size: KL {number(result.noise_kl)}."
    header = ("", "source", *(found.name for found in result.exports))
    title = "Text" if settings.scored == "text" else "Answers of the dialogues"
    return Table(title=title, header=header, rows=tuple(map(tuple, rows)), note=note)


def slice_table(result: EvalResult) -> Table | None:
    """KL by file, language, position and stress shape."""
    names = [found.name for found in result.source_slices if ":" in found.name]
    names.sort(key=lambda name: name.startswith("numeric "))
    if not names or not result.exports:
        return None
    rows = []
    for name in names:
        base = next(found for found in result.source_slices if found.name == name)
        parts = [found.slice(name) for found in result.exports]
        cells = [with_interval(part.kl) if part else MISSING for part in parts]
        rows.append((name, str(base.tokens), with_interval(base.source_perplexity), *cells))
    header = ("", "tokens", "source perplexity", *(f"KL {found.name}" for found in result.exports))
    note = "Language: as the data name it, else by script, and any Latin script is en."
    note = note if any(name.startswith("language:") for name in names) else ""
    return Table(title="By part of the text", header=header, rows=tuple(rows), note=note)


def verdict_table(result: EvalResult) -> Table | None:
    """Status, packed linears and drift verdict of each export."""
    if not result.exports:
        return None
    rows = [(found.name, found.status, packed_linears(found), _verdict(found)) for found in result.exports]
    note = (
        f"'equivalent' means: the 90% interval of the mean NLL difference lies inside ±{result.settings.margin} nats "
        "per token, a margin set before the run."
    )
    return Table(title="Verdict", header=("export", "status", "packed linears", "drift"), rows=tuple(rows), note=note)


def packed_linears(export: ExportResult) -> str:
    """How many linears of an export are packed; says so where none is."""
    if export.packed_linears is None:
        return MISSING
    return f"{export.packed_linears:,}" if export.packed_linears else "0: not quantized"


def _verdict(export: ExportResult) -> str:
    if export.invalid is not None:
        bad = export.invalid
        return f"first bad token: document {bad.document} {bad.file}, position {bad.position}: {bad.reason}"
    found = export.equivalence
    if found is None or found.low is None:
        return MISSING
    return f"{found.verdict} ({number(found.low)} to {number(found.high)} nats)"


def gate_table(result: EvalResult) -> Table | None:
    """Every gate on every export."""
    if not result.gates:
        return None
    rows = [
        (gate.gate, gate.export, _gated(gate), "passed" if gate.passed else f"FAILED {gate.reason}".strip())
        for gate in result.gates
    ]
    return Table(title="Gates", header=("gate", "export", "value", ""), rows=tuple(rows))


def _gated(gate: GateResult) -> str:
    """The value of a gate in the unit of its limit: 0.12 beside a limit of 1% reads as less."""
    if gate.value is None or not gate.gate.endswith("%"):
        return number(gate.value)
    return f"{number(100 * gate.value)}%"


def all_tables(result: EvalResult) -> list[Table]:
    """Every table the result can fill, in reading order."""
    makers: Sequence[Callable[[EvalResult], Table | None]] = (
        text_table,
        verdict_table,
        dialogue_table,
        cache_table,
        free_table,
        misread_table,
        task_table,
        slice_table,
        layer_table,
        gate_table,
    )
    return [table for maker in makers if (table := maker(result)) is not None]
