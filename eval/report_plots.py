"""The charts of a report, from the result alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from glm5_quant.eval.result import DialogueResult, EvalResult, LayerResult
from glm5_quant.eval.svg import Series, bars, lines

Chart = tuple[str, str, str]
"""Title, SVG with legend, and a sentence on how to read it."""

NUMERIC = ": numeric tokens"


def charts(result: EvalResult) -> list[Chart]:
    """Every chart the result has data for, in reading order."""
    makers: Sequence[Callable[[EvalResult], Chart]] = (
        drift_chart,
        cache_chart,
        kl_turn_chart,
        number_turn_chart,
        survival_chart,
        position_chart,
        layer_chart,
        routing_chart,
        coverage_chart,
        misread_chart,
    )
    return [chart for maker in makers if (chart := maker(result))[1]]


def smooth(values: Sequence[tuple[float, float, float]], width: int) -> list[tuple[float, float]]:
    """Running means of (x, value, weight) over `width` neighbours, cut at the ends."""
    found = []
    for index, (x, _, _) in enumerate(values):
        part = values[max(0, index - width // 2) : index + width // 2 + 1]
        weight = sum(item[2] for item in part)
        if weight:
            found.append((x, sum(item[1] * item[2] for item in part) / weight))
    return found


def _dialogues(result: EvalResult) -> list[tuple[str, DialogueResult]]:
    return [(export.name, export.dialogue) for export in result.exports if export.dialogue is not None]


def _cached(result: EvalResult) -> list[tuple[str, DialogueResult, int, int]]:
    """Lines of the cache chart: one colour for each model's weights (the source's as in the other charts), one dash
    with and one without feedback."""
    weights, found = ["source", *(export.name for export in result.exports)], []
    for variant in result.cache_variants:
        if variant.dialogue is not None:
            feedback = f", feedback {variant.feedback}" if variant.feedback else ""
            name = f"{variant.weights}, {variant.kind} cache{feedback}"
            found.append((name, variant.dialogue, weights.index(variant.weights) - 1, 2 if feedback else 0))
    return found


def _width(turns: int) -> int:
    """Turns that a running mean covers."""
    return max(3, turns // 10)


def drift_chart(result: EvalResult) -> Chart:
    """Perplexity ratio by turn, smoothed, with intervals at the named turns."""
    return (
        "Drift: perplexity against the source's, by turn",
        _ratio_lines([(name, found, colour, colour) for colour, (name, found) in enumerate(_dialogues(result))]),
        "Thick: running mean over a tenth of the turns; thin: single turns; bars: 95% intervals at the turns of the "
        "table. A line that rises drifts; a flat one above 1 is worse from the start.",
    )


def cache_chart(result: EvalResult) -> Chart:
    """The same for weights read with a quantized KV cache."""
    return (
        "KV cache: perplexity against the source's, by turn",
        _ratio_lines(_cached(result)),
        "The source reads with a 16-bit cache; lines are read with the named one.",
    )


def _ratio_lines(dialogues: list[tuple[str, DialogueResult, int, int]]) -> str:
    """Lines of (name, drift, colour, dash)."""
    series = []
    for name, found, colour, dash in dialogues:
        raw = [(point.turn, point.ratio.value, point.tokens) for point in found.points if point.ratio.value is not None]
        line = smooth([(float(turn), value, float(tokens)) for turn, value, tokens in raw], _width(found.turns))
        marked = [
            (float(turn), estimate.low, estimate.high)
            for turn, estimate in found.ratio_at.items()
            if estimate.low is not None and estimate.high is not None
        ]
        series.append(Series(name=name, points=[(float(t), v) for t, v, _ in raw], colour=colour, faint=True))
        series.append(Series(name=name, points=line, colour=colour, dash=dash, bars=marked))
    return lines(series, "turn", "perplexity / source", level=1.0)


def kl_turn_chart(result: EvalResult) -> Chart:
    """KL by turn."""
    series = []
    for colour, (name, found) in enumerate(_dialogues(result)):
        raw = [(float(point.turn), point.kl, float(point.tokens)) for point in found.points if point.kl is not None]
        series.append(Series(name=name, points=smooth(raw, _width(found.turns)), colour=colour))
    return "Divergence by turn", lines(series, "turn", "KL, nats per token", level=0.0), "0 is the source."


def number_turn_chart(result: EvalResult) -> Chart:
    """Share of numeric tokens whose top-1 differs from the source's, by turn."""
    series = []
    for colour, (name, found) in enumerate(_dialogues(result)):
        points = [point for point in found.points if point.numeric_flips is not None]
        raw = [(float(p.turn), 100 * (p.numeric_flips or 0.0), float(p.numeric_tokens)) for p in points]
        series.append(Series(name=name, points=smooth(raw, _width(found.turns)), colour=colour))
    return (
        "Numbers by turn",
        lines(series, "turn", "numeric tokens that differ, %"),
        "Share of number tokens on which the most likely token is not the source's.",
    )


