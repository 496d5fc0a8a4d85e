"""A finished journal made by plain round-to-nearest, for tests of export, verify and load that need no calibration.

make_journal(source, folder, ...)   every linear of the source (or those `only` picks), extra sidecar tensors and
                                    replaced plain tensors, with `rotation` and `activations` as calibration's settings
                                    would have them; returns the journal folder
rtn(weight, ...)                    codes, scale and zero of one matrix
export_of(source, folder, ...)      journal and export in one step; returns the export folder
sealed(export)                      records the weight files as they are now, as if they had been exported so
edit_layer(journal, layer, change)  change a layer's tensors behind calibration's back
dequantized_twin(source, export, folder)   the source in float32 with every packed matrix as its export holds it,
                                    rotation and channel scales taken back
block_hadamard(k)                   the rotation of k channels as a float64 matrix, by its definition
channel_scale(linear)               made-up scales of a linear's inputs, another for each module and expert
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.exported import Exported, open_exported
from glm5_quant.model.families import Linear, family_of, linears, read_linear
from glm5_quant.model.journal import (
    DataRecord,
    FinishRecord,
    Journal,
    LayerRecord,
    Manifest,
    ModuleRecord,
    SourceRecord,
    config_digest,
    file_sha256,
    open_journal,
    shard_digest,
    write_record,
)
from glm5_quant.quant.grid import Grid, dequantize, minmax_grid, quantize
from glm5_quant.quant.packing import pack_codes, pack_zeros


def rtn(weight: Tensor, *, symmetric: bool = False, scale_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Grid]:
    """Codes and grid of a matrix."""
    grid = minmax_grid(weight, symmetric=symmetric, scale_dtype=scale_dtype)
    return quantize(weight, grid), grid


def packed_parts(
    name: str, codes: Tensor, grid: Grid, *, symmetric: bool, scale_dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors a layer file holds for one matrix."""
    parts = {
        f"{name}.weight_packed": pack_codes(codes),
        f"{name}.weight_scale": grid.scale.to(scale_dtype),
        f"{name}.weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }
    return parts if symmetric else parts | {f"{name}.weight_zero_point": pack_zeros(grid.zero)}


def make_journal(
    source: Path,
    folder: Path,
    *,
    symmetric: bool = False,
    only: Callable[[Linear], bool] = lambda linear: True,
    extra: Mapping[str, Tensor] | None = None,
    settings: Mapping[str, Any] | None = None,
    rotation: str = "none",
    activations: str = "none",
) -> Path:
    """A complete journal of `source`. `extra`: tensors for layers/model.safetensors (replacements, `eampq/...`)."""
    checkpoint = open_checkpoint(source)
    family = family_of(checkpoint.config)
    by_layer: dict[int, dict[str, Tensor]] = defaultdict(dict)
    records: dict[int, dict[str, ModuleRecord]] = defaultdict(dict)
    for linear in linears(checkpoint, family):
        if not only(linear):
            continue
        weight = read_linear(checkpoint, linear).float()
        if rotation == "full":
            weight = (weight.double() @ block_hadamard(linear.k)).float()
        if activations == "int4-channel":
            by_layer[linear.layer][f"eampq/{linear.name}.activation_scale"] = channel_scale(linear)
            weight = weight * channel_scale(linear)
        codes, grid = rtn(weight, symmetric=symmetric, scale_dtype=checkpoint.dtype)
        by_layer[linear.layer] |= packed_parts(
            linear.name, codes, grid, symmetric=symmetric, scale_dtype=checkpoint.dtype
        )
        records[linear.layer][linear.name] = _record(linear, weight, codes, grid)
    layers = int(checkpoint.config["num_hidden_layers"])
    quant = {"symmetric": symmetric, "group_size": 64, "numeric_weight": 2.0}
    quant |= {"rotation": rotation, "activations": activations}
    manifest = Manifest(
        tool_version="0",
        source=source_record(checkpoint),
        data=DataRecord(name="none", sha256="0" * 64, windows=1, seqlen=1, tokens=1),
        settings=dict(settings or {"quant": quant, "seed": 0}),
        layers=layers,
    )
    (folder / "layers").mkdir(parents=True)
    write_record(folder / "manifest.json", manifest)
    journal = Journal(folder=folder, manifest=manifest)
    for layer in range(layers):
        save_file(by_layer[layer], journal.layer_file(layer), {"format": "pt"})
        record = LayerRecord(layer=layer, file_sha256=file_sha256(journal.layer_file(layer)), modules=records[layer])
        write_record(journal.record_file(layer), record)
    if extra:
        save_file(dict(extra), folder / "layers" / "model.safetensors", {"format": "pt"})
    write_record(journal.finish_file, FinishRecord())
    return folder


def edit_layer(journal: Path, layer: int, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change a layer's tensors and write the record that belongs to them."""
    opened = open_journal(journal)
    file = opened.layer_file(layer)
    save_file(change(load_file(file)), file, {"format": "pt"})
    record = opened.record(layer).model_copy(update={"file_sha256": file_sha256(file)})
    write_record(opened.record_file(layer), record)


def export_of(source: Path, folder: Path, **settings: Any) -> Path:
    """Journal in `folder`/journal, export in `folder`/export."""
    from glm5_quant.model import export

    journal = make_journal(source, folder / "journal", **settings)
    export(source, journal, folder / "export")
    return folder / "export"


def sealed(folder: Path) -> Path:
    """An export that was changed, with its weight files as they are now: what a bad writer would leave."""
    file = folder / "eampq" / "eampq.json"
    record = json.loads(file.read_text())
    record["sha256"] = {name: file_sha256(folder / name) for name in record["sha256"] if (folder / name).exists()}
    file.write_text(json.dumps(record))
    return folder


def dequantized_twin(source: Path, exported_folder: Path, folder: Path) -> Path:
    """A plain float32 checkpoint that any reader loads, holding what the export's codes and scales stand for."""
    exported, checkpoint = open_exported(exported_folder), open_checkpoint(source)
    assert exported is not None
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    for linear in linears(checkpoint, family_of(checkpoint.config)):
        if linear.name in exported.shapes:
            entry, first, last = linear.slice
            target = tensors[linear.source] if entry is None else tensors[linear.source][entry]
            target[first:last] = plain_weight(exported, linear)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


def plain_weight(exported: Exported, linear: Linear) -> Tensor:
    """A packed matrix for plain inputs, float64 [N, K]: W = W' diag(1 / a) R."""
    codes, grid = exported.read(linear.name)
    weight = dequantize(codes, Grid(scale=grid.scale.float(), zero=grid.zero)).double()
    if exported.scheme.inputs.activations == "int4-channel":
        weight = weight / channel_scale(linear).double()
    return weight @ block_hadamard(linear.k) if exported.scheme.inputs.rotation == "full" else weight


def block_hadamard(k: int) -> Tensor:
    """Entry (i, j) is (-1)^(ones in the binary i & j) / 8 within aligned blocks of 64; a ragged tail is left alone."""
    matrix = torch.eye(k, dtype=torch.float64)
    signs = [[(-1) ** (i & j).bit_count() / 8 for j in range(64)] for i in range(64)]
    for start in range(0, k - k % 64, 64):
        matrix[start : start + 64, start : start + 64] = torch.tensor(signs, dtype=torch.float64)
    return matrix


def channel_scale(linear: Linear) -> Tensor:
    """float32 [K] above 0, one tensor for each role (gate and up share theirs), layer and expert."""
    role = "gate" if linear.role == "up" else linear.role
    seed = zlib.crc32(f"{linear.layer} {role} {linear.expert} {linear.shared}".encode())
    return torch.rand(linear.k, generator=torch.Generator().manual_seed(seed)) * 0.2 + 0.05


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its bytes."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _record(linear: Linear, weight: Tensor, codes: Tensor, grid: Grid) -> ModuleRecord:
    error = (dequantize(codes, grid) - weight).square().sum() / weight.square().sum().clamp(min=1e-30)
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 64)).reshape(weight.shape[0], -1, 64)
    return ModuleRecord(
        role=linear.role,
        n=linear.n,
        k=linear.k,
        tokens=1,
        effective_tokens=1.0,
        error=float(error),
        error_rtn=float(error),
        zero_blocks=int((padded == 0).all(-1).sum()),
    )


def source_record(checkpoint: Any) -> SourceRecord:
    return SourceRecord(
        folder=str(checkpoint.folder),
        model_type=checkpoint.config["model_type"],
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        config_sha256=config_digest(checkpoint.config),
        shards={path.name: shard_digest(path) for path in checkpoint.shards},
    )
