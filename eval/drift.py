"""Teacher-forced drift: source and exports read the same dialogue; what each thinks of every answer, turn by turn.

Each model keeps its own cache and reads the dialogue in chunks (or token by token, as in serving); the logits of a
chunk are compared and dropped before the next one is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm5_quant.eval.critical import CriticalWords
from glm5_quant.eval.dialogue import Segment
from glm5_quant.eval.divergence import score_source
from glm5_quant.eval.result import Invalid
from glm5_quant.eval.routing import RoutingWatch
from glm5_quant.eval.runner import Runner
from glm5_quant.eval.score import POSITION_BANDS, Marker, Scores, against_itself, compare_with
from glm5_quant.eval.source_cache import SourceCache
from glm5_quant.eval.tally import FIELDS, Tally, position_band, token_columns

Floats = NDArray[np.float64]
Work = Callable[[Iterable[Callable[[], Any]]], Iterator[Any]]
"""Runs steps and gives their results in order."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """Token ids of a segment with, for each, its turn, whether it is scored, and whether it is critical."""

    ids: NDArray[np.int64]
    turn: NDArray[np.int64]
    scored: NDArray[np.bool_]
    critical: NDArray[np.bool_]


def lay_out(segment: Segment, tokenizer: Any = None, words: CriticalWords | None = None) -> Track:
    """One segment as flat arrays. Answer tokens of turns not yet scored are scored, what closes an answer included."""
    ids, turns, scored, critical = [], [], [], []
    for piece in segment.pieces:
        size = len(piece.ids)
        ids.append(np.asarray(piece.ids, dtype=np.int64))
        turns.append(np.full(size, piece.turn))
        wanted = piece.is_answer and piece.turn >= segment.first_scored_turn
        scored.append(np.full(size, wanted))
        marks = words.mark(tokenizer, piece.text, size) if words is not None and wanted else None
        critical.append(np.zeros(size, dtype=np.bool_) if marks is None else marks)
    return Track(
        ids=np.concatenate(ids),
        turn=np.concatenate(turns),
        scored=np.concatenate(scored),
        critical=np.concatenate(critical),
    )


@dataclass
class Drift:
    """Sums of FIELDS over scored answers: by turn [D, N, 8] (all tokens and numeric ones) and by slice."""

    name: str
    turns: int
    by_turn: list[Floats] = field(default_factory=list)
    numeric_by_turn: list[Floats] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    invalid: Invalid | None = None
    cache: Any = None
    labels: tuple[str, ...] = ()

    def begin(self, labels: tuple[str, ...] = ()) -> None:
        """Make room for the next dialogue, all of whose tokens belong to the slices `labels`."""
        self.labels = labels
        self.by_turn.append(np.zeros((self.turns, len(FIELDS))))
        self.numeric_by_turn.append(np.zeros((self.turns, len(FIELDS))))

    def add(self, columns: Floats, turn: NDArray[np.int64], slices: dict[str, NDArray[np.bool_] | None]) -> None:
        """Add scored tokens [S, 8] of the current dialogue."""
        np.add.at(self.by_turn[-1], turn, columns)
        numeric = slices["numeric"]
        if numeric is not None:
            np.add.at(self.numeric_by_turn[-1], turn[numeric], columns[numeric])
        whole: dict[str, NDArray[np.bool_] | None] = dict.fromkeys(self.labels)
        self.tally.add((len(self.by_turn) - 1, 0), columns, slices | whole)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A model reading dialogues, and how to make the cache it reads with. runner None: only its kept answers are
    left. most: tokens that this cache may be read with at once (None: any number)."""

    name: str
    runner: Runner | None
    new_cache: Callable[[], Any]
    most: int | None = None

    def step(self, ids: torch.Tensor, cache: Any, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [1, C, V] of the next tokens, or only those at `keep`, in rising order."""
        if self.runner is None:
            raise ValueError(f"{self.name} is no longer held")
        size = ids.shape[1] if self.most is None else self.most
        if ids.shape[1] <= size:
            return self.runner.step(ids, cache, keep)
        made = []
        for start in range(0, ids.shape[1], size):
            inside = None if keep is None else keep[(keep >= start) & (keep < start + size)] - start
            made.append(self.runner.step(ids[:, start : start + size], cache, inside))
        return torch.cat(made, dim=1)


def in_turn(steps: Iterable[Callable[[], Any]]) -> Iterator[Any]:
    """Each step when its result is asked for, so that only one model's logits exist at a time."""
    return (step() for step in steps)


@contextmanager
def at_once(readers: Iterable[Reader], together: int) -> Iterator[Work]:
    """Up to `together` models at once in threads of their own, unless one model is read with more than once."""
    models = [id(reader.runner.model) for reader in readers if reader.runner is not None]
    if together == 1 or len(set(models)) < len(models):
        yield in_turn
        return
    with ThreadPoolExecutor(together) as pool:
        yield lambda steps: pool.map(lambda step: step(), steps)


def measure_drift(
    source: Reader,
    exports: Sequence[Reader],
    dialogues: Sequence[Sequence[Segment]],
    turns: int,
    marker: Marker,
    *,
    chunk: int,
    work: Work = in_turn,
    tokenizer: Any = None,
    words: CriticalWords | None = None,
    kept: SourceCache | None = None,
    labels: Sequence[tuple[str, ...]] = (),
    watch: RoutingWatch | None = None,
    seen: Callable[[int], None] = lambda _: None,
) -> tuple[Drift, list[Drift]]:
    """Read all dialogues with all models, `chunk` tokens at a time (1: token by token).

    labels: for each dialogue the slices it belongs to as a whole ("language:zh"). watch: sees what the routers of the
    source and of the first exports chose. work: how the models' steps over a chunk are run. Returns the source's own
    sums and those of each export against it. A model with figures that are not finite is marked invalid at its first
    bad token and not read with again; a broken source ends the measurement.
    """
    base, found = Drift(source.name, turns), [Drift(export.name, turns) for export in exports]
    number = 0
    for index, parts in enumerate(dialogues):
        for drift in (base, *found):
            drift.begin(labels[index] if labels else ())
        for segment in parts:
            track = lay_out(segment, tokenizer, words)
            caches = [reader.new_cache() for reader in (source, *exports)]
            for part in _chunks(track, chunk):
                at = part.at
                running = [place for place, drift in enumerate(found) if drift.invalid is None]
                results = work(
                    [
                        partial(_reference, source, caches[0], track, part, number, kept),
                        *(partial(exports[n].step, part.ids, caches[n + 1], part.before) for n in running),
                    ]
                )
                reference = next(results)
                number += 1
                if watch is not None:
                    watch.source_ran(part.ids.shape[1])
                for place, logits in zip(running, results, strict=True):
                    if watch is not None:
                        watch.export_ran(place, None)
                    if reference is not None:
                        scores = compare_with(reference, logits, *_places(len(at)))
                        _note(found[place], scores, track, at, marker, index)
                if reference is not None:
                    _note(base, against_itself(reference), track, at, marker, index)
                if base.invalid is not None:
                    return base, found
            for drift, cache in zip((base, *found), caches, strict=True):
                drift.cache = cache if drift.cache is None else drift.cache
        seen(index + 1)
    return base, found


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Token ids [1, C] from `start` on, positions `at` of the scored tokens they predict, and a digest of all tokens
    of the segment so far."""

    start: int
    ids: torch.Tensor
    at: NDArray[np.int64]
    so_far: bytes

    @property
    def before(self) -> torch.Tensor:
        """Places in the chunk whose logits predict the scored tokens."""
        return torch.from_numpy(self.at - self.start - 1)


def _chunks(track: Track, size: int) -> Iterator[_Chunk]:
    """The chunks of a segment. The last token predicts nothing."""
    # Nothing after the last scored token is asked for, so reading stops before it.
    end = int(np.flatnonzero(track.scored)[-1]) if track.scored.any() else 0
    read = hashlib.sha256()
    for start in range(0, end, size):
        stop = min(start + size, end)
        read.update(track.ids[start:stop].tobytes())
        at = start + 1 + np.flatnonzero(track.scored[start + 1 : stop + 1])
        yield _Chunk(start=start, ids=torch.from_numpy(track.ids[None, start:stop]), at=at, so_far=read.digest())


def _places(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and positions of `count` kept logits, as `compare` wants them: the logits of position p stand at p - 1."""
    return torch.zeros(count, dtype=torch.int64), torch.arange(1, count + 1)


def _reference(
    source: Reader, cache: Any, track: Track, part: _Chunk, number: int, kept: SourceCache | None
) -> Scores | None:
    """The source's answers for one chunk, or None where the chunk has nothing to score."""
    targets = torch.from_numpy(track.ids[part.at])
    # An answer depends on all that was read before it, so the key of what is kept names that too.
    so_far = torch.from_numpy(np.frombuffer(part.so_far, dtype=np.int64).copy())
    key = torch.cat([so_far, torch.from_numpy(part.at), targets])
    if kept is not None and kept.has(number):
        return kept.read(number, key) if len(targets) else None
    _catch_up(source, cache, track, part)
    logits = source.step(part.ids, cache, part.before)
    if not len(targets):
        if kept is not None:
            kept.mark_empty(number)
        return None
    scores = score_source(logits, targets, *_places(len(targets)))
    return scores if kept is None else kept.write(number, key, scores)


def _catch_up(source: Reader, cache: Any, track: Track, part: _Chunk) -> None:
    """Read what the cache lacks: chunks whose answers were kept by a run that did not come to its end."""
    size = part.ids.shape[1]
    for start in range(0 if cache is None else int(cache.get_seq_length()), part.start, size):
        ids = torch.from_numpy(track.ids[None, start : min(start + size, part.start)])
        source.step(ids, cache, torch.zeros(0, dtype=torch.int64))


def _note(drift: Drift, scores: Any, track: Track, at: NDArray[np.int64], marker: Marker, dialogue: int) -> None:
    bad = scores.first_bad()
    if bad is not None:
        drift.invalid = Invalid(
            model=drift.name,
            document=dialogue,
            file=f"turn {int(track.turn[at[bad]]) + 1}",
            position=int(at[bad]),
            reason="the logits give a figure that is not finite",
        )
        return
    numeric = marker.is_numeric(scores.targets)
    slices: dict[str, NDArray[np.bool_] | None] = {"all": None, "numeric": numeric, "critical": track.critical[at]}
    for name, mask in position_band(POSITION_BANDS, at).items():
        slices[name], slices[f"numeric {name}"] = mask, mask & numeric
    drift.add(token_columns(scores), track.turn[at], slices)
