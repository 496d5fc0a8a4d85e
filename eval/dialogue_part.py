"""The dialogue part of an evaluation: choose and fit dialogues, read them with every model and cache, free running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from glm5_quant.eval.dialogue import Dialogue, Renderer, Segment, as_dialogue, fit, segments
from glm5_quant.eval.drift import Drift, Reader, at_once, measure_drift
from glm5_quant.eval.free_running import Transcript, converse
from glm5_quant.eval.kv_cache import CacheSpec, new_cache, spec_of
from glm5_quant.eval.kv_scales import check_layers, read_kv_scales, uncalibrated
from glm5_quant.eval.routing import RoutingDrift, RoutingWatch
from glm5_quant.eval.runner import PlainCache, Runner
from glm5_quant.eval.session import Session
from glm5_quant.model.errors import UserError

Variant = tuple[int | None, CacheSpec]
"""An export's index (None: the source) read with a quantized cache."""
CORPUS = "glm5-tiny's own held-out dialogues, made up by this package"


@dataclass
class DialoguePart:
    """Dialogues to read and what was found, by export index, by cache variant, and free running. `own_nll`: the
    source's NLL of what each model said by itself."""

    session: Session
    turns: int
    renderer: Renderer
    dialogues: list[Dialogue]
    segments: list[list[Segment]]
    limit: int | None
    base: Drift | None = None
    drifts: dict[int, Drift] = field(default_factory=dict)
    variants: list[tuple[Variant, Drift]] = field(default_factory=list)
    spoken: dict[int | None, list[Transcript]] = field(default_factory=dict)
    own_nll: dict[int | None, float | None] = field(default_factory=dict)
    routing: dict[int, RoutingDrift] = field(default_factory=dict)

    def run(self, group: list[int], with_source: bool) -> None:
        """Read all dialogues with a group of exports; `with_source` adds the source under quantized caches."""
        session, config = self.session, self.session.config
        models: list[int | None] = [None, *group] if with_source else list(group)
        variants: list[Variant] = [(index, spec) for index in models for spec in cache_specs(session)]
        readers = [self.reader(index, None) for index in group] + [self.reader(*variant) for variant in variants]
        held = [session.export(index).model for index in group]
        watch = RoutingWatch(session.source.model if session.source else None, held)
        source = self.reader(None, None)
        try:
            with at_once([source, *readers], config.together) as work:
                self.base, found = measure_drift(
                    source,
                    readers,
                    self.segments,
                    self.turns,
                    session.marker,
                    chunk=1 if config.decode_steps else config.chunk,
                    work=work,
                    tokenizer=session.tokenizer,
                    words=session.words,
                    kept=session.kept("dialogues"),
                    labels=[_labels(dialogue) for dialogue in self.dialogues],
                    watch=watch,
                    seen=lambda done: session.progress("dialogues", done, len(self.segments)),
                )
        finally:
            watch.close()
        self.routing.update(zip(group, watch.drifts, strict=True))
        self.drifts.update(zip(group, found, strict=False))
        self.variants += list(zip(variants, found[len(group) :], strict=True))

    def converse(self, group: Sequence[int | None]) -> None:
        """Let models answer by themselves (None: the source)."""
        config = self.session.config
        for index in group:
            reader = self.reader(index, None)
            self.spoken[index] = []
            for number, dialogue in enumerate(self.dialogues):
                self.spoken[index].append(
                    converse(reader, dialogue, self.renderer, limit=self.limit, max_new_tokens=config.max_new_tokens)
                )
                self.session.progress(f"answers of {reader.name}", number + 1, len(self.dialogues))

    def reader(self, index: int | None, spec: CacheSpec | None) -> Reader:
        """The source (None) or an export, with a 16-bit cache or a quantized one."""
        runner = self.session.source if index is None else self.session.export(index)
        name = "source" if index is None else self.session.names[index]
        most = None if spec is None else spec.step
        return Reader(name=name, runner=runner, new_cache=partial(cache_for, runner, spec), most=most)


