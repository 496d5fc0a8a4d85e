"""What the folders of an evaluation are, by their headers and records: packed at all, made from this very source, and
readable in the dtype that was asked for. Found out before any model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.loading import is_folder
from glm5_quant.model.checkpoint import Checkpoint, open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.export_plan import PACKED, PART_ENDINGS
from glm5_quant.model.sidecar import open_sidecar

SHOWN = 3
"""Differing files that are named."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """packed: packed linears of each export (None where it is no folder and does not say).

    warnings: what is doubtful about the exports.
    """

    packed: tuple[int | None, ...]
    warnings: tuple[str, ...]


def look_at(source: Any, exports: Sequence[Any], names: Sequence[str], config: EvalConfig) -> Provenance:
    """Look at all folders; reads headers, records and, for exports that name their source, its shards' samples.

    Raises UserError for a folder that cannot be opened or read in the dtype asked for.
    """
    base = open_checkpoint(source) if is_folder(source) else None
    if base is not None:
        _check_dtype(base, config)
    known: dict[str, list[str]] = {}
    packed, warnings = [], []
    for export, name in zip(exports, names, strict=True):
        if not is_folder(export):
            packed.append(getattr(export, "packed_count", None))
            continue
        checkpoint = open_checkpoint(export)
        _check_dtype(checkpoint, config)
        packed.append(sum(tensor.endswith(PACKED) for tensor in checkpoint.tensors))
        if not packed[-1]:
            itself = base is not None and checkpoint.folder.resolve() == base.folder.resolve()
            warnings.append(
                f"{name}: not quantized: 0 packed linears" + (", it is the source itself" if itself else "")
            )
        differing = [] if base is None else _differences(checkpoint.folder, base, known)
        if differing:
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            files = ", ".join(differing[:SHOWN]) + more
            warnings.append(f"{name}: export was made from another model: {files} differ from {source}")
    return Provenance(packed=tuple(packed), warnings=tuple(warnings))


def _differences(export: Path, source: Checkpoint, known: dict[str, list[str]]) -> list[str]:
    """Files of the source that are not those the export's sidecar names; none where it names none. `known`: answers
    found before, since exports of one source name the same files."""
    opened = open_sidecar(export)
    record = opened[0].made_from() if opened else None
    if record is None:
        return []
    named = record.model_dump_json()
    if named not in known:
        known[named] = record.differing(source.config, source.shards)
    return known[named]


def _check_dtype(checkpoint: Checkpoint, config: EvalConfig) -> None:
    """UserError where float16 is asked for and most plain weights are stored wider: small ones would become 0."""
    if config.dtype != "float16":
        return
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype[:1] in ("F", "B") and info.dtype != "BOOL" and not info.name.endswith(PART_ENDINGS):
            sizes[info.dtype] += info.nbytes
    stored = next((dtype for dtype, _ in sizes.most_common(1)), "F16")
    if stored != "F16":
        raise UserError(
            "weights are never narrowed to float16, small ones would become 0",
            item="dtype",
            found=f"float16, with {stored} weights in {checkpoint.folder}",
            expected="auto, float32 or bfloat16",
        )
