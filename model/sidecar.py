"""The `eampq/` folder of an export: what only this package reads. Never named in the index, so other readers skip it.

    eampq/eampq.json                             settings, source fingerprint, what every matrix cost, list of tensors
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

from glm5_quant.model.checkpoint import Checkpoint, TensorInfo
from glm5_quant.model.errors import UserError
from glm5_quant.model.exported import Exported
from glm5_quant.model.fp8 import Fp8Scheme
from glm5_quant.model.input_scales import header_faults
from glm5_quant.model.journal import SIDECAR_PREFIX, Journal, SourceRecord, read_model
from glm5_quant.model.safetensors_header import read_header
from glm5_quant.model.scheme import InputScheme
from glm5_quant.model.shards import Spec

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
    layers whose router was fitted again to the quantized stream; `modules` what every matrix cost."""

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
    journal: Journal, shards: Mapping[str, list[Spec]], replaced: list[str], inputs: InputScheme
) -> dict[str, Any]:
    """The content of eampq.json. Names no path of the machine that made it."""
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
        modules=modules,
    )
    return record.model_dump()


def sidecar_faults(exported: Exported, opened: tuple[SidecarRecord, Checkpoint] | None) -> list[str]:
    """Where an export's config and its sidecar disagree on what is done to inputs, or channel scales are missing."""
    inputs = exported.scheme.inputs
    faults = header_faults(opened[1].tensors if opened else {}, exported.four, inputs.activations)
    if opened and opened[0].inputs != inputs:
        here, there = inputs.model_dump(), opened[0].inputs.model_dump()
        faults.insert(0, f"config.json says of the inputs {here}, {JSON_NAME} says {there}")
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
