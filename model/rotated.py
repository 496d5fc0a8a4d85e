"""A checkpoint whose residual stream is rotated inside its weights, as a view of one that is not (EAMPQ step 3).

R is the orthonormal 64-point Hadamard transform on each aligned block of 64 channels (quant/rotation.py). With every
norm's gain moved into the matrices that read its output, the stream h can be replaced by R h without anyone noticing:
an RMSNorm without gain only looks at |h|. So the embedding and all matrices that write the stream have their outputs
rotated, all that read it (routers, indexers and the head among them) their inputs. Where the size of a head is a
multiple of 64, its values are rotated too, on the way from v to o. Down-projections read no stream; they stay.

Nothing is stored: each tensor is folded when it is read, in float32, by additions alone, and rounded once to the dtype
that is asked for. Calibration, export and comparison see one and the same model.

Dimension letters: E experts, N rows (out), K columns (in).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from glm5_quant.model.checkpoint import DTYPES, Checkpoint, TensorInfo
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import (
    MLA,
    Family,
    Linear,
    disk_name,
    family_of,
    is_sparse,
    linears,
    model_config,
    mtp_tensors,
    name_prefix,
)
from glm5_quant.model.fp8 import WEIGHT_DTYPES
from glm5_quant.model.scheme import untied_config
from glm5_quant.quant.rotation import BLOCK, butterfly, heads_can_rotate

CHUNK_WEIGHTS = 1 << 24
INPUT_NORM, BLOCK_NORM = "input_layernorm", "post_attention_layernorm"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# What lies between readers and writers and never meets the stream: their biases, norms of parts of heads, and so on.
INSIDE = re.compile(
    r".*\.layers\.\d+\.(self_attn\.((q|k|q_a|kv_a)_(layer)?norm\.weight|kv_b_proj\.weight"
    r"|indexer\.(wq_b\.weight|k_norm\.(weight|bias)))"
    r"|.*\.(q_proj|k_proj|v_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|gate_proj|up_proj)\.bias"
    r"|.*e_score_correction_bias|.*rotary_emb\.inv_freq)"
)
_HINT = "Use --rotation none or full"


@dataclass(frozen=True)
class Rows:
    """Which rows are rotated: of every `period` of them (0: of all), those from `first` on, in aligned blocks."""

    period: int = 0
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class Fold:
    """What becomes of one tensor. `gain`: the norm whose gain its columns take in; `columns`: they are rotated then;
    `rows`: these are rotated (of a bias, its entries); `ones`: the gain that has moved elsewhere."""

    gain: str | None = None
    columns: bool = False
    rows: Rows | None = None
    ones: bool = False


class RotatedCheckpoint(Checkpoint):
    """`base` with its residual stream rotated. Same names and shapes; a tied head is a tensor of its own now.

    Reads in a dtype wider than the stored one are not rounded to the stored one first.
    """

    def __init__(self, base: Checkpoint, folds: dict[str, Fold], head: str | None) -> None:
        """`folds` by tensor name on disk; `head`: name of the embedding where the head is tied to it."""
        tensors = dict(base.tensors)
        if head is not None:
            tensors[HEAD] = replace(base.info(head), name=HEAD)
        super().__init__(
            base.folder, untied_config(base.config), dict(sorted(tensors.items())), base.dropped, base._scheme
        )
        self.base, self.folds = base, folds
        self._origin = {} if head is None else {HEAD: head}
        self._gains: dict[str, Tensor] = {}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        fold, info = self.folds.get(name), self.info(name)
        if fold is None:
            return self.base.read(self._origin.get(name, name), dtype)
        target = self._target(info, dtype)
        if fold.ones:
            return torch.ones(info.shape, dtype=target)
        if len(info.shape) == 3:
            out_ENK = torch.empty(info.shape, dtype=target)
            for index in range(info.shape[0]):
                out_ENK[index] = self._matrix(info, fold, index, slice(0, info.shape[1]), target)
            return out_ENK
        if len(info.shape) == 1:
            return self._stored(_turn_rows(self.base.read(name, torch.float32)[:, None], fold)[:, 0], info, target)
        return self._matrix(info, fold, None, slice(0, info.shape[0]), target)

    def read_slice(
        self, name: str, index: int | None, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        fold, info = self.folds.get(name), self.info(name)
        if fold is None:
            return self.base.read_slice(self._origin.get(name, name), index, start, stop, dtype)
        rows = slice(start, info.shape[-2] if stop is None else stop)
        return self._matrix(info, fold, index, rows, self._target(info, dtype))

    def read_rows(self, name: str, rows: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        fold, info = self.folds.get(name), self.info(name)
        if fold is None:
            return self.base.read_rows(self._origin.get(name, name), rows, dtype)
        if fold.rows is not None or fold.ones:
            raise ValueError(f"{name}: its rows are not independent of each other")
        target = self._target(info, dtype)
        wide = self.base.read_rows(self._origin.get(name, name), rows, torch.float32)
        return self._stored(self._turn_columns(wide, fold), info, target)

    def close(self) -> None:
        super().close()
        self.base.close()

    def _matrix(self, info: TensorInfo, fold: Fold, index: int | None, rows: slice, target: torch.dtype) -> Tensor:
        """Rows of a matrix, folded, [rows, K]; a few whole blocks of rows at a time."""
        n, k = info.shape[-2:]
        unit = 1 if fold.rows is None else fold.rows.period or BLOCK
        step = max(CHUNK_WEIGHTS // k // unit, 1) * unit
        out_NK = torch.empty(rows.stop - rows.start, k, dtype=target)
        for start in range(rows.start // unit * unit, rows.stop, step):
            stop = min(start + step, n)
            name = self._origin.get(info.name, info.name)
            wide_NK = self._turn_columns(self.base.read_slice(name, index, start, stop, torch.float32), fold)
            wanted = slice(max(start, rows.start), min(stop, rows.stop))
            part_NK = _turn_rows(wide_NK, fold)[wanted.start - start : wanted.stop - start]
            out_NK[wanted.start - rows.start : wanted.stop - rows.start] = self._stored(part_NK, info, target)
        return out_NK

    def _turn_columns(self, wide_NK: Tensor, fold: Fold) -> Tensor:
        if fold.gain is not None:
            if fold.gain not in self._gains:
                self._gains[fold.gain] = self.base.read(fold.gain, torch.float32)
            wide_NK = wide_NK * self._gains[fold.gain]
        return butterfly(wide_NK) if fold.columns else wide_NK

    def _target(self, info: TensorInfo, dtype: torch.dtype | None) -> torch.dtype:
        if dtype == torch.float16 and info.dtype != "F16":
            raise ValueError(f"{info.name}: {info.dtype} is never narrowed to FP16, small weights would become 0")
        return dtype or (self.dtype if info.dtype in WEIGHT_DTYPES else DTYPES[info.dtype])

    def _stored(self, wide: Tensor, info: TensorInfo, target: torch.dtype) -> Tensor:
        value = wide.to(target)
        if not bool(torch.isfinite(value).all()):
            raise UserError(
                "a weight with a norm's gain folded into it is too large for its dtype",
                file=info.file,
                item=info.name,
                found=f"{float(wide.abs().max()):.3g}",
                expected=f"below {torch.finfo(target).max:.3g}",
                hint=_HINT,
            )
        return value


def as_rotated(checkpoint: Checkpoint, rotation: str) -> Checkpoint:
    """The checkpoint that a calibration with this setting runs on: itself, or its view with `rotation` "folded".

    Raises:
        UserError: the family's stream cannot be rotated, the checkpoint holds MTP layers, or a tensor whose part in the
            stream is not known. Looks at names only; reads no tensor.
    """
    if rotation != "folded" or isinstance(checkpoint, RotatedCheckpoint):
        return checkpoint
    family = family_of(checkpoint.config, file=checkpoint.config_file)
    if family.unrotatable is not None:
        raise _refusal(checkpoint, f"{family.model_type}: {family.unrotatable}")
    extra = mtp_tensors(checkpoint, family)
    if extra:
        raise UserError(
            "the stream cannot be rotated beside multi-token-prediction layers: they normalise what the final norm "
            "returned, and its gain has moved into the head",
            file=checkpoint.folder,
            item=extra[0],
            found=f"{len(extra)} such tensors",
            hint=_HINT,
        )
    items, names = linears(checkpoint, family), _Names(checkpoint, family)
    folds = dict(_folds(names, items))
    known = folds.keys() | {item.source for item in items}
    unknown = [n for n in checkpoint.tensors if n not in known and not INSIDE.fullmatch("." + n)]
    if unknown:
        raise _refusal(checkpoint, f"what {unknown[0]} has to do with the residual stream is not known")
    tied = names.find(HEAD) is None
    return RotatedCheckpoint(checkpoint, folds, names.need(EMBEDDING) if tied else None)


def _refusal(checkpoint: Checkpoint, reason: str) -> UserError:
    return UserError(
        "the residual stream of this model cannot be rotated inside its weights",
        file=checkpoint.config_file,
        item="--rotation folded",
        found=reason,
        hint=_HINT,
    )


class _Names:
    """Names on disk of a checkpoint's run-time tensors."""

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self.checkpoint, self.family, self.prefix = checkpoint, family, name_prefix(checkpoint)

    def find(self, name: str) -> str | None:
        return disk_name(self.checkpoint, self.family, name, prefix=self.prefix)

    def need(self, name: str) -> str:
        found = self.find(name)
        if found is None:
            raise UserError("tensor not in the checkpoint", file=self.checkpoint.folder, item=name)
        return found


