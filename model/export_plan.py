"""What an export will hold, decided from headers alone: for each source tensor packed parts, a replacement, or a copy.

Letters: N out, K in, B blocks along K.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from glm5_quant.model.checkpoint import Checkpoint, TensorInfo
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import Linear
from glm5_quant.model.fp8 import WEIGHT_DTYPES
from glm5_quant.model.journal import SIDECAR_PREFIX
from glm5_quant.model.shards import DTYPE_NAMES, Spec

PACKED, SCALE, ZERO, SHAPE = (f".weight_{part}" for part in ("packed", "scale", "zero_point", "shape"))
PART_ENDINGS = (PACKED, SCALE, ZERO, SHAPE)
CODES_PER_WORD, BYTES_PER_WORD = 8, 4
ROW_PARALLEL_ROLES = ("o_proj", "down")
TP_LIMIT = 16
_CALIBRATE_HINT = "Run `glm5-quant calibrate` on this model again"
Origin = Literal["journal", "source"]


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Tensors of the base checkpoint in writing order (grouped by module), where each comes from, and the sidecar."""

    groups: tuple[tuple[Spec, ...], ...]
    origin: dict[str, Origin]
    sidecar: tuple[Spec, ...]
    packed: dict[str, tuple[int, int]]
    eight: list[str]
    symmetric: bool
    ignore: list[str]
    untie: bool

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all base tensors: the index's total_size."""
        return sum(spec.nbytes for group in self.groups for spec in group)

    @property
    def packed_bytes(self) -> int:
        """Bytes that stand for the quantized weights: codes, scales, zero-points and shapes."""
        return sum(s.nbytes for group in self.groups for s in group if s.name.endswith(PART_ENDINGS))


def make_plan(source: Checkpoint, linears: Sequence[Linear], journal: Mapping[str, TensorInfo]) -> ExportPlan:
    """Decide every tensor of an export of `source` from a finished journal's tensors.

    Raises:
        UserError: a packed matrix that the source does not have or that has another shape, parts that are missing or
            mixed, a fused stack of which only some experts are packed, or nothing quantized at all.
    """
    packed = _packed_shapes(source, linears, journal)
    eight = sorted(name for name, (_, k) in packed.items() if in_eight_bits(journal[name + PACKED], k))
    symmetric = _is_symmetric(packed.keys() - set(eight), journal)
    covered = _covered_sources(source, linears, packed)
    names: dict[str, list[Spec]] = {
        module: [_spec(journal[module + part]) for part in PART_ENDINGS if module + part in journal]
        for module in packed
    }
    origin: dict[str, Origin] = {spec.name: "journal" for specs in names.values() for spec in specs}
    replaced = {n for n in journal if not n.startswith(SIDECAR_PREFIX) and not n.endswith(PART_ENDINGS)}
    for name in sorted(source.tensors.keys() | replaced):
        if name in covered:
            continue
        names.setdefault(name.removesuffix(".weight"), []).append(_plain_spec(source, journal, name, name in replaced))
        origin[name] = "journal" if name in replaced else "source"
    groups = tuple(tuple(names[name]) for name in sorted(names, key=natural_key))
    unpacked = [(s.name, len(s.shape)) for group in groups for s in group if not s.name.endswith(PART_ENDINGS)]
    head = head_name(source)
    written_head = any(name.startswith(head + ".weight") for name in origin)
    return ExportPlan(
        groups=groups,
        origin=origin,
        sidecar=tuple(_sidecar_spec(info) for name, info in sorted(journal.items()) if name.startswith(SIDECAR_PREFIX)),
        packed=packed,
        eight=eight,
        symmetric=symmetric,
        ignore=ignored_modules(unpacked, tied_head=None if written_head else head),
        untie=written_head and head + ".weight" not in source.tensors,
    )


