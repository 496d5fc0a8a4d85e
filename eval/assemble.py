"""From the parts of an evaluation to the one result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from glm5_quant.eval.diagnose import Diagnosis
from glm5_quant.eval.dialogue import JOIN_RULE, context_policy
from glm5_quant.eval.dialogue_part import DialoguePart
from glm5_quant.eval.drift import Drift
from glm5_quant.eval.findings import cache_findings
from glm5_quant.eval.free_running import Transcript, compare_transcripts, own_nll
from glm5_quant.eval.growth import summarize_drift
from glm5_quant.eval.kv_cache import CacheSpec, cache_use, untouched
from glm5_quant.eval.loading import folder_bytes
from glm5_quant.eval.result import (
    SCHEMA_VERSION,
    CacheVariant,
    DialogueResult,
    EvalResult,
    ExportResult,
    FreeRunningResult,
    Invalid,
    LayerResult,
    Settings,
    TaskResult,
)
from glm5_quant.eval.score import POSITION_BANDS, Pass
from glm5_quant.eval.session import Session
from glm5_quant.eval.stress import SHAPES
from glm5_quant.eval.summary import cluster_unit, drift_verdict, percentiles, summarize
from glm5_quant.eval.tally import Tally
from glm5_quant.eval.text_part import TextPart
from glm5_quant.eval.vocabulary import numeric_rule_text

LONG = 2048
FEW = 5


def assemble(
    session: Session,
    text: TextPart | None,
    talk: DialoguePart | None,
    diagnosis: Diagnosis,
    tasks: dict[int, tuple[TaskResult, ...]],
) -> EvalResult:
    """One result from all parts."""
    config = session.config
    base = _base(text, talk)
    unit = cluster_unit(base.tally) if text is not None else "document"
    exports = tuple(_export(session, index, text, talk, diagnosis, tasks, unit) for index in range(len(session.names)))
    variants = tuple(_variants(session, talk)) if talk is not None else ()
    bad = any(export.status != "ok" for export in exports) or any(variant.invalid for variant in variants)
    settings = _settings(session, text, talk, base.tally, unit)
    if settings.longest_position < LONG:
        session.notes.append(
            f"short text only: no token was scored {LONG} tokens in or later, so damage that needs "
            "long context cannot show; use a longer window or long_dialogue"
        )
    few = [
        len(part.base.tally.sums.get("all", {})) for part in (text, talk) if part is not None and part.base is not None
    ]
    if few and min(few) < FEW:
        session.notes.append(
            f"intervals rest on {min(few)} windows or dialogues only: too few to trust; use at least {FEW}"
        )
    session.notes += _one_script(base.tally)
    read = [part.base for part in (text, talk) if part is not None and part.base is not None]
    if config.critical_words and base.invalid is None and not any(one.tally.sums.get("critical") for one in read):
        session.notes.append("no scored token touches a critical word, as far as the tokenizer tells")
    if text is not None and config.stress and base.invalid is None:
        session.notes += _stress(base.tally, config.num_windows)
    return EvalResult(
        schema_version=SCHEMA_VERSION,
        status="invalid" if base.invalid is not None or bad else "ok",
        settings=settings,
        source_slices=summarize(base.tally, unit, config.draws, config.seed),
        exports=exports,
        invalid=base.invalid,
        source_dialogue=_source_dialogue(session, talk),
        cache_variants=variants,
        traces=tuple(session.traces),
        noise_kl=diagnosis.noise_kl,
        notes=tuple(dict.fromkeys(session.notes)),
        forward_tokens=session.tokens_read(None),
    )


def _one_script(tally: Tally) -> list[str]:
    """A note where every text is in the same script; texts in none that we tell apart count as another."""
    found = [name for name in tally.sums if name.startswith("language:")]
    if len(found) != 1 or tally.sums[found[0]].keys() != tally.sums.get("all", {}).keys():
        return []
    language = found[0].partition(":")[2]
    script = "Latin letters" if language == "en" else language
    return [f"all texts are mostly in one script ({script}): harm to another one would not show"]


def _stress(tally: Tally, limit: int | None) -> list[str]:
    """What a reader has to know of the stress shapes: which were not read, and that figures of the whole hold them."""
    made = {name: int(tally.clusters(f"stress:{name}", "window")[:, 0].sum()) for name in SHAPES}
    missing = [name for name, tokens in made.items() if not tokens]
    why = f"num_windows={limit} ended before them" if limit is not None else "there is no text to make them of"
    notes = [f"stress: {', '.join(missing)} not read: {why}"] if missing else []
    whole = int(tally.clusters("all", "window")[:, 0].sum())
    if sum(made.values()):
        notes.append(f"stress: {sum(made.values())} of all {whole} scored tokens are in shapes made of the texts")
    return notes


def _base(text: TextPart | None, talk: DialoguePart | None) -> Pass:
    """The source's own pass: over the text, or over the answers where there is no text."""
    if text is not None:
        assert text.base is not None
        if text.base.invalid is None and talk is not None and talk.base is not None:
            text.base.invalid = talk.base.invalid
        return text.base
    assert talk is not None and talk.base is not None
    return Pass("source", talk.base.tally, talk.base.invalid)


