"""Numeric tasks: problems with one number as the answer (GSM8K, SVAMP, CMATH), answered greedily by every model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from glm5_quant.eval.dialogue import Dialogue, Renderer, Turn
from glm5_quant.eval.dialogue_part import cache_for
from glm5_quant.eval.drift import Reader
from glm5_quant.eval.generate import answer, ending_of
from glm5_quant.eval.numbers import Number, compare_numbers, find_numbers
from glm5_quant.eval.result import TaskResult
from glm5_quant.eval.session import Session
from glm5_quant.eval.statistics import Estimate, estimate
from glm5_quant.model.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question, and its answer as a number."""

    question: str
    answer: Number


def read_task(path: str | Path) -> list[Problem]:
    """Problems of a .json or .jsonl file, also as .gz: GSM8K (`question`, `answer` ending in "#### N"), SVAMP (`Body`,
    `Question`, `Answer`) or CMATH (`input`, `golden`). Raises UserError naming file, row and columns."""
    file = Path(path)
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = raw.decode("utf-8")
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line]
        )
    except (OSError, ValueError, EOFError) as error:
        raise UserError("cannot read this task", file=file, found=str(error)) from error
    if not rows:
        raise UserError("the task is empty", file=file)
    return [_problem(row, file, number) for number, row in enumerate(rows, start=1)]


def _problem(row: Mapping[str, Any], file: Path, number: int) -> Problem:
    if "Body" in row and "Answer" in row:
        question, gold = f"{row['Body'].rstrip(' .')}. {row['Question']}", row["Answer"]
    elif "golden" in row:
        question, gold = row["input"], row["golden"]
    elif "question" in row and "####" in str(row.get("answer", "")):
        question, gold = row["question"], row["answer"].rpartition("####")[2]
    else:
        raise UserError(
            "not a numeric problem",
            file=file,
            item=f"row {number}",
            found="columns " + ", ".join(row),
            expected="question and answer with ####, or Body, Question, Answer, or input and golden",
        )
    found = find_numbers(str(gold))
    if not found:
        raise UserError("the answer is no number", file=file, item=f"row {number}", found=gold)
    return Problem(question=str(question), answer=found[-1])


def final_number(text: str) -> Number | None:
    """The answer a text gives: the number after "####" where there is one, else the last one."""
    _, marked, rest = text.rpartition("####")
    found = find_numbers(rest)
    return (found[0] if marked else found[-1]) if found else None


def solve(reader: Reader, problems: Sequence[Problem], renderer: Renderer, limit: int) -> list[Number | None]:
    """A model's answers, each problem by itself."""
    ending = ending_of(renderer, getattr(reader.runner, "config", None))
    answers = []
    for problem in problems:
        asked = renderer.pieces(Dialogue(turns=(Turn(user=problem.question, answer="0"),)))[0]
        found = answer(reader, reader.new_cache(), asked.ids, ending.stops, limit)
        answers.append(final_number(renderer.tokenizer.decode(list(found.ids), skip_special_tokens=True)))
    return answers


def run_tasks(session: Session, files: Sequence[str | Path]) -> dict[int, tuple[TaskResult, ...]]:
    """Every task with every model, by export index; at most `num_problems` problems a task."""
    if not files:
        return {}
    if session.source is None:
        session.notes.append("numeric tasks were left out: models were held one at a time")
        return {}
    if session.tokenizer is None:
        raise UserError("numeric tasks need a tokenizer", item="tokenizer")
    tasks = {Path(file).name.split(".")[0]: read_task(file)[: session.config.num_problems] for file in files}
    renderer = Renderer(session.tokenizer, session.prefix)
    found: dict[int, list[TaskResult]] = {index: [] for index in range(len(session.names))}
    for name, problems in tasks.items():
        given = []
        for index in (None, *found):
            runner = session.source if index is None else session.export(index)
            reader = Reader(name="", runner=runner, new_cache=partial(cache_for, runner, None))
            given.append(solve(reader, problems, renderer, session.config.max_answer_tokens))
            session.progress(f"task {name}", len(given), len(found) + 1)
        for index in found:
            found[index].append(_result(session, name, problems, given[0], given[index + 1]))
    return {index: tuple(results) for index, results in found.items()}


def _result(
    session: Session,
    name: str,
    problems: Sequence[Problem],
    source: Sequence[Number | None],
    export: Sequence[Number | None],
) -> TaskResult:
    right = np.array(
        [
            [1.0, *(found is not None and found.value == problem.answer.value for found in pair)]
            for problem, pair in zip(problems, zip(source, export, strict=True), strict=True)
        ],
        dtype=np.float64,
    )

    def share(column: int, minus: int | None = None) -> Estimate:
        draws, seed = session.config.draws, session.config.seed
        return estimate(
            right,
            lambda t: np.asarray((t[:, column] - (0 if minus is None else t[:, minus])) / t[:, 0]),
            draws=draws,
            seed=seed,
        )

    return TaskResult(
        name=name,
        problems=len(problems),
        source_exact=share(1),
        exact=share(2),
        difference=share(2, 1),
        source_misreads=_misreads(problems, source),
        misreads=_misreads(problems, export),
    )


def _misreads(problems: Sequence[Problem], answers: Sequence[Number | None]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for problem, found in zip(problems, answers, strict=True):
        for kind, times in compare_numbers([problem.answer], [] if found is None else [found]).items():
            counts[kind] = counts.get(kind, 0) + times
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
