"""The journal: what calibration leaves on disk, one finished file a layer.

Layout of `<work>/calibration/`:

    manifest.json               what was calibrated with what; written first, never changed
    layers/00012.safetensors    the layer's packed tensors, in their final form (see below)
    layers/00012.json           coverage, errors, timings; its presence means the layer is finished
    layers/00012.shadows.safetensors   what the layer offers for shadows; calibration's own, export does not read it
    shadows.safetensors         the shadows bought for the whole model after the last layer, in the sidecar's names
    samples.json                which windows were chosen, where they were
    finish.json                 what that came to; its presence means the journal is complete
    log.jsonl                   one line an event
    report.md                   what it came to, for people
    stream/                     hidden states at the last finished layer boundary, so that a killed run goes on

A layer file holds for each quantized linear M: `M.weight_packed` int32 [N, ceil(K/8)], `M.weight_scale` [N, B],
`M.weight_zero_point` int32 [ceil(N/8), B] (asymmetric only), `M.weight_shape` int64 [2]; replaced plain tensors under
their full source name; and what only our own runtime reads under names that begin with `eampq/`.
It lives in `model/` because export reads it; calibration writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from glm5_quant.model import atomic
from glm5_quant.model.errors import UserError

SCHEMA = 1
SIDECAR_PREFIX = "eampq/"
_M = TypeVar("_M", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRecord(_Record):
    """The checkpoint that was calibrated. `shards` maps a file name to a digest of its header, size and samples."""

    folder: str
    model_type: str
    dtype: str
    config_sha256: str
    shards: dict[str, str]

    def differing(self, config: dict[str, Any], shards: Iterable[Path]) -> list[str]:
        """Names of a checkpoint's files that are not those of this record, config.json first."""
        found = {path.name: shard_digest(path) for path in shards}
        names = sorted(n for n in found.keys() | self.shards.keys() if found.get(n) != self.shards.get(n))
        return ["config.json"] * (self.config_sha256 != config_digest(config)) + names


class DataRecord(_Record):
    """The calibration tokens. `sha256` is over all token ids in order."""

    name: str
    sha256: str
    windows: int
    seqlen: int
    tokens: int


class Manifest(_Record):
    """First file of a journal: everything that decides its bytes."""

    schema_version: int = SCHEMA
    tool_version: str
    source: SourceRecord
    data: DataRecord
    settings: dict[str, Any]
    layers: int

    def differences(self, other: Manifest) -> list[str]:
        """Names of what differs from `other` with both values, e.g. `settings.symmetric: True here, False in ...`.

        The folder's own path and the data's name may differ: a moved checkpoint with the same bytes is the same.
        """
        mine, theirs = _flat(self.model_dump()), _flat(other.model_dump())
        skip = {"source.folder", "data.name"}
        names = [n for n in sorted(mine.keys() | theirs.keys()) if n not in skip and mine.get(n) != theirs.get(n)]
        return [f"{name}: journal has {theirs.get(name)!r}, this run has {mine.get(name)!r}" for name in names]


class ModuleRecord(_Record):
    """One quantized linear. Errors are relative: tr(E H E^T) / tr(W H W^T), on calibration tokens.

    The held-out ones, on tokens kept out of the solve where there were any, are measured against the source stream:
    |W^ x~ - W x|^2 with x~ the input that the quantized layers before it leave. `held_out_rtn` has round-to-nearest in
    the place of W^, `held_out_floor` the source's own weight W: what the layers before did, and no rounding here. What
    W^ makes up for on purpose of what the residual stream lacks is no error, and left out of all of them.
    `effective_tokens` and the errors of an expert that leans on its layer count what it leans on; `tokens` does not.
    """

    role: str
    n: int
    k: int
    tokens: int
    effective_tokens: float
    error: float
    error_rtn: float
    held_out_error: float | None = None
    held_out_rtn: float | None = None
    held_out_floor: float = 0.0
    alpha: float = 0.0
    bits: int = 4
    zero_blocks: int = 0
    fallback: str | None = None

    @property
    def shown_error(self) -> float:
        """The held-out error where there is one: what people are shown, and what matrices are ranked by."""
        return self.error if self.held_out_error is None else self.held_out_error


class CompensationRecord(_Record):
    """What is added to a layer's output: `gain` times a vector. `error_left` is the share of the quantized stream's
    error (relative to the source's, token by token) that held-out tokens keep with it."""

    gain: float
    error_left: float


class RouterRecord(_Record):
    """A router fitted again to the quantized stream: whether it was kept, with which strength, and the share of the
    source's experts chosen again for held-out tokens, with the source's router and with the new one."""

    kept: bool
    strength: float
    agreement_before: float
    agreement_after: float
    tokens: int


