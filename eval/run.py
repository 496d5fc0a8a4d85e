"""`evaluate`: one source, any number of exports, one result."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from glm5_quant.eval.assemble import assemble
from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.diagnose import diagnose
from glm5_quant.eval.dialogue_part import CORPUS, DialoguePart, dialogue_part
from glm5_quant.eval.gates import check_measured, decide, parse_gates
from glm5_quant.eval.result import EvalResult
from glm5_quant.eval.session import Progress, Session, Warn
from glm5_quant.eval.tasks import read_tasks, run_tasks
from glm5_quant.eval.text_part import TextPart, text_part
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import Texts, read_texts


def evaluate(
    source: Any,
    exports: Sequence[Any] = (),
    texts: Iterable[Any] | Texts | str | Path | None = None,
    *,
    dialogues: Iterable[Any] | Texts | str | Path | None = None,
    tasks: Sequence[str | Path] = (),
    prompts: Sequence[str] = (),
    tokenizer: Any = None,
    names: Sequence[str] | None = None,
    config: EvalConfig | None = None,
    progress: Progress | None = None,
    warn: Warn | None = None,
    **settings: Any,
) -> EvalResult:
    """Measure how far exports are from their source.

    source, exports: model folders, transformers causal LMs, or functions `(ids [B, T], mask | None) -> logits
    [B, T, V]`. texts: strings, token id lists, rows of `model.texts.read_texts`, or a path or hub id to read.
    dialogues: rows with `messages`, or a path, for `long_dialogue`; glm5-tiny's held-out corpus where none are given.
    tasks: files of numeric problems (GSM8K, SVAMP, CMATH). prompts: texts whose routing is traced token by token in
    every model (`result.traces`). tokenizer: taken from the source's folder unless given.
    names: what exports are called in the report. config or settings: fields of `EvalConfig`. progress: told of every
    step. warn: told of folders that are doubtful before any model runs; the result's notes say it as well.

    Without texts the figures are those of the dialogues' answers. Scoring runs the source once over the text and each
    export once (1 + N passes), besides `diagnose` windows looked at in parts. Raises UserError for settings, texts or
    models that cannot be used. A model whose figures are not finite does not raise: the result has status "invalid".
    """
    started, cpu = time.monotonic(), time.process_time()
    config = replace(config or EvalConfig(), **settings)
    gates = parse_gates(config.gates)
    check_measured(gates, config)
    problems = read_tasks(tasks, config.num_problems)
    if dialogues is not None and config.long_dialogue is None:
        hint = "Set long_dialogue to the turns wanted, or give the rows as texts."
        raise UserError("dialogues are read turn by turn only", item="long_dialogue", found=None, hint=hint)
    data, talks = _read_data(texts), _read_data(dialogues)
    with Session(source, list(exports), names, tokenizer, config, progress, warn) as session:
        session.notes += [warning for found in (data, talks) if found is not None for warning in found.warnings]
        if problems and session.tokenizer is None:
            raise UserError("numeric tasks need a tokenizer", item="tokenizer")
        text, talk = _plan(session, data, talks)
        session.open()
        _run(session, text, talk, prompts)
        result = assemble(session, text, talk, diagnose(session, text, talk), run_tasks(session, problems))
    return replace(
        result,
        gates=decide(gates, result.exports, sound=result.invalid is None),
        versions=_versions(),
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - cpu,
        peak_memory_bytes=_peak_memory(),
    )


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Rows of a text or of dialogues, how many empty ones their reader passed over, and what it warned of."""

    rows: list[Any]
    rows_empty: int = 0
    warnings: tuple[str, ...] = ()


def _read_data(texts: Iterable[Any] | Texts | str | Path | None) -> _Data | None:
    if texts is None:
        return None
    if isinstance(texts, str | Path):
        return _read_data(read_texts(texts, split="test"))
    if isinstance(texts, Texts):
        return _Data(rows=list(texts.rows), rows_empty=texts.rows_empty, warnings=texts.warnings)
    return _Data(rows=list(getattr(texts, "rows", texts)))


def _plan(
    session: Session, texts: _Data | None, dialogues: _Data | None
) -> tuple[TextPart | None, DialoguePart | None]:
    """Both parts, planned before any model runs, so that what cannot work fails at once."""
    rows = None if texts is None else texts.rows
    talked = None if dialogues is None else dialogues.rows
    talk = dialogue_part(session, talked) if session.config.long_dialogue else None
    if talk is None and session.config.kv_cache != "fp16":
        session.notes.append(
            f"the {session.config.kv_cache} KV cache is read back in long dialogues only: none were asked for"
        )
    if talk is None and session.config.free_running:
        session.notes.append("free running: models answer in long dialogues only: none were asked for")
    if session.config.stress and rows is None and talk is not None:
        session.notes.append("the stress shapes are made of texts, and only dialogues were given")
    if rows is None and talk is None:
        from glm5_quant.model.tiny.corpus import evaluation_dialogues

        rows = evaluation_dialogues(8, 40)
        session.notes.append(f"no text was given: the text is {CORPUS}")
    return None if rows is None else text_part(session, rows, texts.rows_empty if texts is not None else 0), talk


def _run(session: Session, text: TextPart | None, talk: DialoguePart | None, prompts: Sequence[str]) -> None:
    config = session.config
    if config.sequential:
        # The source's answers are kept first, so that it need not be held while exports run.
        _read(session, text, talk, [], with_source=True)
        session.trace(prompts, [None])
        session.release()
    for group in session.groups():
        _read(session, text, talk, group, with_source=not config.sequential)
        session.trace(prompts, group if config.sequential else [None, *group])
        if config.sequential:
            session.release(group[0])


def _read(
    session: Session, text: TextPart | None, talk: DialoguePart | None, group: list[int], with_source: bool
) -> None:
    steps = []
    if text is not None:
        steps.append(partial(text.run, group))
    if talk is not None:
        steps.append(partial(talk.run, group, with_source))
        if session.config.free_running:
            steps.append(partial(talk.converse, [None, *group] if with_source else group))
    for step in steps:
        step()


def _versions() -> dict[str, str]:
    packages = ("glm5-quant", "torch", "transformers", "numpy")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