def _folds(names: _Names, items: list[Linear]) -> Iterator[tuple[str, Fold]]:
    """What becomes of every tensor that reads, writes or normalises the stream."""
    family, config = names.family, model_config(names.checkpoint.config, file=names.checkpoint.config_file)
    final = names.need("model.norm.weight")
    yield names.need(EMBEDDING), Fold(columns=True)
    yield final, Fold(ones=True)
    yield names.find(HEAD) or HEAD, Fold(gain=final, columns=True)
    norms = []
    for layer in range(config.num_hidden_layers):
        place = f"model.layers.{layer}."
        norms.append({name: names.need(f"{place}{name}.weight") for name in (INPUT_NORM, BLOCK_NORM)})
        yield from ((norm, Fold(ones=True)) for norm in norms[-1].values())
        for norm, module in family.stream_readers:
            reader = names.find(f"{place}{module}.weight")
            if reader is not None:
                yield reader, Fold(gain=norms[-1][norm], columns=True)
        if is_sparse(family, config, layer):
            router = names.need(f"{place}{family.block}.{family.router}.weight")
            yield router, Fold(gain=norms[-1][BLOCK_NORM], columns=True)
    values = _values(family, config)
    for item in items:
        yield from _linear_folds(names, item, norms[item.layer], values)