def cache_for(runner: Runner | None, spec: CacheSpec | None) -> Any:
    """An empty cache for a model: its own kind, or with older tokens quantized. None for a model no longer held."""
    if runner is None:
        return None
    return PlainCache() if runner.config is None else new_cache(runner.config, spec)


def _labels(dialogue: Dialogue) -> tuple[str, ...]:
    named = (("file", dialogue.file), ("language", dialogue.language))
    return tuple(f"{group}:{value}" for group, value in named if value)


def cache_specs(session: Session) -> list[CacheSpec]:
    """Quantized caches to try: the one asked for, and the same with error feedback where that is asked for."""
    config = session.config
    plain = spec_of(config.kv_cache, recent=config.kv_recent)
    if plain is None:
        return []
    if config.kv_scales:
        scales = read_kv_scales(config.kv_scales)
        check_layers(scales, session.layers, config.kv_scales)
        plain = replace(plain, static_scales=scales)
    return [plain, replace(plain, feedback=config.kv_feedback)] if config.kv_feedback else [plain]


def dialogue_part(session: Session, rows: list[Any] | None) -> DialoguePart:
    """Choose dialogues of the wanted length; glm5-tiny's own held-out corpus where none are given.

    Raises UserError when there is no tokenizer or no dialogue.
    """
    config = session.config
    assert config.long_dialogue is not None
    specs = cache_specs(session)  # a file of scales that does not fit fails before any model runs
    scales = specs[0].static_scales if specs else None
    if scales is not None and (warning := uncalibrated(scales, config.kv_scales)):
        session.doubt(warning)
    if session.tokenizer is None:
        raise UserError("dialogues need a tokenizer", item="tokenizer", expected="tokenizer=, or a model folder")
    if rows is None:
        from glm5_quant.model.tiny.corpus import EVALUATION_SEED, dialogues

        rows = list(dialogues(EVALUATION_SEED, config.num_dialogues, config.long_dialogue))
        session.notes.append(f"no dialogues were given: they are {CORPUS}")
    found = [dialogue for row in rows if (dialogue := as_dialogue(row)) is not None]
    if not found:
        raise UserError("no dialogues", item="dialogues", expected="rows with `messages` of user and assistant")
    if len(found) < len(rows):
        session.notes.append(f"{len(rows) - len(found)} of {len(rows)} dialogues hold no user's turn with an answer")
    made, left = fit(found, config.long_dialogue, config.num_dialogues)
    turns = config.long_dialogue
    if not made:
        turns = max(len(dialogue.turns) for dialogue in found)
        made, left = fit(found, turns, config.num_dialogues)
        session.notes.append(f"no dialogue reaches {config.long_dialogue} turns, joined or not: measured over {turns}")
    if left:
        session.notes.append(f"{left} dialogues were left out: too short together")
    return _fitted(session, turns, made)


def _fitted(session: Session, turns: int, dialogues: list[Dialogue]) -> DialoguePart:
    limits = [limit for limit in (session.config.max_context, session.max_positions) if limit is not None]
    limit = min(limits, default=None)
    renderer = Renderer(session.tokenizer, session.prefix)
    cut = [segments(renderer, dialogue, limit) for dialogue in dialogues]
    kept = [index for index, parts in enumerate(cut) if parts]
    if len(kept) < len(cut):
        session.notes.append(f"{len(cut) - len(kept)} dialogues were left out: one turn fills half of {limit} tokens")
    if not kept:
        raise UserError(
            "no dialogue fits the context", item="max_context", found=limit, expected="more than two turns' tokens"
        )
    if not any(piece.is_answer and piece.ids for index in kept for part in cut[index] for piece in part.pieces):
        raise UserError("nothing to score: every answer is empty", item="dialogues", found=f"{len(kept)} dialogues")
    longest = max(segment.tokens for index in kept for segment in cut[index])
    if longest < 2048:
        session.notes.append(
            f"short context: no dialogue is longer than {longest} tokens, so damage that needs longer ones cannot show"
        )
    return DialoguePart(
        session, turns, renderer, [dialogues[index] for index in kept], [cut[index] for index in kept], limit
    )
