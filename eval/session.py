"""The models, tokenizer and settings of one evaluation in progress."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.critical import read_critical_words
from glm5_quant.eval.loading import (
    dtype_of,
    is_folder,
    local,
    names_of,
    open_runner,
    other_tokenizers,
    outline_of,
    same_vocabulary,
    tokenizer_of,
)
from glm5_quant.eval.model_parts import decoder_layers, experts_of
from glm5_quant.eval.prefix import find_prefix
from glm5_quant.eval.provenance import look_at
from glm5_quant.eval.result import RoutingTrace
from glm5_quant.eval.routing import routing_trace
from glm5_quant.eval.runner import Runner
from glm5_quant.eval.score import Marker
from glm5_quant.eval.source_cache import SourceCache
from glm5_quant.eval.vocabulary import numeric_mask
from glm5_quant.model.atomic import check_writable
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded
from glm5_quant.model.journal import config_digest, shard_digest
from glm5_quant.model.placing import check_device

Progress = Callable[[str, int, int | None], None]
"""Called as (stage, done, total or None) while work goes on."""
Warn = Callable[[str], None]
"""Called with each warning as soon as it is known."""


def _make(folder: Path) -> None:
    """A folder to write to; UserError where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("this folder cannot be made", file=folder, found=error.strerror) from error
    check_writable(folder)


class Session:
    """One evaluation in progress. A context manager: it owns a scratch folder and the models it opened.

    State: `source` (None until `open` and once released), opened exports, routing traces, and `notes` for the reader
    of the report.
    """

    def __init__(
        self,
        source: Any,
        exports: list[Any],
        names: Sequence[str] | None,
        tokenizer: Any,
        config: EvalConfig,
        progress: Progress | None,
        warn: Warn | None = None,
    ) -> None:
        self.config, self.progress = config, progress or (lambda stage, done, total: None)
        check_device(config.device)
        if config.source_cache:
            _make(expanded(config.source_cache))
        self.names = names_of(exports, names)
        self.words = read_critical_words(config.critical_words)
        self.source_named = str(source) if is_folder(source) else ""
        source, exports = local(source), [local(export) for export in exports]
        self.source_model, self.export_models = source, exports
        self.tokenizer = tokenizer if tokenizer is not None else tokenizer_of(source, exports)
        self.prefix = find_prefix(self.tokenizer, config.prefix)
        seen = look_at(source, exports, self.names, config)
        self.packed = seen.packed
        self.warn = warn or (lambda warning: None)
        self.notes: list[str] = []
        for warning in seen.warnings:
            self.doubt(warning)
        outline = outline_of(source)
        self.source_name = Path(self.source_named).resolve().name if self.source_named else outline.name
        self.layers = outline.layers
        self.max_positions, self.vocab_size = outline.max_positions, outline.vocab_size
        for export, name in zip(exports, self.names, strict=True):
            same_vocabulary(self.vocab_size, outline_of(export).vocab_size, name)
        self.source: Runner | None = None
        self.marker = Marker(numeric_mask(self.tokenizer, self.vocab_size))
        self.opened: dict[int, Runner] = {}
        self.notes += other_tokenizers(source, exports, self.names)
        self.read: dict[int | None, int] = {}
        self.traces: list[RoutingTrace] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="glm5-quant-")

    def doubt(self, warning: str) -> None:
        """Warn at once, and in the report's notes."""
        self.warn(warning)
        self.notes.append(warning)

    def open(self) -> None:
        """Load the source, and the exports unless they are held one at a time."""
        self.source = open_runner(self.source_model, self.config)
        for index in range(0 if self.config.sequential else len(self.export_models)):
            self.export(index)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scratch.cleanup()

    def export(self, index: int) -> Runner:
        """An export's runner, opened on first use."""
        if index not in self.opened:
            self.opened[index] = open_runner(self.export_models[index], self.config, self.names[index])
        return self.opened[index]

    def groups(self) -> list[list[int]]:
        """Exports that are held together: all, or one at a time."""
        everything = list(range(len(self.names)))
        return [[index] for index in everything] if self.config.sequential else [everything]

    def release(self, index: int | None = None) -> None:
        """Drop the source (None) or an export, so that its memory can be used by the next model."""
        self.read[index] = self.tokens_read(index)
        if index is None:
            self.source = None
        else:
            self.opened.pop(index, None)

    def tokens_read(self, index: int | None) -> int:
        """How many tokens the source (None) or an export has been run on."""
        runner = self.source if index is None else self.opened.get(index)
        return self.read.get(index, 0) if runner is None else runner.tokens

    def trace(self, prompts: Sequence[str], group: Sequence[int | None]) -> None:
        """Note the routing of every prompt in a group of models (None: the source), where they have experts at all."""
        for index in group if prompts else ():
            runner = self.source if index is None else self.export(index)
            name = "source" if index is None else self.names[index]
            if self.tokenizer is None or runner is None or not any(map(experts_of, decoder_layers(runner.model))):
                self.notes.append(f"{name}: no routing to trace, for it has no experts or no tokenizer")
                continue
            for prompt in prompts:
                self.traces.append(routing_trace(runner.model, self.tokenizer, prompt, name))

    def kept(self, part: str) -> SourceCache | None:
        """Where the source's answers for a part of the evaluation are kept, if they are."""
        folder = self.config.source_cache or (self._scratch.name if self.config.sequential else "")
        if not folder:
            return None
        prefix, top_k = list(self.prefix.ids), self.config.top_k
        made_by = f"source={self._fingerprint} dtype={dtype_of(self.config)} prefix={prefix} top_k={top_k}"
        return SourceCache(expanded(folder) / part, top_k=top_k, made_by=made_by)

    @cached_property
    def _fingerprint(self) -> str:
        """What tells the source from another one of its name: config and samples of its shards; a model object has its
        name only."""
        if not (is_folder(self.source_model) and self.config.source_cache):
            return self.source_name
        checkpoint = open_checkpoint(self.source_model)
        parts = [config_digest(checkpoint.config), *map(shard_digest, checkpoint.shards)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:32]
