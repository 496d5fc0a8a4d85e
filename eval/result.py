"""The one object everything printed comes from: table, JSON, Markdown, HTML and gates.

Frozen dataclasses of plain values. Figures that cannot be had are None, never NaN; a broken model has status "invalid".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from glm5_quant.eval.statistics import Equivalence, Estimate

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Invalid:
    """Where the first figure that is not finite stands: which model, document, file and token position."""

    model: str
    document: int
    file: str
    position: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SliceResult:
    """Both models on a share of the tokens. Perplexities per token; KL in nats; shares between 0 and 1."""

    name: str
    tokens: int
    clusters: int
    source_perplexity: Estimate
    perplexity: Estimate
    perplexity_ratio: Estimate
    kl: Estimate
    flips: Estimate
    source_accuracy: Estimate
    accuracy: Estimate
    lost: Estimate


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something a reader should act on: what kind of part, where, how large, in words."""

    kind: str
    where: str
    value: float | None
    message: str


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """One condition of `--gate` on one export."""

    gate: str
    export: str
    value: float | None
    passed: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """One decoder layer on the same inputs: relative error of its output, of its worst expert, and routing."""

    layer: int
    local_error: float | None
    stream_error: float | None
    routing_changed: float | None = None
    worst_expert: int | None = None
    worst_expert_error: float | None = None
    coverage: tuple[int, ...] = ()
    source_load: tuple[float, ...] = ()
    load: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TurnPoint:
    """Drift at one turn of a dialogue, over all dialogues."""

    turn: int
    tokens: int
    source_nll: float | None
    nll: float | None
    kl: float | None
    flips: float | None
    numeric_flips: float | None
    ratio: Estimate
    numeric_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class DialogueSums:
    """Sums by dialogue [D][len(fields)], from which exports of two results can be compared pair by pair.

    fields are those of `tally.FIELDS`; first and last: over the first and the last tenth of the turns.
    """

    fields: tuple[str, ...]
    first: tuple[tuple[float, ...], ...]
    last: tuple[tuple[float, ...], ...]
    whole: tuple[tuple[float, ...], ...]
    numeric: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class DialogueResult:
    """Teacher-forced drift over N turns of one export (or of the source: then ratio figures are those of itself)."""

    turns: int
    dialogues: int
    points: tuple[TurnPoint, ...]
    ratio_at: dict[str, Estimate]
    source_growth: Estimate
    growth: Estimate
    relative_growth: Estimate
    slope_per_100_turns: Estimate
    slices: tuple[SliceResult, ...]
    equivalence: Equivalence | None
    sums: DialogueSums | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The first answer of a dialogue on which two models differ."""

    dialogue: int
    turn: int
    user: str
    wanted: str
    source: str
    export: str


@dataclass(frozen=True, kw_only=True)
class FreeRunningResult:
    """Each model answering by itself, with its own history."""

    dialogues: int
    answers: int
    first_divergence_turn: tuple[int | None, ...]
    survival: tuple[float, ...]
    source_nll_of_own: float | None
    source_nll_of_export: float | None
    source_repetition: float | None
    repetition: float | None
    source_number_match: Estimate
    number_match: Estimate
    source_misreads: dict[str, int]
    misreads: dict[str, int]
    source_critical_match: float | None
    critical_match: float | None
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A numeric task (GSM8K, SVAMP, CMATH): exact match of whole answers, and how wrong ones were misread."""

    name: str
    problems: int
    source_exact: Estimate
    exact: Estimate
    difference: Estimate
    source_misreads: dict[str, int]
    misreads: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class CacheVariant:
    """Weights read with a quantized KV cache: drift, error of keys and values by layer, and bytes after one dialogue.

    weights is "source" or an export's name; the drift is always against the source with a 16-bit cache.
    """

    weights: str
    kind: str
    feedback: float
    recent: int
    dialogue: DialogueResult | None
    invalid: Invalid | None
    key_error: tuple[float, ...]
    value_error: tuple[float, ...]
    device_bytes: int
    host_bytes: int
    bytes_16bit: int
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """Everything measured about one export against the source. packed_linears: 0 where it is not quantized at all,
    None where that is not known."""

    name: str
    status: str
    invalid: Invalid | None = None
    slices: tuple[SliceResult, ...] = ()
    kl_percentiles: dict[str, dict[str, float]] = field(default_factory=dict)
    equivalence: Equivalence | None = None
    dialogue: DialogueResult | None = None
    free_running: FreeRunningResult | None = None
    tasks: tuple[TaskResult, ...] = ()
    layers: tuple[LayerResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    size_bytes: int | None = None
    packed_linears: int | None = None
    forward_tokens: int = 0

    def slice(self, name: str) -> SliceResult | None:
        """The slice of that name, or None where no token fell into it."""
        return next((found for found in self.slices if found.name == name), None)


@dataclass(frozen=True, kw_only=True)
class LayerTrace:
    """What one layer's router did with each token of a prompt: experts taken, best first, and their weights."""

    layer: int
    experts: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class RoutingTrace:
    """One prompt read by one model ("source" or an export's name). mask_density: by layer and token the share of
    visible keys that sparse attention keeps, for models that report it."""

    model: str
    prompt: str
    tokens: tuple[str, ...]
    layers: tuple[LayerTrace, ...]
    mask_density: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the figures came about, so that two results can be compared or refused."""

    source: str
    scored: str
    unit: str
    prefix: str
    prefix_rule: str
    window: int
    stride: int
    batch_size: int
    padding_side: str
    documents: int
    skipped_empty: int
    windows: int
    scored_tokens: int
    scored_numeric: int
    longest_position: int
    cluster_unit: str
    draws: int
    seed: int
    margin: float
    dtype: str
    kv_cache: str
    numeric_rule: str
    dialogue_rule: str = ""
    context_policy: str = ""
    source_cache_top_k: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """A whole evaluation: one source, any number of exports."""

    schema_version: int
    status: str
    settings: Settings
    exports: tuple[ExportResult, ...]
    source_slices: tuple[SliceResult, ...] = ()
    invalid: Invalid | None = None
    source_dialogue: DialogueResult | None = None
    cache_variants: tuple[CacheVariant, ...] = ()
    traces: tuple[RoutingTrace, ...] = ()
    noise_kl: float | None = None
    gates: tuple[GateResult, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    forward_tokens: int = 0

    @property
    def all_findings(self) -> list[tuple[str, Finding]]:
        """Findings on exports and on quantized caches, each with whose it is."""
        found = [(export.name, finding) for export in self.exports for finding in export.findings]
        for variant in self.cache_variants:
            feedback = f", feedback {variant.feedback}" if variant.feedback else ""
            found += [(f"{variant.weights}, {variant.kind} cache{feedback}", finding) for finding in variant.findings]
        return found

    @property
    def gates_passed(self) -> bool:
        """True when every gate held (also when there were none)."""
        return all(gate.passed for gate in self.gates)