def _source_dialogue(session: Session, talk: DialoguePart | None) -> DialogueResult | None:
    if talk is None or talk.base is None or talk.base.invalid is not None:
        return None
    return _drift(session, talk.base)


def _export(
    session: Session,
    index: int,
    text: TextPart | None,
    talk: DialoguePart | None,
    diagnosis: Diagnosis,
    tasks: dict[int, tuple[TaskResult, ...]],
    unit: str,
) -> ExportResult:
    config, name = session.config, session.names[index]
    drift = talk.drifts.get(index) if talk is not None else None
    invalid = _first_invalid(text.passes[index].invalid if text else None, drift.invalid if drift else None)
    if invalid is not None:
        return ExportResult(name=name, status="invalid", invalid=invalid, packed_linears=session.packed[index])
    tally = text.passes[index].tally if text is not None else drift.tally if drift is not None else Tally()
    return ExportResult(
        name=name,
        status="ok",
        slices=summarize(tally, unit, config.draws, config.seed),
        kl_percentiles=percentiles(tally),
        equivalence=drift_verdict(tally, unit, config.margin, config.draws, config.seed),
        dialogue=_drift(session, drift) if drift is not None else None,
        free_running=_free_running(session, talk, index) if talk is not None else None,
        tasks=tasks.get(index, ()),
        layers=_layers(text or talk, diagnosis, index),
        findings=diagnosis.findings.get(index, ()),
        size_bytes=folder_bytes(session.export_models[index]),
        packed_linears=session.packed[index],
        forward_tokens=session.tokens_read(index),
    )


def _first_invalid(*found: Invalid | None) -> Invalid | None:
    return next((invalid for invalid in found if invalid is not None), None)


def _layers(part: TextPart | DialoguePart | None, diagnosis: Diagnosis, index: int) -> tuple[LayerResult, ...]:
    errors = diagnosis.errors.get(index)
    routing = part.routing.get(index) if part is not None else None
    numbers = set(errors.local if errors else ()) | set(routing.tokens if routing else ())
    found = []
    for layer in sorted(numbers):
        experts = {e: energy.relative for (at, e), energy in (errors.experts.items() if errors else ()) if at == layer}
        worst = max(experts, key=lambda expert: experts[expert], default=None)
        loads = routing.shares(layer) if routing else ((), ())
        found.append(
            LayerResult(
                layer=layer,
                local_error=errors.local[layer].relative if errors and layer in errors.local else None,
                stream_error=errors.stream[layer].relative if errors and layer in errors.stream else None,
                routing_changed=routing.share_changed(layer) if routing else None,
                worst_expert=worst,
                worst_expert_error=experts[worst] if worst is not None else None,
                source_load=loads[0],
                load=loads[1],
            )
        )
    return tuple(found)


def _free_running(session: Session, talk: DialoguePart, index: int) -> FreeRunningResult | None:
    if index not in talk.spoken or None not in talk.spoken:
        return None
    config = session.config

    def nll(transcripts: Sequence[Transcript]) -> float | None:
        if session.source is None:
            return None
        # What the source itself said is compared with every export, and read once.
        speaker = None if transcripts is talk.spoken[None] else index
        if speaker not in talk.own_nll:
            reader = talk.reader(None, None)
            talk.own_nll[speaker] = own_nll(reader, transcripts, talk.turns, talk.limit, config.chunk)
        return talk.own_nll[speaker]

    return compare_transcripts(
        talk.dialogues,
        talk.spoken[None],
        talk.spoken[index],
        words=session.words,
        nll=nll,
        draws=config.draws,
        seed=config.seed,
    )