def _linear_folds(
    names: _Names, item: Linear, norms: dict[str, str], values: Rows | None
) -> Iterator[tuple[str, Fold]]:
    """The same for a matrix that is quantized and its bias, and for the matrix that makes the values in MLA."""
    family, bias = names.family, item.name + ".bias"
    if item.role in ("o_proj", "down"):
        weight = Fold(columns=item.role == "o_proj" and values is not None, rows=Rows())
    elif item.role in (*family.attention[0], "gate", "up", "gate_up"):
        norm = norms[INPUT_NORM if item.role in family.attention[0] else BLOCK_NORM]
        weight = Fold(gain=norm, columns=True, rows=values if item.role == "v_proj" else None)
    else:
        return
    yield item.source, weight
    if bias in names.checkpoint.tensors and weight.rows is not None:
        yield bias, Fold(rows=weight.rows)
    if item.role == "o_proj" and values is not None and family.attention is MLA:
        maker = names.need(f"model.layers.{item.layer}.{family.attention_path}.kv_b_proj.weight")
        yield maker, Fold(rows=values)


def _values(family: Family, config: Any) -> Rows | None:
    """Rows of the matrix that makes the values, where whole blocks of them belong to one head; None where not."""
    if family.attention is MLA:
        size, before = int(config.v_head_dim), int(config.qk_nope_head_dim)
        return Rows(period=before + size, first=before) if heads_can_rotate(size) else None
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Rows() if heads_can_rotate(int(size)) else None


def _turn_rows(wide_NK: Tensor, fold: Fold) -> Tensor:
    """The rows that `fold` names, rotated; `wide_NK` starts at the border of a period or block."""
    if fold.rows is None:
        return wide_NK
    if not fold.rows.period:
        return butterfly(wide_NK.T).T
    heads = wide_NK.view(-1, fold.rows.period, wide_NK.shape[-1]).clone()
    heads[:, fold.rows.first :] = butterfly(heads[:, fold.rows.first :].mT).mT
    return heads.flatten(0, 1)
