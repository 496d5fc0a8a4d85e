"""Tables of dialogues, caches, free running and numeric tasks."""

from __future__ import annotations

from glm5_quant.eval.result import DialogueResult, EvalResult, ExportResult
from glm5_quant.eval.table import MISSING, Table, number, with_interval


def dialogue_table(result: EvalResult) -> Table | None:
    """Drift over the turns of long dialogues, source and exports."""
    named = [(found.name, found.dialogue) for found in result.exports if found.dialogue is not None]
    base = result.source_dialogue
    if base is None:
        return None
    columns = [("source", base), *named]
    rows = [
        (
            f"perplexity / source at turn {turn}",
            *(_relative(found, with_interval(found.ratio_at[turn])) for _, found in columns),
        )
        for turn in base.ratio_at
    ]
    rows += [
        ("perplexity growth, last tenth / first", *(with_interval(found.growth, True) for _, found in columns)),
        ("growth beyond the source's", *(with_interval(found.relative_growth, True) for _, found in columns)),
        ("log ratio per 100 turns", *(with_interval(found.slope_per_100_turns) for _, found in columns)),
        ("KL over answers", *(_slice(found, "all", "kl", False) for _, found in columns)),
        ("numeric tokens: top-1 differs", *(_slice(found, "numeric", "flips", True) for _, found in columns)),
        ("drift", *(found.equivalence.verdict if found.equivalence else MISSING for _, found in columns)),
    ]
    settings = result.settings
    note = (
        f"{base.dialogues} dialogues of {base.turns} turns, teacher-forced, answers only. At turn t: the twentieth "
        f"of the turns that ends there. Dialogues: {settings.dialogue_rule}. Context: {settings.context_policy}."
    )
    header = ("", *(name for name, _ in columns))
    return Table(title=f"Drift over {base.turns} turns", header=header, rows=tuple(rows), note=note)


def _relative(found: DialogueResult, cell: str) -> str:
    return cell if found.points else MISSING


def _slice(found: DialogueResult, name: str, figure: str, percent: bool) -> str:
    part = next((part for part in found.slices if part.name == name), None)
    return MISSING if part is None else with_interval(getattr(part, figure), percent)


def cache_table(result: EvalResult) -> Table | None:
    """Weights and KV cache, both quantized or not: the drift of each combination."""
    if not result.cache_variants:
        return None
    lines: list[tuple[str, str, DialogueResult | None, str, str]] = []
    if result.source_dialogue is not None:
        lines.append(("source", "16 bit", result.source_dialogue, MISSING, MISSING))
    lines += [(found.name, "16 bit", found.dialogue, MISSING, MISSING) for found in result.exports]
    for variant in result.cache_variants:
        kind = variant.kind + (f", feedback {variant.feedback}" if variant.feedback else "")
        size = (variant.device_bytes + variant.host_bytes) / variant.bytes_16bit if variant.bytes_16bit else None
        error = max([*variant.key_error, *variant.value_error], default=None)
        lines.append((variant.weights, kind, variant.dialogue, number(size, True), number(error)))
    rows = [
        (
            weights,
            kind,
            _slice(found, "all", "kl", False) if found else "invalid",
            with_interval(found.relative_growth, True) if found else MISSING,
            size,
            error,
        )
        for weights, kind, found, size, error in lines
    ]
    header = ("weights", "KV cache", "KL", "growth beyond the source's", "bytes / 16 bit", "worst layer error")
    return Table(title="KV cache in the loop", header=header, rows=tuple(rows))


def free_table(result: EvalResult) -> Table | None:
    """Models answering by themselves."""
    named = [(found.name, found.free_running) for found in result.exports if found.free_running is not None]
    if not named:
        return None
    first = named[0][1]
    turns = len(first.survival)
    rows = [
        ("dialogues still identical at the end", MISSING, *(number(found.survival[-1], True) for _, found in named)),
        ("median turn of first difference", MISSING, *(_median(found.first_divergence_turn) for _, found in named)),
        (
            "source's NLL of what was said",
            number(first.source_nll_of_own),
            *(number(found.source_nll_of_export) for _, found in named),
        ),
        (
            "repeated 4-token runs",
            number(first.source_repetition, True),
            *(number(f.repetition, True) for _, f in named),
        ),
        (
            "all numbers of an answer right",
            with_interval(first.source_number_match, True),
            *(with_interval(found.number_match, True) for _, found in named),
        ),
        (
            "critical words of an answer right",
            number(first.source_critical_match, True),
            *(number(found.critical_match, True) for _, found in named),
        ),
    ]
    note = f"{first.dialogues} dialogues of {turns} turns; each model lives with its own answers (greedy)."
    header = ("", "source", *(name for name, _ in named))
    return Table(title="Free running", header=header, rows=tuple(rows), note=note)


def _median(turns: tuple[int | None, ...]) -> str:
    found = sorted(turn if turn is not None else 10**9 for turn in turns)
    middle = found[len(found) // 2]
    return "none" if middle == 10**9 else str(middle)


def misread_table(result: EvalResult) -> Table | None:
    """How numbers were misread in free answers and tasks."""
    columns: list[tuple[str, dict[str, int]]] = []
    for found in result.exports:
        if found.free_running is not None:
            if not columns:
                columns.append(("source", found.free_running.source_misreads))
            columns.append((found.name, found.free_running.misreads))
    kinds = list(dict.fromkeys(kind for _, counts in columns for kind in counts))
    if not kinds:
        return None
    rows = tuple((kind, *(str(counts.get(kind, 0)) for _, counts in columns)) for kind in kinds)
    return Table(title="Numbers in free answers", header=("", *(name for name, _ in columns)), rows=rows)


def task_table(result: EvalResult) -> Table | None:
    """Exact match on numeric tasks."""
    rows = [
        (
            task.name,
            export.name,
            str(task.problems),
            with_interval(task.source_exact, True),
            with_interval(task.exact, True),
            with_interval(task.difference, True),
        )
        for export in result.exports
        for task in export.tasks
    ]
    if not rows:
        return None
    header = ("task", "export", "problems", "source right", "export right", "difference")
    return Table(title="Numeric tasks", header=header, rows=tuple(rows))


def layer_table(result: EvalResult) -> Table | None:
    """Error and routing by layer, one line a layer and export."""
    rows = [row for export in result.exports for row in _layer_rows(export)]
    if not rows:
        return None
    header = ("export", "layer", "own error", "error of the stream", "tokens rerouted", "worst expert")
    note = (
        "Own error: the layer on the source's inputs, relative to what it adds. Error of the stream: with all earlier "
        "layers quantized too. Rerouted: share of tokens whose set of experts changed."
    )
    return Table(title="By layer", header=header, rows=tuple(rows), note=note)


def _layer_rows(export: ExportResult) -> list[tuple[str, ...]]:
    return [
        (
            export.name,
            str(layer.layer),
            number(layer.local_error),
            number(layer.stream_error),
            number(layer.routing_changed, True),
            MISSING if layer.worst_expert is None else f"{layer.worst_expert} ({number(layer.worst_expert_error)})",
        )
        for layer in export.layers
    ]