def in_eight_bits(packed: TensorInfo, k: int) -> bool:
    """Whether packed codes of k inputs are 8 bits wide, by the width of their rows."""
    words = packed.shape[-1] if packed.shape else 0
    return words == -(-k // BYTES_PER_WORD) != -(-k // CODES_PER_WORD)


def ignored_modules(unpacked: Iterable[tuple[str, int]], *, tied_head: str | None = None) -> list[str]:
    """The ignore list: modules of all 2-D `.weight` tensors stored unpacked, from (tensor name, dimensions), sorted.

    A head without a tensor of its own is listed too, since readers build it as a linear before they tie it.
    """
    modules = {name.removesuffix(".weight") for name, ndim in unpacked if ndim == 2 and name.endswith(".weight")}
    if tied_head is not None:
        modules.add(tied_head)
    return sorted(modules)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def tensor_parallel_sizes(linears: Iterable[Linear], *, symmetric: bool, group_size: int = 64) -> dict[str, list[int]]:
    """For each role that servers split, the tensor-parallel sizes (2 to 16) that cut no block and no packed word.

    Row-parallel matrices (o_proj, down) are cut along K, so each part must hold whole blocks; the others along N, where
    zero-points of 8 rows share a word. `all` holds the sizes that every role allows.
    """
    allowed: dict[str, set[int]] = {}
    for linear in linears:
        split_k = linear.role in ROW_PARALLEL_ROLES
        size, unit = (linear.k, group_size) if split_k else (linear.n, 1 if symmetric else CODES_PER_WORD)
        sizes = {tp for tp in range(2, TP_LIMIT + 1) if size % (unit * tp) == 0}
        allowed[linear.role] = allowed.get(linear.role, sizes) & sizes
    common = set.intersection(*allowed.values()) if allowed else set()
    return {role: sorted(sizes) for role, sizes in sorted(allowed.items())} | {"all": sorted(common)}


def _packed_shapes(
    source: Checkpoint, linears: Sequence[Linear], journal: Mapping[str, TensorInfo]
) -> dict[str, tuple[int, int]]:
    shapes = {linear.name: (linear.n, linear.k) for linear in linears}
    packed = {}
    for name in journal:
        if not name.endswith(PACKED) or name.startswith(SIDECAR_PREFIX):
            continue
        module = name.removesuffix(PACKED)
        plain = source.tensors.get(module + ".weight")
        if plain is None and module == head_name(source):
            plain = source.info(embedding_name(source))
        shape = shapes.get(module) or (plain.shape if plain is not None else None)
        if shape is None or len(shape) != 2:
            raise UserError(
                "the journal packs a matrix that the source does not have", item=module, hint=_CALIBRATE_HINT
            )
        packed[module] = (shape[0], shape[1])
        _check_parts(module, packed[module], journal)
    if not packed:
        raise UserError("the journal holds no quantized matrix", hint=_CALIBRATE_HINT)
    return packed


def _check_parts(module: str, shape: tuple[int, int], journal: Mapping[str, TensorInfo]) -> None:
    n, k = shape
    scale = journal.get(module + SCALE)
    blocks = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 0
    eight = in_eight_bits(journal[module + PACKED], k)
    per_word = BYTES_PER_WORD if eight else CODES_PER_WORD
    expected = {PACKED: ("I32", (n, -(-k // per_word))), SHAPE: ("I64", (2,))}
    if module + ZERO in journal:
        expected[ZERO] = ("I32", (-(-n // CODES_PER_WORD), blocks))
    for part, wanted in expected.items():
        info = journal.get(module + part)
        found = None if info is None else (info.dtype, info.shape)
        if found != wanted:
            raise UserError("journal and source disagree", item=module + part, found=found or "none", expected=wanted)
    if scale is None or blocks == 0 or scale.shape[0] != n or scale.dtype not in ("BF16", "F16", "F32"):
        found = None if scale is None else (scale.dtype, scale.shape)
        raise UserError(
            "journal and source disagree", item=module + SCALE, found=found or "none", expected=f"[{n}, blocks]"
        )


def _is_symmetric(packed: Collection[str], journal: Mapping[str, TensorInfo]) -> bool:
    with_zero = [module for module in packed if module + ZERO in journal]
    if with_zero and len(with_zero) != len(packed):
        other = next(module for module in packed if module + ZERO not in journal)
        raise UserError("some matrices have zero-points and some do not", item=other, hint=_CALIBRATE_HINT)
    return not with_zero


def _covered_sources(source: Checkpoint, linears: Sequence[Linear], packed: Mapping[str, tuple[int, int]]) -> set[str]:
    """Source tensors that packed parts stand for. A fused stack must be packed whole."""
    covered = {module + ".weight" for module in packed if module + ".weight" in source.tensors}
    parts: dict[str, list[bool]] = defaultdict(list)
    for linear in linears:
        if linear.source != linear.name + ".weight":
            parts[linear.source].append(linear.name in packed)
    for tensor, flags in parts.items():
        if any(flags) and not all(flags):
            found = f"{sum(flags)} of {len(flags)} matrices packed"
            raise UserError("a fused stack is packed in part", item=tensor, found=found, hint=_CALIBRATE_HINT)
        if all(flags):
            covered.add(tensor)
    return covered


def _plain_spec(source: Checkpoint, journal: Mapping[str, TensorInfo], name: str, replaced: bool) -> Spec:
    info = source.tensors.get(name)
    if replaced:
        new = journal[name]
        if info is not None and new.shape != info.shape:
            raise UserError("journal and source disagree", item=name, found=new.shape, expected=info.shape)
        return _spec(new)
    assert info is not None
    dtype = DTYPE_NAMES[source.dtype] if info.dtype in WEIGHT_DTYPES else info.dtype
    return Spec(name, dtype, info.shape)


def _spec(info: TensorInfo) -> Spec:
    return Spec(info.name, info.dtype, info.shape)


def _sidecar_spec(info: TensorInfo) -> Spec:
    return Spec(info.name.removeprefix(SIDECAR_PREFIX), info.dtype, info.shape)


def head_name(source: Checkpoint) -> str:
    """`lm_head`, under the prefix the source's names carry (multimodal wrappers)."""
    return next((n.removesuffix(".weight") for n in source.tensors if n.endswith("lm_head.weight")), "lm_head")


def embedding_name(source: Checkpoint) -> str:
    """The embedding's tensor, which a tied head shares."""
    found = next((name for name in source.tensors if name.endswith("embed_tokens.weight")), None)
    if found is None:
        raise UserError("no embedding in this checkpoint", file=source.folder, item="embed_tokens.weight")
    return found
