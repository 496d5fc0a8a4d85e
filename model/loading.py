"""A folder as a runnable `transformers` model: sources as they are, exports on packed codes.

The model is built empty, then filled layer by layer: read one matrix, rearrange it into the kernel layout, drop it.
Never more than one layer's leftovers and one matrix lie in memory beside the model itself.

Letters: E experts, N out, K in, B blocks along K, S shadow columns, D hidden size, I expert size.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from glm5_quant.kernels.layout import Inputs, PackedMatrix, Shadow, block_count, from_codes, padded_k
from glm5_quant.model.build import build_empty, fill, fp32_patterns, generation_config
from glm5_quant.model.checkpoint import Checkpoint, open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.exported import Exported, as_exported
from glm5_quant.model.families import Linear, disk_name, family_of, linears
from glm5_quant.model.input_scales import read_scale, stacked
from glm5_quant.model.modules import Compensation, EightEmbedding, EightLinear, PackedExperts, PackedLinear
from glm5_quant.model.placing import DeviceMap, Placement, auto_map, check_map, outer_parts
from glm5_quant.model.plain import make_plain_linears
from glm5_quant.model.scheme import InputScheme
from glm5_quant.model.sidecar import open_sidecar, read_index, sidecar_faults

GROUP_SIZE = 64
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_COMPENSATION = re.compile(r".*\blayers\.(\d+)\.compensation")


@dataclass(frozen=True, kw_only=True)
class LoadSummary:
    """What `load` built: `packed_count` INT4 matrices (each expert's three count), how many have shadows, which layers
    are compensated, what is done to the inputs of packed matrices. All zero or none for a source model."""

    packed_count: int
    packed_bytes: int
    shadow_count: int
    compensated_layers: tuple[int, ...]
    symmetric: bool | None
    dtype: torch.dtype
    inputs: InputScheme


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    backend: str | None = None,
    resident: str = "int4",
    device_map: DeviceMap | str | None = None,
    offload: str | Path | None = None,
) -> Any:
    """A `transformers` model in eval mode; `model.glm5_quant` is a `LoadSummary`, `model.packed_count` its main number.

    A loaded export has no `save_pretrained`: the folder itself is what can be kept.

    Args:
        folder: a source checkpoint or an export (a folder, or a hub id for sources).
        dtype: of everything that is not packed, and of the computation; None takes the checkpoint's. Router correction
            biases stay float32 whatever it is.
        device: where the model goes; layers are moved there as they are filled.
        backend: of the packed modules: reference, cpu or triton; None lets the device decide.
        resident: "int4" computes with exact inputs; "int8" lets the CPU path round them to 8 bits, which is faster
            (where our C kernels cannot run it keeps a second copy of the weights, twice the size of the codes).
        device_map: for models larger than one device, in place of `device`: the device of each part (placing.py), or
            "auto". Parts are moved as they are filled.
        offload: a folder for what the map puts on "disk".

    Raises:
        UserError: config and weights disagree about quantization, tensors are missing or of another shape, values are
            not finite, the sidecar needs what this version does not know, or the device map names no part.
    """
    checkpoint = open_checkpoint(folder)
    exported = as_exported(checkpoint)
    plain = exported.plain_view if exported else checkpoint
    family = family_of(plain.config, file=plain.config_file)
    dtype = dtype or plain.dtype
    model = build_empty(plain, dtype)
    packer = _Packer(exported, model, backend, resident) if exported else None
    keep_fp32 = fp32_patterns(model, dtype)
    compensated = packer.compensate() if packer else ()
    chosen = auto_map(model, checkpoint) if device_map == "auto" else device_map or {"": device}
    check_map(cast(DeviceMap, chosen), model)
    placement = Placement(cast(DeviceMap, chosen), None if offload is None else Path(offload))
    for i, layer in enumerate(model.model.layers):
        packed = packer.fill_layer(i) if packer else []
        path = f"model.layers.{i}"
        skipped = tuple(f"{path}.{module}." for module in (*packed, "compensation"))
        fill(layer, path, plain, family, dtype, keep_fp32=keep_fp32, skip=lambda n, s=skipped: n.startswith(s))  # type: ignore[misc]
        placement.put(layer, path)
    rest = ("model.layers.", *(packer.fill_rest() if packer else ()))
    fill(model, "", plain, family, dtype, keep_fp32=keep_fp32, skip=lambda name: name.startswith(rest))
    for path in outer_parts(model):
        placement.put(model.get_submodule(path), path)
    model.generation_config = generation_config(plain.folder) or model.generation_config
    model.glm5_quant = _summary(exported, packer, compensated, dtype)
    model.packed_count = model.glm5_quant.packed_count
    if exported:
        make_plain_linears(model)
        model.save_pretrained = refuse_saving
    checkpoint.close()
    model.eval()
    return model if device_map is None else placement.connect(model)


def refuse_saving(*args: Any, **kwargs: Any) -> None:
    """In the place of a loaded export's `save_pretrained`: what it would write, no reader takes for a model."""
    raise UserError(
        "a loaded export cannot be saved again: its tensors are in the order that the kernels read",
        hint="Copy the folder it was loaded from; `state_dict` serves within one process",
    )


class _Packer:
    """Puts packed modules into an empty model, from an export and its sidecar."""

    def __init__(self, exported: Exported, model: Any, backend: str | None, resident: str) -> None:
        if exported.scheme.group_size != GROUP_SIZE:
            found = exported.scheme.group_size
            raise UserError("blocks our kernels do not compute", file=exported.checkpoint.config_file, found=found)
        self.exported, self.model, self.backend, self.resident = exported, model, backend, resident
        self.plain = exported.plain_view
        self.family = family_of(self.plain.config)
        sidecar = open_sidecar(exported.checkpoint.folder)
        faults = sidecar_faults(exported, sidecar)
        if faults:
            raise UserError(faults[0], file=exported.checkpoint.folder)
        self.extra: Checkpoint | None = sidecar[1] if sidecar else None
        self.shadow_count = self.packed_bytes = 0
        self.by_layer: dict[int, list[Linear]] = defaultdict(list)
        self.other = dict(exported.shapes)
        for linear in linears(self.plain, self.family):
            if self.other.pop(linear.name, None) is not None:
                self.by_layer[linear.layer].append(linear)

    def fill_layer(self, layer: int) -> list[str]:
        """Swap the packed modules of one decoder layer; returns their paths inside it."""
        module, experts = self.model.model.layers[layer], defaultdict[str, list[Linear]](list)
        paths = []
        for linear in self.by_layer[layer]:
            if linear.expert is not None:
                experts[linear.module].append(linear)
                continue
            bias = self._bias(f"model.layers.{layer}.{linear.module}", module.get_submodule(linear.module))
            module.set_submodule(linear.module, self._linear(linear.name, bias))
            paths.append(linear.module)
        for path, members in experts.items():
            module.set_submodule(path, self._experts(module.get_submodule(path), members))
            paths.append(path)
        return paths

    def fill_rest(self) -> list[str]:
        """Swap what is packed outside the decoder layers: head and embedding. Returns name prefixes."""
        prefixes = []
        for name in self.other:
            path = next((p for p in ("lm_head", "model.embed_tokens") if name.endswith(p.rpartition(".")[2])), None)
            if path is None:
                raise UserError("a packed matrix has no place in the model", file=self.plain.folder, item=name)
            old = self.model.get_submodule(path)
            new = self._linear(name, self._bias(path, old)) if path == "lm_head" else self._embedding(name, old)
            self.model.set_submodule(path, new)
            prefixes.append(f"{path}.")
        return prefixes

    def compensate(self) -> tuple[int, ...]:
        """Hook the compensation of each layer that has one."""
        layers = []
        for name in self.extra.tensors if self.extra else ():
            match = _COMPENSATION.fullmatch(name)
            if match is None or self.extra is None:
                continue
            layer = self.model.model.layers[int(match[1])]
            layer.compensation = Compensation(self.extra.read(name), self.extra.read(f"{name}_gain"))
            layer.register_forward_hook(layer.compensation.hook)
            layers.append(int(match[1]))
        return tuple(sorted(layers))

    def _bias(self, path: str, module: Any) -> Tensor | None:
        if module.bias is None:
            return None
        name = disk_name(self.plain, self.family, f"{path}.bias")
        if name is None:
            raise UserError("tensor not in the checkpoint", file=self.plain.folder, item=f"{path}.bias")
        return self.plain.read(name, module.bias.dtype)

    def _linear(self, name: str, bias: Tensor | None) -> PackedLinear | EightLinear:
        if name not in self.exported.eight:
            return PackedLinear(self._matrix(name), bias, backend=self.backend)
        return EightLinear(*self._eight(name), bias, group_size=GROUP_SIZE, rows=self._rows(name))

    def _embedding(self, name: str, old: Any) -> EightEmbedding:
        if name not in self.exported.eight:
            raise UserError("a packed embedding that is not of 8 bits", file=self.plain.folder, item=name)
        rows = self._rows(name)
        return EightEmbedding(*self._eight(name), group_size=GROUP_SIZE, dtype=old.weight.dtype, rows=rows)

    def _eight(self, name: str) -> tuple[Tensor, Tensor]:
        codes_NK, grid = self.exported.read(name)
        self.packed_bytes += codes_NK.nbytes + grid.scale.nbytes
        return codes_NK, grid.scale

    def _rows(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Rows that are computed in source precision, and their weights."""
        if self.extra is None or f"{name}.row_index" not in self.extra.tensors:
            return None
        index_R = read_index(self.extra, f"{name}.row_index", self.exported.shapes[name][0])
        return index_R, self.extra.read(f"{name}.row_weight")

    def _matrix(self, name: str) -> PackedMatrix:
        codes_NK, grid = self.exported.read(name)
        shadow = self._shadow_rows([(name, 0)], grid.scale.shape[0])
        parts = None if shadow is None else _shadow([shadow])
        packed = from_codes(codes_NK, grid.scale, grid.zero, shadow=parts, resident=self.resident)
        self.packed_bytes += _matrix_bytes(packed)
        return replace(packed, inputs=self._inputs(lambda extra: read_scale(extra, name)))

    def _inputs(self, scale_of: Callable[[Checkpoint], Tensor]) -> Inputs | None:
        """What is done to the inputs of a matrix or stack; `scale_of` reads its channel scales where there are any."""
        scheme = self.exported.scheme.inputs
        if scheme.plain:
            return None
        scale = scale_of(self.extra) if scheme.activations == "int4-channel" and self.extra else None
        return Inputs(hadamard=scheme.rotation == "full", activations=scheme.activations, channel_scale=scale)

    def _experts(self, empty: Any, members: list[Linear]) -> PackedExperts:
        """Gate and up (rows one after the other) and down of all experts, filled one matrix at a time."""
        found = {(linear.expert, linear.role): linear for linear in members}
        count = 1 + max(linear.expert for linear in members if linear.expert is not None)
        if len(found) != 3 * count or count != self._expert_total(empty):
            total = self._expert_total(empty)
            problem = f"{len(found)} of {3 * total} matrices of a layer's experts are packed; it takes all or none"
            raise UserError(problem, file=self.plain.folder, item=members[0].name)
        gate_up = self._stack([[found[e, "gate"], found[e, "up"]] for e in range(count)])
        down = self._stack([[found[e, "down"]] for e in range(count)])
        name = str(getattr(self.model.config, "hidden_act", "silu"))
        if name not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise UserError("unknown activation", file=self.plain.config_file, found=name, expected=known)
        return PackedExperts(gate_up, down, activation=ACTIVATIONS[name], backend=self.backend)

    def _expert_total(self, empty: Any) -> int:
        return int(empty.gate_up_proj.shape[0])

    def _stack(self, experts: list[list[Linear]]) -> PackedMatrix:
        n, k = sum(linear.n for linear in experts[0]), experts[0][0].k
        scale_dtype = self.exported.read(experts[0][0].name)[1].scale.dtype
        codes = torch.empty(len(experts), n, padded_k(k) // 2, dtype=torch.uint8)
        scale = torch.empty(len(experts), n, block_count(k), dtype=scale_dtype)
        zero = torch.empty(len(experts), n, block_count(k), dtype=torch.uint8)
        shadows = []
        for e, members in enumerate(experts):
            first, places = 0, []
            for linear in members:
                codes_NK, grid = self.exported.read(linear.name)
                rows = slice(first, first + linear.n)
                codes[e, rows] = from_codes(codes_NK, grid.scale, grid.zero).codes
                scale[e, rows], zero[e, rows] = grid.scale, grid.zero
                places.append((linear.name, first))
                first += linear.n
            shadows.append(self._shadow_rows(places, n))
        names = [[linear.name for linear in members] for members in experts]
        inputs = self._inputs(lambda extra: stacked(extra, names))
        packed = PackedMatrix(codes, scale, zero, n, k, _shadow(shadows), self.resident, inputs)
        self.packed_bytes += _matrix_bytes(packed)
        return packed

    def _shadow_rows(self, places: list[tuple[str, int]], n: int) -> dict[str, Tensor] | None:
        """Shadow columns of one matrix, or of gate and up one after the other: each residual column is placed at its
        matrix's first output row and is zero elsewhere."""
        found = []
        for name, first in places:
            if self.extra is None or f"{name}.shadow_index" not in self.extra.tensors:
                continue
            self.shadow_count += 1
            index = read_index(self.extra, f"{name}.shadow_index", self.exported.shapes[name][1])
            weight_NS = self.extra.read(f"{name}.shadow_weight")
            residual_SN = torch.zeros(len(index), n, dtype=weight_NS.dtype)
            residual_SN[:, first : first + weight_NS.shape[0]] = weight_NS.T
            part = {"columns": index, "residual": residual_SN}
            if f"{name}.shadow_scale" in self.extra.tensors:
                part["scale"] = self.extra.read(f"{name}.shadow_scale").float()
            found.append(part)
        return {key: torch.cat([part[key] for part in found]) for key in found[0]} if found else None


def _shadow(experts: list[dict[str, Tensor] | None]) -> Shadow | None:
    """The shadows of a stack (or of one matrix) end to end; None where nobody has any."""
    present: list[Mapping[str, Tensor]] = [part for part in experts if part is not None]
    if not present:
        return None
    counts = [0 if part is None else len(part["columns"]) for part in experts]
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    joined = {key: torch.cat([part[key] for part in present]) for key in present[0]}
    return Shadow(joined["columns"], joined["residual"], offsets, joined.get("scale"))


def _matrix_bytes(packed: PackedMatrix) -> int:
    return packed.codes.nbytes + packed.scale.nbytes + packed.zero.nbytes


def _summary(
    exported: Exported | None, packer: _Packer | None, compensated: tuple[int, ...], dtype: torch.dtype
) -> LoadSummary:
    return LoadSummary(
        packed_count=len(exported.shapes) if exported else 0,
        packed_bytes=packer.packed_bytes if packer else 0,
        shadow_count=packer.shadow_count if packer else 0,
        compensated_layers=compensated,
        symmetric=exported.scheme.symmetric if exported else None,
        dtype=dtype,
        inputs=exported.scheme.inputs if exported else InputScheme(),
    )
