"""`evaluate`: one source, any number of exports, one result."""

from __future__ import annotations

import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.documents import Encoder, as_documents
from glm5_quant.eval.gates import decide, parse_gates
from glm5_quant.eval.loading import (
    folder_bytes,
    is_folder,
    names_of,
    open_runner,
    same_vocabulary,
    tokenizer_of,
)
from glm5_quant.eval.prefix import Prefix, find_prefix
from glm5_quant.eval.result import SCHEMA_VERSION, EvalResult, ExportResult, Settings
from glm5_quant.eval.runner import Runner
from glm5_quant.eval.score import Marker, Pass, live_source, score
from glm5_quant.eval.source_cache import SourceCache
from glm5_quant.eval.summary import cluster_unit, drift_verdict, percentiles, summarize
from glm5_quant.eval.vocabulary import numeric_mask
from glm5_quant.eval.windows import Batch, WindowPlan, batches, cut, plan_windows
from glm5_quant.model.errors import UserError

Progress = Callable[[str, int, int | None], None]
"""Called as (stage, done, total or None) while work goes on."""


def evaluate(
    source: Any,
    exports: Sequence[Any] = (),
    texts: Iterable[Any] | str | Path | None = None,
    *,
    tokenizer: Any = None,
    names: Sequence[str] | None = None,
    config: EvalConfig | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> EvalResult:
    """Measure how far exports are from their source.

    source, exports: model folders, transformers causal LMs, or functions `(ids [B, T], mask | None) -> logits [B, T,
    V]`. texts: strings, token id lists, rows of `model.texts.read_texts`, or a path or hub id to read. tokenizer:
    taken from the source's folder unless given. names: what exports are called in the report. config or settings:
    fields of `EvalConfig`. progress: told of every step.

    The source runs once over the text and each export once: 1 + N passes, besides `diagnose` windows looked at in
    parts. Raises UserError for settings, texts or models that cannot be used. A model whose figures are not finite
    does not raise: its result has status "invalid".
    """
    started = time.monotonic()
    config = replace(config or EvalConfig(), **settings)
    gates = parse_gates(config.gates)
    session = Session(source, list(exports), names, tokenizer, config, progress)
    result = session.run(_rows(texts))
    return replace(
        result,
        gates=decide(gates, result.exports),
        versions=_versions(),
        seconds=time.monotonic() - started,
        peak_memory_bytes=_peak_memory(),
    )


def _rows(texts: Iterable[Any] | str | Path | None) -> list[Any] | None:
    if texts is None:
        return None
    if isinstance(texts, str | Path):
        from glm5_quant.model.texts import read_texts

        return list(read_texts(texts, split="test").rows)
    return list(getattr(texts, "rows", texts))


def _versions() -> dict[str, str]:
    packages = ("glm5-quant", "torch", "transformers", "numpy")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Session:
    """One evaluation in progress: its models, tokenizer and settings."""

    def __init__(
        self,
        source: Any,
        exports: list[Any],
        names: Sequence[str] | None,
        tokenizer: Any,
        config: EvalConfig,
        progress: Progress | None,
    ) -> None:
        self.config, self.progress = config, progress or (lambda stage, done, total: None)
        self.names = names_of(exports, names)
        self.tokenizer = tokenizer if tokenizer is not None else tokenizer_of(source, exports)
        self.prefix = find_prefix(self.tokenizer, config.prefix)
        self.export_models = exports
        self.source_model = source
        self.source = open_runner(source, config)
        self.open_exports: dict[int, Runner] = {}
        if not config.sequential:
            self.open_exports = {index: self._open(index) for index in range(len(exports))}
        self.numeric = numeric_mask(self.tokenizer, self.source.vocab_size)
        self.marker = Marker(self.numeric)
        self.notes: list[str] = []

    def _open(self, index: int) -> Runner:
        if index in self.open_exports:
            return self.open_exports[index]
        runner = open_runner(self.export_models[index], self.config, self.names[index])
        same_vocabulary(self.source, runner)
        return runner

    def run(self, rows: list[Any] | None) -> EvalResult:
        """All parts in order; text first."""
        if rows is None:
            raise UserError("no text to score", item="texts", expected="texts, a file or a hub data set")
        return self._score_texts(rows)

    def _score_texts(self, rows: list[Any]) -> EvalResult:
        plan = plan_windows(self.config.window, self.config.stride, self.prefix.ids, self.source.max_positions)
        encoder = Encoder(self.tokenizer, self.prefix)

        def make() -> Iterator[Batch]:
            encoder.empty = encoder.seen = 0
            windows = cut(encoder(as_documents(rows, self.tokenizer)), plan, self.config.num_windows)
            return batches(windows, self.config.batch_size, self.config.padding_side)

        base, passes = self._pass(make)
        return self._result(base, passes, encoder, plan)

    def _pass(self, make: Callable[[], Iterator[Batch]]) -> tuple[Pass, list[Pass]]:
        config, done = self.config, 0

        def seen(count: int) -> None:
            nonlocal done
            done += count
            self.progress("windows", done, config.num_windows)

        folder = config.source_cache
        with tempfile.TemporaryDirectory(prefix="glm5-quant-") as scratch:
            cache = self._cache(folder or (scratch if config.sequential else ""))
            reader = live_source(self.source, cache)
            if not config.sequential:
                return score(reader, [self._open(i) for i in range(len(self.names))], make(), self.marker, seen)
            base, _ = score(reader, [], make(), self.marker, seen)
            passes = []
            for index in range(len(self.names)):
                passes += score(reader, [self._open(index)], make(), self.marker, seen)[1]
            return base, passes

    def _cache(self, folder: str) -> SourceCache | None:
        if not folder:
            return None
        made_by = f"source={self.source.name} prefix={list(self.prefix.ids)} top_k={self.config.top_k}"
        return SourceCache(folder, top_k=self.config.top_k, made_by=made_by)

    def _result(self, base: Pass, passes: list[Pass], encoder: Encoder, plan: WindowPlan) -> EvalResult:
        everything = base.tally.sums.get("all", {})
        if not everything and base.invalid is None:
            raise UserError(
                "nothing to score: every text is empty or a single token",
                item="texts",
                found=f"{encoder.empty} of {encoder.seen} skipped",
            )
        unit = cluster_unit(base.tally)
        settings = self._settings(base, encoder, plan, unit)
        exports = tuple(self._export(index, outcome, unit) for index, outcome in enumerate(passes))
        draws, seed = self.config.draws, self.config.seed
        bad = base.invalid is not None or any(export.status != "ok" for export in exports)
        return EvalResult(
            schema_version=SCHEMA_VERSION,
            status="invalid" if bad else "ok",
            settings=settings,
            source_slices=summarize(base.tally, unit, draws, seed),
            exports=exports,
            invalid=base.invalid,
            notes=tuple(self.notes),
            forward_tokens=self.source.tokens,
        )

    def _export(self, index: int, outcome: Pass, unit: str) -> ExportResult:
        config = self.config
        if outcome.invalid is not None:
            return ExportResult(name=outcome.name, status="invalid", invalid=outcome.invalid)
        return ExportResult(
            name=outcome.name,
            status="ok",
            slices=summarize(outcome.tally, unit, config.draws, config.seed),
            kl_percentiles=percentiles(outcome.tally),
            equivalence=drift_verdict(outcome.tally, unit, config.margin, config.draws, config.seed),
            size_bytes=folder_bytes(self.export_models[index]),
        )

    def _settings(self, base: Pass, encoder: Encoder, plan: WindowPlan, unit: str) -> Settings:
        config = self.config
        slices = {name: base.tally.clusters(name, unit) for name in base.tally.sums}
        count = {name: int(sums[:, 0].sum()) for name, sums in slices.items()}
        return Settings(
            source=str(self.source_model) if is_folder(self.source_model) else self.source.name,
            unit="token",
            prefix=self.prefix.text,
            prefix_rule=self.prefix.rule,
            window=plan.window,
            stride=plan.stride,
            batch_size=config.batch_size,
            padding_side=config.padding_side,
            documents=encoder.seen,
            skipped_empty=encoder.empty,
            windows=len(base.tally.sums.get("all", {})),
            scored_tokens=count.get("all", 0),
            scored_numeric=count.get("numeric", 0),
            longest_position=plan.window,
            cluster_unit=unit,
            draws=config.draws,
            seed=config.seed,
            margin=config.margin,
            dtype=config.dtype,
            kv_cache=config.kv_cache,
            numeric_rule="quant.numeric" if self.numeric is not None else "none: no tokenizer",
            source_cache_top_k=config.top_k if config.source_cache or config.sequential else None,
        )


__all__ = ["EvalConfig", "EvalResult", "Prefix", "Progress", "evaluate"]