class LayerRecord(_Record):
    """One finished layer. `coverage[e]` is how many calibration tokens expert e saw; None in dense layers. `ablation`:
    for some matrices the held-out error after each part of the method, in order, was put to those before it."""

    layer: int
    file_sha256: str
    modules: dict[str, ModuleRecord]
    coverage: list[int] | None = None
    stream_error: float | None = None
    compensation: CompensationRecord | None = None
    router: RouterRecord | None = None
    seconds: float = 0.0
    notes: list[str] = []
    ablation: dict[str, dict[str, float]] = {}


class SamplesRecord(_Record):
    """`samples.json`: which windows of the candidates were calibrated on, where they were chosen by expert coverage.

    `before` and `after` are tokens by layer and expert: of the first windows, which would have been taken, and of the
    chosen ones.
    """

    candidates: int
    chosen: list[int]
    before: list[list[int]]
    after: list[list[int]]


class FinishRecord(_Record):
    """The step after the last layer: shadows bought for the whole model under one byte budget.

    `shadows_sha256` is None where none were bought and there is no file, `tables_sha256` where neither head nor
    embedding is stored in 8 bits (and in early journals). `columns` counts single columns, `experts` names those kept
    whole. `gain` is the share of the experts' weighted relative error that the shadows remove by estimate;
    `held_out_gain` the same, of what tokens kept out of their fit could judge; `refused_layers` lists layers whose
    shadows would have raised the error there.
    """

    shadows_sha256: str | None = None
    tables_sha256: str | None = None
    budget_bytes: int = 0
    spent_bytes: int = 0
    expert_fp16_bytes: int = 0
    expert_int4_bytes: int = 0
    columns: int = 0
    experts: list[str] = []
    gain: float = 0.0
    held_out_gain: float = 0.0
    refused_layers: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Journal:
    """A journal folder that was opened and validated. Use `open_journal` to read, calibration's own code to write."""

    folder: Path
    manifest: Manifest

    def layer_file(self, layer: int) -> Path:
        return self.folder / "layers" / f"{layer:05d}.safetensors"

    def record_file(self, layer: int) -> Path:
        return self.folder / "layers" / f"{layer:05d}.json"

    def candidates_file(self, layer: int) -> Path:
        return self.folder / "layers" / f"{layer:05d}.shadows.safetensors"

    @property
    def samples_file(self) -> Path:
        return self.folder / "samples.json"

    @property
    def shadow_file(self) -> Path:
        return self.folder / "shadows.safetensors"

    @property
    def tables_file(self) -> Path:
        """Head and embedding, where they are stored in 8 bits."""
        return self.folder / "layers" / "model.safetensors"

    @property
    def finish_file(self) -> Path:
        return self.folder / "finish.json"

    def finished(self) -> list[int]:
        """Layers whose record exists, counted from 0 without a gap."""
        done: list[int] = []
        while len(done) < self.manifest.layers and self.record_file(len(done)).exists():
            done.append(len(done))
        return done

    def record(self, layer: int) -> LayerRecord:
        return read_model(self.record_file(layer), LayerRecord)

    def finish_record(self) -> FinishRecord:
        return read_model(self.finish_file, FinishRecord)

    @property
    def complete(self) -> bool:
        """Every layer is finished, and so is the step after the last one."""
        return len(self.finished()) == self.manifest.layers and self.finish_file.exists()


def open_journal(folder: Path | str) -> Journal:
    """Open a journal for reading.

    Raises:
        UserError: no journal there (with the command to run), or a manifest that is damaged or of another schema.
    """
    folder = Path(folder)
    path = folder / "manifest.json"
    if not path.exists():
        raise UserError("no calibration journal here", file=folder, hint="Run `glm5-quant calibrate` first")
    manifest = read_model(path, Manifest)
    if manifest.schema_version != SCHEMA:
        raise UserError("journal of another version", file=path, found=manifest.schema_version, expected=SCHEMA)
    return Journal(folder=folder, manifest=manifest)


def read_model(path: Path, kind: type[_M]) -> _M:
    """Read and validate one JSON file; a damaged one is a `UserError` naming the first wrong item."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        item = ".".join(str(part) for part in first["loc"]) or None
        raise UserError("not a valid record", file=path, item=item, found=first["msg"]) from None
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", file=path) from None


def write_record(path: Path, record: BaseModel) -> None:
    atomic.write_bytes(path, (record.model_dump_json(indent=1) + "\n").encode())


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shard_digest(path: Path, samples: int = 256, sample_bytes: int = 1 << 16) -> str:
    """Digest of a shard's size and evenly spaced samples; the whole file where the samples would cover it.

    A 744B checkpoint is 1.5 TB: hashing it all would cost an hour at every start. Both ends are always in.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= samples * sample_bytes:
            digest.update(file.read())
        else:
            for i in range(samples):
                file.seek(i * (size - sample_bytes) // (samples - 1))
                digest.update(file.read(sample_bytes))
    return digest.hexdigest()[:32]


def config_digest(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:32]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, item in value.items():
        out |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return out
