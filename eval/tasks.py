"""Numeric tasks: problems with one number as the answer (GSM8K, SVAMP, CMATH), answered greedily by every model."""

from __future__ import annotations

import gzip
import json
import zlib
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
from glm5_quant.model.files import expanded

NEXT_USER = "\nUser:"
"""How the next turn begins in the plain form of dialogues."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question, and its answer as a number."""

    question: str
    answer: Number


def read_task(path: str | Path) -> list[Problem]:
    """Problems of a .json or .jsonl file, also as .gz: GSM8K (`question`, `answer` ending in "#### N"), SVAMP (`Body`,
    `Question`, `Answer`) or CMATH (`input`, `golden`). Raises UserError naming file, row and columns."""
    file = expanded(path)
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        # utf-8-sig drops the byte-order mark that editors on Windows put in front.
        text = raw.decode("utf-8-sig")
        # Lines end at "\n" alone: JSON strings may hold other line ends as they are.
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise UserError("cannot read this task", file=file, found=str(error)) from error
    if not rows:
        raise UserError("the task is empty", file=file)
    return [_problem(row, file, number) for number, row in enumerate(rows, start=1)]


def _problem(row: Any, file: Path, number: int) -> Problem:
    if not isinstance(row, Mapping):
        expected = "an object with a question and its answer"
        raise UserError(
            "not a row of a task", file=file, item=f"row {number}", found=type(row).__name__, expected=expected
        )
    if row.keys() >= {"Body", "Question", "Answer"}:
        question, gold = f"{str(row['Body']).rstrip(' .')}. {row['Question']}", row["Answer"]
    elif row.keys() >= {"input", "golden"}:
        question, gold = row["input"], row["golden"]
    elif "question" in row and "####" in str(row.get("answer", "")):
        question, gold = row["question"], str(row["answer"]).rpartition("####")[2]
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
    plain, decode = renderer.style == "plain", renderer.tokenizer.decode
    # In the plain form a line's end ends an answer; but a calculation has several lines, and the result stands last.
    stops = ending.stops - frozenset(ending.closing) if plain else ending.stops

    def next_turn(ids: Sequence[int]) -> bool:
        return plain and NEXT_USER in decode(list(ids[-16:]), skip_special_tokens=True)

    answers = []
    for problem in problems:
        asked = renderer.pieces(Dialogue(turns=(Turn(user=problem.question, answer="0"),)))[0]
        found = answer(reader, reader.new_cache(), asked.ids, stops, limit, next_turn)
        text = decode(list(found.ids), skip_special_tokens=True)
        answers.append(final_number(text.partition(NEXT_USER)[0] if plain else text))
    return answers


def read_tasks(files: Sequence[str | Path], most: int) -> dict[str, list[Problem]]:
    """The first `most` problems of every file, by its name without endings; by more of its path where names meet."""
    paths = [expanded(file).absolute() for file in files]
    parts = [(*path.parts[:-1], path.name.split(".")[0]) for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return {name: read_task(path)[:most] for name, path in zip(names, paths, strict=True)}
    raise UserError("the same task is named twice", item="tasks", found=[str(file) for file in files])


def run_tasks(session: Session, tasks: Mapping[str, Sequence[Problem]]) -> dict[int, tuple[TaskResult, ...]]:
    """Every task with every model, by export index."""
    if not tasks:
        return {}
    if session.source is None:
        session.notes.append("numeric tasks were left out: models were held one at a time")
        return {}
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
