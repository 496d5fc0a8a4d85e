"""The `eampq/` folder of an export: what only this package reads. Never named in the index, so other readers skip it.

    eampq/eampq.json                             settings, source fingerprint, what every matrix cost, list of tensors,
                                                 digests of all weight files
    eampq/eampq-00001-of-0000N.safetensors       the tensors

Tensors, for a quantized linear M and a decoder layer P (`model.layers.12`); S shadow columns, N out, D hidden:

    M.shadow_index int32 [S]        input columns whose error is added back: y += residual @ x[S], of the inputs x that
                                    M's codes see: rotated, divided by M.activation_scale and rounded, where so declared
    M.shadow_weight [N, S]          float16, or int8 with M.shadow_scale float16 [S]
    M.activation_scale float32 [K]  divisors of M's inputs in mode int4-channel, folded into its columns already; equal
                                    for the gate and up projections of one expert, which read the same input
    P.compensation float32 [D]      added to the layer's output times P.compensation_gain float32 scalar
    M.row_index int32 [R]           rows of an 8-bit head that are computed in source precision (numeric tokens), from
    M.row_weight [R, K]
    numeric_token_ids int64 [V]     vocabulary entries made of digits, separators, percent or currency signs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from glm5_quant.model.checkpoint import Checkpoint, TensorInfo
from glm5_quant.model.errors import UserError
from glm5_quant.model.exported import Exported
from glm5_quant.model.fp8 import Fp8Scheme
from glm5_quant.model.input_scales import header_faults
from glm5_quant.model.journal import SIDECAR_PREFIX, Journal, SourceRecord, read_model
from glm5_quant.model.safetensors_header import read_header
from glm5_quant.model.scheme import InputScheme
from glm5_quant.model.shards import Spec, Written

PREFIX = SIDECAR_PREFIX
FOLDER = PREFIX.rstrip("/")
JSON_NAME = f"{FOLDER}/eampq.json"
VERSION = 1
KINDS = {
    "shadow_index": "shadows",
    "shadow_weight": "shadows",
    "shadow_scale": "shadows",
    "compensation": "compensation",
    "compensation_gain": "compensation",
    "numeric_token_ids": "numeric_tokens",
    "activation_scale": "activations",
    "row_index": "numeric_rows",
    "row_weight": "numeric_rows",
}
PARTNERS = {
    "shadow_index": "shadow_weight",
    "shadow_weight": "shadow_index",
    "shadow_scale": "shadow_weight",
    "row_index": "row_weight",
    "row_weight": "row_index",
    "compensation": "compensation_gain",
    "compensation_gain": "compensation",
}
FEATURES = frozenset({*KINDS.values(), "rotation", "activations"})


class TensorRecord(BaseModel):
    """Where a sidecar tensor lies and what it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    dtype: str
    shape: list[int]


class SidecarRecord(BaseModel):
    """`eampq.json`. `features` names what the runtime must know to compute right; `inputs` says what it does to the
    inputs of packed matrices; `replaced` names the plain tensors that differ from the source's; `refitted_routers` the
    layers whose router was fitted again to the quantized stream; `sha256` the digest of each weight file of the export,
    by its name there (empty in early exports); `modules` what every matrix cost."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    format: Literal["eampq"] = "eampq"
    version: int
    tool_version: str
    source: dict[str, Any]
    data: dict[str, Any]
    settings: dict[str, Any]
    features: list[str]
    inputs: InputScheme = InputScheme()
    replaced: list[str]
    refitted_routers: list[int] = []
    tensors: dict[str, TensorRecord]
    sha256: dict[str, str] = {}
    modules: dict[str, dict[str, Any]]

    def made_from(self) -> SourceRecord | None:
        """The checkpoint this export was made from; its folder is not recorded. None where the record does not say."""
        try:
            return SourceRecord.model_validate({"folder": "", **self.source})
        except ValidationError:
            return None


def features(names: Iterable[str], inputs: InputScheme) -> list[str]:
    """What tensors and input scheme stand for; a kind of tensor this version does not know stands for itself."""
    endings = {name.rsplit(".", 1)[-1] for name in names}
    found = {KINDS.get(ending, ending) for ending in endings}
    found |= {name for name in ("rotation", "activations") if getattr(inputs, name) != "none"}
    return sorted(found)


def describe(
    journal: Journal,
    shards: Mapping[str, list[Spec]],
    replaced: list[str],
    inputs: InputScheme,
    written: Iterable[Written],
) -> dict[str, Any]:
    """The content of eampq.json. `written`: all weight files. Names no path of the machine that made it."""
    manifest = journal.manifest
    tensors = {
        spec.name: TensorRecord(file=file.removeprefix(PREFIX), dtype=spec.dtype, shape=list(spec.shape))
        for file, specs in shards.items()
        for spec in specs
    }
    layers = [journal.record(layer) for layer in range(manifest.layers)]
    modules = {
        name: module.model_dump(exclude_none=True) for layer in layers for name, module in sorted(layer.modules.items())
    }
    record = SidecarRecord(
        version=VERSION,
        tool_version=manifest.tool_version,
        source=manifest.source.model_dump(exclude={"folder"}),
        data=manifest.data.model_dump(exclude={"name"}),
        settings=manifest.settings,
        features=features(tensors, inputs),
        inputs=inputs,
        replaced=replaced,
        refitted_routers=[layer.layer for layer in layers if layer.router is not None and layer.router.kept],
        tensors=dict(sorted(tensors.items())),
        sha256={file.name: file.sha256 for file in sorted(written, key=lambda file: file.name)},
        modules=modules,
    )
    return record.model_dump()


def sidecar_faults(exported: Exported, opened: tuple[SidecarRecord, Checkpoint] | None) -> list[str]:
    """Where an export's config and its sidecar disagree on what is done to inputs, channel scales are missing, or a
    tensor does not fit the matrix or layer that it is for. By headers alone."""
    inputs = exported.scheme.inputs
    faults = header_faults(opened[1].tensors if opened else {}, exported.four, inputs.activations)
    faults += _tensor_faults(exported, opened[1].tensors) if opened else []
    if opened and opened[0].inputs != inputs:
        here, there = inputs.model_dump(), opened[0].inputs.model_dump()
        faults.insert(0, f"config.json says of the inputs {here}, {JSON_NAME} says {there}")
    return faults


def _tensor_faults(exported: Exported, tensors: Mapping[str, TensorInfo]) -> list[str]:
    faults = []
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind not in PARTNERS:
            continue
        wanted = _wanted(exported, tensors, module, kind)
        scaled = kind == "shadow_weight" and info.dtype == "I8" and f"{module}.shadow_scale" not in tensors
        if f"{module}.{PARTNERS[kind]}" not in tensors or scaled:
            faults.append(f"{name}: stored without {'shadow_scale' if scaled else PARTNERS[kind]}")
        elif wanted is None:
            faults.append(f"{name}: nothing in this export that it could be for")
        elif info.dtype not in wanted[0] or info.shape != wanted[1]:
            faults.append(f"{name}: {info.dtype} {list(info.shape)}, expected {wanted[0][0]} {list(wanted[1])}")
    return faults


def _wanted(
    exported: Exported, tensors: Mapping[str, TensorInfo], module: str, kind: str
) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Dtypes and shape of one tensor; None where there is no matrix or layer for it."""
    if kind.startswith("compensation"):
        norm = exported.checkpoint.tensors.get(f"{module}.input_layernorm.weight")
        return None if norm is None else (("F32",), norm.shape if kind == "compensation" else ())
    stem = kind.split("_")[0]
    shape = exported.shapes.get(module) if (module in exported.eight) == (stem == "row") else None
    index = tensors.get(f"{module}.{stem}_index")
    if shape is None or index is None:
        return None
    count = index.shape[0] if index.shape else 0
    return {
        "shadow_index": (("I32",), (count,)),
        "shadow_weight": (("F16", "BF16", "F32", "I8"), (shape[0], count)),
        "shadow_scale": (("F16", "BF16", "F32"), (count,)),
        "row_index": (("I32",), (max(count, 1),)),
        "row_weight": (("BF16", "F16", "F32"), (count, shape[1])),
    }[kind]