def _variants(session: Session, talk: DialoguePart) -> Iterable[CacheVariant]:
    for (index, spec), drift in talk.variants:
        use = cache_use(drift.cache)
        keys, values = (tuple(use.key_error), tuple(use.value_error)) if use else ((), ())
        session.notes += _cache_notes(session, spec, drift.cache)
        yield CacheVariant(
            weights="source" if index is None else session.names[index],
            kind=spec.kind,
            feedback=spec.feedback,
            recent=spec.recent,
            dialogue=None if drift.invalid else _drift(session, drift),
            invalid=drift.invalid,
            key_error=keys,
            value_error=values,
            device_bytes=use.device_bytes if use else 0,
            host_bytes=use.host_bytes if use else 0,
            bytes_16bit=use.bytes_16bit if use else 0,
            findings=cache_findings(keys, values),
        )


def _cache_notes(session: Session, spec: CacheSpec, cache: Any) -> list[str]:
    """What hides the harm of a quantized cache, or blurs it: tokens and layers that stay in 16 bit."""
    use, plain = cache_use(cache), untouched(cache)
    together = 1 if session.config.decode_steps else min(session.config.chunk, spec.step or 1)
    notes = []
    if use is not None and spec.recent and not any(use.key_error):
        notes.append(f"{spec.kind} cache: no token ever left the 16-bit tier of {spec.recent} tokens")
    elif use is not None and together > 1:
        notes.append(
            f"{spec.kind} cache: read by {together} tokens at once, each of which sees {spec.recent - together + 1} to "
            f"{spec.recent} tokens in 16 bit; with the setting decode-steps each sees {spec.recent}"
        )
    if plain:
        notes.append(f"{spec.kind} cache: {plain} of {len(cache.layers)} layers stay in 16 bit (sliding windows)")
    return notes


def _drift(session: Session, drift: Drift) -> DialogueResult:
    return summarize_drift(drift, session.config.draws, session.config.seed, session.config.margin)


def _longest(tally: Tally) -> int:
    """The lower edge of the farthest position band that has a scored token."""
    names = {f"position:{edge}" for edge in POSITION_BANDS}
    found = [name.split("-")[0].rstrip("+") for name in tally.sums]
    return max((int(name.partition(":")[2]) for name in found if name in names), default=0)


def _settings(session: Session, text: TextPart | None, talk: DialoguePart | None, tally: Tally, unit: str) -> Settings:
    config = session.config
    counts = {name: int(tally.clusters(name, unit)[:, 0].sum()) for name in ("all", "numeric")}
    longest = max(_longest(part.base.tally) for part in (text, talk) if part is not None and part.base is not None)
    return Settings(
        source=session.source_named or session.source_name,
        scored="text" if text is not None else "answers of dialogues",
        unit="token",
        prefix=session.prefix.text,
        prefix_rule=session.prefix.rule,
        window=text.plan.window if text else 0,
        stride=text.plan.stride if text else 0,
        batch_size=config.batch_size,
        padding_side=config.padding_side,
        documents=text.seen + text.passed_over if text else len(talk.dialogues) if talk else 0,
        skipped_empty=text.empty + text.passed_over if text else 0,
        windows=len(tally.sums.get("all", {})),
        scored_tokens=counts["all"],
        scored_numeric=counts["numeric"],
        longest_position=longest,
        cluster_unit=unit if text is not None else "dialogue",
        draws=config.draws,
        seed=config.seed,
        margin=config.margin,
        dtype=config.dtype,
        kv_cache=config.kv_cache,
        numeric_rule=numeric_rule_text() if session.marker.numeric is not None else "none: no tokenizer",
        dialogue_rule=f"{talk.renderer.style}; {JOIN_RULE}" if talk else "",
        context_policy=context_policy(talk.limit) if talk else "",
        source_cache_top_k=config.top_k if config.source_cache or config.sequential else None,
    )
