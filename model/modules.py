"""Runtime modules of a loaded export: buffers only, all computing done by `kernels.dispatch`.

Letters: E experts, N out, K in, B blocks of 64 along K, C shadow columns, T tokens, D hidden size, I expert size,
A experts a token chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5_quant.kernels import dispatch
from glm5_quant.kernels.layout import GROUP_SIZE, Inputs, PackedMatrix, Shadow
from glm5_quant.quant.eight import ZERO
from glm5_quant.quant.grid import Grid, dequantize

EIGHT_WEIGHTS = 1 << 22


class _Stored(nn.Module):
    """Buffers that another device may get, but never another dtype: codes belong to their scales as they are stored."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            found: Tensor = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]


class _PackedModule(_Stored):
    """Keeps packed matrices as buffers, so that `.to(device)` and `state_dict` work, and hands them out whole."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.backend = backend
        self._matrices: dict[str, tuple[int, int, str, Inputs | None]] = {}
        self._cache: dict[str, PackedMatrix] = {}

    def add_matrix(self, name: str, packed: PackedMatrix) -> None:
        """Register the buffers of one matrix (or stack) under a name; shadow and channel scales come along."""
        self._matrices[name] = (packed.n, packed.k, packed.resident, packed.inputs)
        parts = {"codes": packed.codes, "scale": packed.scale, "zero": packed.zero}
        if packed.shadow is not None:
            shadow = packed.shadow
            parts |= {"shadow_columns": shadow.columns, "shadow_residual": shadow.residual}
            parts |= {"shadow_offsets": shadow.offsets}
            if shadow.scale is not None:
                parts["shadow_scale"] = shadow.scale
        if packed.inputs is not None and packed.inputs.channel_scale is not None:
            parts["channel_scale"] = packed.inputs.channel_scale
        for part, tensor in parts.items():
            self.register_buffer(f"{name}_{part}", tensor)

    def matrix(self, name: str) -> PackedMatrix:
        """The matrix made of this module's buffers as they are now."""
        known = self._cache.get(name)
        if known is not None and known.codes is self._buffers[f"{name}_codes"]:
            return known
        n, k, resident, inputs = self._matrices[name]
        codes, scale, zero = (self.get_buffer(f"{name}_{part}") for part in ("codes", "scale", "zero"))
        if inputs is not None and inputs.channel_scale is not None:
            inputs = replace(inputs, channel_scale=self.get_buffer(f"{name}_channel_scale"))
        found = PackedMatrix(codes, scale, zero, n, k, self._shadow(name), resident, inputs)
        # accelerate gives an offloaded module its buffers for one forward: remembering them would keep them all.
        if not getattr(getattr(self, "_hf_hook", None), "offload", False):
            self._cache[name] = found
        return found

    def describe(self, name: str) -> str:
        """Bits of weights, and what is done to the inputs of a matrix, for `repr`."""
        inputs = self._matrices[name][3]
        if inputs is None:
            return "bits=4"
        return f"bits=4, rotated={inputs.hadamard}, activations={inputs.activations}"

    def _shadow(self, name: str) -> Shadow | None:
        buffers = dict(self.named_buffers(recurse=False))
        if f"{name}_shadow_columns" not in buffers:
            return None
        columns, residual, offsets = (buffers[f"{name}_shadow_{part}"] for part in ("columns", "residual", "offsets"))
        return Shadow(columns, residual, offsets, buffers.get(f"{name}_shadow_scale"))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # Moving a module replaces its buffers: what was handed out before points to the old ones.
        self._cache.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # What a backend made of the codes belongs to the values before.
        self._cache.clear()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without what was made of the buffers, which holds addresses."""
        return self.__dict__ | {"_cache": {}}


class PackedLinear(_PackedModule):
    """A linear layer on packed codes: x [..., K] -> [..., N] in x's dtype, bias in its own dtype.

    W4A16, unless the matrix says that its inputs are rotated or rounded first (`PackedMatrix.inputs`).
    """

    bias: Tensor | None

    def __init__(self, packed: PackedMatrix, bias: Tensor | None = None, *, backend: str | None = None) -> None:
        super().__init__(backend)
        self.in_features, self.out_features = packed.k, packed.n
        self.add_matrix("weight", packed)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return dispatch.linear(x, self.matrix("weight"), self.bias, backend=self.backend)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.describe('weight')}"


class EightLinear(_Stored):
    """A linear layer on 8-bit codes (quant/eight.py): x [..., K] -> [..., N] in x's dtype.

    On a CPU our kernel reads the codes; elsewhere weights are restored some rows at a time and multiplied as usual, in
    half the memory of 16 bits but no faster.
    `rows`: indices [R] of output rows that are computed from a weight of their own [R, K] instead.
    """

    bias: Tensor | None
    row_index: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        *,
        group_size: int,
        rows: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.group_size = group_size
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.register_buffer("row_index", None if rows is None else rows[0].long())
        self.register_buffer("row_weight", None if rows is None else rows[1])

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = self.get_buffer("codes"), self.get_buffer("scale")
        found = dispatch.eight(x, codes, scale) if self.group_size == GROUP_SIZE else None
        out = self._restored(x) if found is None else found
        if self.row_index is not None:
            out[..., self.row_index] = F.linear(x, self.get_buffer("row_weight").to(x.dtype))
        return out if self.bias is None else (out + self.bias).to(x.dtype)

    def _restored(self, x: Tensor) -> Tensor:
        step = max(EIGHT_WEIGHTS // self.in_features, 1)
        parts = [F.linear(x, self._rows(start, start + step, x.dtype)) for start in range(0, self.out_features, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        codes_NK, scale_NB = self.get_buffer("codes")[start:stop], self.get_buffer("scale")[start:stop]
        if self.in_features % self.group_size == 0:
            # In `dtype` throughout: codes are exact in 8 bits of mantissa, and the product is rounded once as below.
            weight_NBJ = codes_NK.view(*scale_NB.shape, self.group_size).to(dtype).sub_(ZERO)
            return weight_NBJ.mul_(scale_NB.to(dtype)[..., None]).view(codes_NK.shape)
        zero_NB = torch.full(scale_NB.shape, ZERO, dtype=torch.uint8, device=scale_NB.device)
        return dequantize(codes_NK, Grid(scale=scale_NB.float(), zero=zero_NB, group_size=self.group_size)).to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits=8"


class EightEmbedding(_Stored):
    """An embedding on 8-bit codes: ids [...] -> [..., K] in `dtype`. `rows` as for `EightLinear`, ascending."""

    row_index: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        *,
        group_size: int,
        dtype: torch.dtype,
        rows: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = codes.shape
        self.group_size, self.dtype = group_size, dtype
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("row_index", None if rows is None else rows[0].long())
        self.register_buffer("row_weight", None if rows is None else rows[1])

    def forward(self, ids: Tensor) -> Tensor:
        scale_TB = self.get_buffer("scale")[ids].float()
        zero_TB = torch.full(scale_TB.shape, ZERO, dtype=torch.uint8, device=scale_TB.device)
        grid = Grid(scale=scale_TB, zero=zero_TB, group_size=self.group_size)
        out = dequantize(self.get_buffer("codes")[ids], grid).to(self.dtype)
        if self.row_index is None:
            return out
        place = torch.searchsorted(self.row_index, ids).clamp(max=len(self.row_index) - 1)
        kept = self.get_buffer("row_weight")[place].to(self.dtype)
        return torch.where((self.row_index[place] == ids)[..., None], kept, out)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # What is looked up goes with the model where a weight would.
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits=8"


class PackedExperts(_PackedModule):
    """The routed experts of one layer; takes the place of transformers' `experts` submodule.

    gate_up: E x 2I x D, the gate's rows first; down: E x D x I. `forward` gets hidden states [T, D], expert ids [T, A]
    (E means "no expert") and router weights [T, A], and returns [T, D].
    """

    def __init__(
        self, gate_up: PackedMatrix, down: PackedMatrix, *, activation: str = "silu", backend: str | None = None
    ) -> None:
        super().__init__(backend)
        self.num_experts, self.activation = gate_up.experts, activation
        self.add_matrix("gate_up", gate_up)
        self.add_matrix("down", down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        flat_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        gate_up, down = self.matrix("gate_up"), self.matrix("down")
        out_TD = dispatch.experts(
            flat_TD, top_k_index, top_k_weights, gate_up, down, activation=self.activation, backend=self.backend
        )
        return out_TD.reshape(hidden_states.shape)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, activation={self.activation}, {self.describe('gate_up')}"


class Compensation(_Stored):
    """Adds `gain * vector` to a decoder layer's output: the part of the quantization error that calibration predicts.

    vector: float32 [D]; gain: float32 scalar. Used as a forward hook, since layers return a tensor or a tuple.
    """

    def __init__(self, vector: Tensor, gain: Tensor) -> None:
        super().__init__()
        self.register_buffer("vector", vector.float())
        self.register_buffer("gain", gain.float())

    def forward(self, hidden: Tensor) -> Tensor:
        step = self.get_buffer("gain") * self.get_buffer("vector")
        return (hidden.float() + step).to(hidden.dtype)

    def hook(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return self(output)
        return (self(output[0]), *output[1:])