def survival_chart(result: EvalResult) -> Chart:
    """Share of dialogues still identical to the source's, by turn."""
    series = [
        Series(
            name=export.name,
            points=[(float(turn), 100 * share) for turn, share in enumerate((1.0, *export.free_running.survival))],
            colour=colour,
        )
        for colour, export in enumerate(result.exports)
        if export.free_running is not None
    ]
    return (
        "Free running: dialogues still word for word the source's",
        lines(series, "turn", "dialogues, %", level=0.0),
        "Each model answers the same users with its own history.",
    )


def position_chart(result: EvalResult) -> Chart:
    """KL by how many tokens the model has before the one to be predicted, for all and for numeric tokens."""
    names = [part.name for part in result.source_slices if part.name.startswith("position:")]
    edges = [name.partition(":")[2] for name in names]
    series = []
    for colour, export in enumerate(result.exports):
        for prefix in ("", "numeric "):
            parts = [export.slice(prefix + name) for name in names]
            values = [part.kl.value if part else None for part in parts]
            series.append((export.name + (NUMERIC if prefix else ": all tokens"), colour, values))
    return (
        "Divergence by position",
        bars(edges, series, "KL, nats per token", hollow=[name for name, _, _ in series if name.endswith(NUMERIC)]),
        "Position: tokens of context before the scored one. Outlined: numeric tokens only.",
    )


def _layer_series(result: EvalResult, read: Callable[[LayerResult], float | None], scale: float = 1.0) -> list[Series]:
    return [
        Series(
            name=export.name,
            points=[(float(at.layer), scale * value) for at in export.layers if (value := read(at)) is not None],
            colour=colour,
        )
        for colour, export in enumerate(result.exports)
    ]


def layer_chart(result: EvalResult) -> Chart:
    """Own error by layer."""
    return (
        "Error by layer",
        lines(_layer_series(result, lambda at: at.local_error), "layer", "relative error", level=0.0),
        "Each layer on the source's inputs: a single high point is a broken layer.",
    )


def routing_chart(result: EvalResult) -> Chart:
    """Share of tokens rerouted by layer."""
    return (
        "Routing by layer",
        lines(_layer_series(result, lambda at: at.routing_changed, 100.0), "layer", "tokens rerouted, %", level=0.0),
        "Share of tokens that go to another set of experts than in the source.",
    )


def coverage_chart(result: EvalResult) -> Chart:
    """Least loaded expert by layer, as a share of an even load: in the source and the exports."""

    def least(load: tuple[float, ...]) -> float | None:
        return 100 * min(load) * len(load) if load else None

    series = _layer_series(result, lambda at: least(at.load))
    base = next((export for export in result.exports if any(at.source_load for at in export.layers)), None)
    if base is not None:
        points = [(float(at.layer), value) for at in base.layers if (value := least(at.source_load)) is not None]
        series.insert(0, Series(name="source", points=points, colour=6))
    return (
        "Coverage: the least used expert",
        lines(series, "layer", "% of an even share", level=0.0),
        "0: an expert that no token of this text reached, so nothing here speaks for it.",
    )


def misread_chart(result: EvalResult) -> Chart:
    """Kinds of misread numbers in free answers."""
    found = [(export.name, export.free_running) for export in result.exports if export.free_running is not None]
    if not found:
        return "", "", ""
    columns = [("source", found[0][1].source_misreads), *((name, free.misreads) for name, free in found)]
    kinds = [kind for kind in dict.fromkeys(k for _, counts in columns for k in counts) if kind != "equal"]
    series = [
        (name, 6 if name == "source" else index - 1, [float(counts.get(kind, 0)) for kind in kinds])
        for index, (name, counts) in enumerate(columns)
    ]
    return "Misread numbers in free answers", bars(kinds, series, "count"), "Against the answers of the data."