def read_index(extra: Checkpoint, name: str, limit: int) -> Tensor:
    """Rows or columns that a sidecar tensor names, int32. UserError for one outside 0 to limit - 1, which a kernel
    would read past its matrix for, and for rows out of order, which are searched by halves."""
    index = extra.read(name)
    lowest, highest = (int(index.min()), int(index.max())) if index.numel() else (0, 0)
    file = extra.info(name).file
    if not 0 <= lowest <= highest < limit:
        found, expected = f"{lowest} to {highest}", f"0 to {limit - 1}"
        raise UserError("points outside its matrix", file=file, item=name, found=found, expected=expected)
    if name.endswith("row_index") and not bool((index.diff() > 0).all()):
        raise UserError("rows are not in ascending order", file=file, item=name)
    return index


def unreadable(exported: Exported, extra: Checkpoint) -> list[str]:
    """Tensors of the sidecar whose values `load` would refuse, channel scales aside."""
    faults = []
    for name in extra.tensors:
        module, _, kind = name.rpartition(".")
        try:
            if kind in ("shadow_index", "row_index"):
                n, k = exported.shapes[module]
                read_index(extra, name, k if kind == "shadow_index" else n)
            elif kind in PARTNERS:
                extra.read(name)
        except UserError as error:
            faults.append(str(error))
    return faults


def protects_numeric(settings: Mapping[str, Any], specs: Iterable[Spec]) -> bool:
    """Whether this export protects numeric tokens: they weighed more in calibration, or their table is kept."""
    quant = settings.get("quant", settings)
    weight = quant.get("numeric_weight", 0) if isinstance(quant, Mapping) else 0
    return bool(weight) or any(spec.name == "numeric_token_ids" for spec in specs)


def open_sidecar(folder: Path) -> tuple[SidecarRecord, Checkpoint] | None:
    """The sidecar of an export and a reader of its tensors; None where there is none.

    Raises:
        UserError: a version or a feature that this package does not know, or files that do not hold what is listed.
    """
    path = folder / JSON_NAME
    if not path.is_file():
        return None
    record = read_model(path, SidecarRecord)
    if record.version > VERSION:
        hint = "Update glm5-quant"
        raise UserError("sidecar of a newer version", file=path, found=record.version, expected=VERSION, hint=hint)
    unknown = sorted(set(record.features) - FEATURES)
    if unknown:
        raise UserError("the sidecar needs what this version cannot compute", file=path, found=", ".join(unknown))
    tensors: dict[str, TensorInfo] = {}
    for name in sorted({tensor.file for tensor in record.tensors.values()}):
        if Path(name).name != name:
            raise UserError("file name leaves the sidecar folder", file=path, found=name)
        if not (folder / FOLDER / name).is_file():
            raise UserError("file not found", file=folder / FOLDER / name)
        tensors |= read_header(folder / FOLDER / name)
    listed = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in record.tensors.items()}
    if listed != {name: (info.dtype, info.shape) for name, info in tensors.items()}:
        raise UserError("eampq.json and the sidecar's tensors disagree", file=path)
    return record, Checkpoint(folder, {}, tensors, {}, Fp8Scheme())
