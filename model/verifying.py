"""Is this folder whole, finite, true to its source, and who loads it: reads an export back without trusting its writer.

Letters: N out, K in, B blocks along K.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glm5_quant.model import atomic, staging
from glm5_quant.model.beside import differences
from glm5_quant.model.build import check_parameters
from glm5_quant.model.checkpoint import Checkpoint, open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.export_plan import PART_ENDINGS, SCALE, embedding_name, head_name, ignored_modules
from glm5_quant.model.exported import Exported, as_exported
from glm5_quant.model.families import Linear, family_of, linears, mtp_tensors, read_linear
from glm5_quant.model.files import INDEX_NAME, WEIGHT_ENDINGS, read_json
from glm5_quant.model.fp8 import WEIGHT_DTYPES
from glm5_quant.model.input_scales import read_scale, value_faults
from glm5_quant.model.journal import file_sha256
from glm5_quant.model.rotated import as_rotated
from glm5_quant.model.runtimes import RuntimeVerdict, runtime_verdicts
from glm5_quant.model.scheme import KEY, NUMERIC_KEY, SCHEME, SCHEME_KEY, rotation_of
from glm5_quant.model.shards import DTYPE_NAMES
from glm5_quant.model.sidecar import SidecarRecord, open_sidecar, sidecar_faults, unreadable

DEFAULT_SAMPLES = 32
_VARYING = re.compile(r"[\d./]")
OUTLIER_RATIO = 3.0
# Sound matrices that errors are carried through reach 0.63, since rows and columns make up for one another there. Where
# some inputs hardly vary their columns are free: in glm5-tiny, whose outlier channels were put in, sound experts reach
# 4.5. So this is no proof of a fault, however large.
OUTLIER_FLOOR = 0.8
SHOWN_OF_A_KIND = 5
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class SampledError:
    """Relative error of one matrix against the source: ||W - W^|| / ||W||, Frobenius. `outlier`: far above the rest."""

    module: str
    error: float
    outlier: bool


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What headers, config and index say. `exported` is None where the folder cannot be read as an export."""

    problems: tuple[str, ...]
    exported: Exported | None


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What `verify` found. The folder is good when `ok`; `problems` say what is wrong, `warnings` what is odd.

    `eight_bit`: of the packed matrices, those in 8 bits. `tensor_bytes`: all base tensors; `bits_per_weight`: over the
    packed matrices. `samples` are empty without a source, and with one that the export was not made from. Of problems
    of one kind only the first are listed, and the rest counted.
    """

    folder: Path
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    packed_linears: int
    eight_bit: int
    unpacked_matrices: int
    tensors: int
    tensor_bytes: int
    symmetric: bool | None
    group_size: int | None
    bits_per_weight: float | None
    features: tuple[str, ...]
    samples: tuple[SampledError, ...]
    compared_tensors: int
    runtimes: tuple[RuntimeVerdict, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    folder: str | Path,
    source: str | Path | None = None,
    *,
    samples: int = DEFAULT_SAMPLES,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read an export back: config, names, shapes, values, and the bytes of every weight file against the digests that
    the export recorded (`progress(done_bytes, total_bytes, file)` is called for each). With `source`, also compare:
    every tensor present, unpacked ones bit for bit, the values of config.json, the files beside it, and the
    dequantization error of `samples` matrices spread over the model. Where the stream was rotated inside the weights,
    the source is rotated the same way first.

    Raises:
        UserError: the folder or the source is no checkpoint at all (missing, cut or lying files); smaller faults are in
            the report.
    """
    checkpoint = open_checkpoint(folder)
    given = None if source is None else open_checkpoint(source)
    structure = check_structure(checkpoint)
    problems, warnings = list(structure.problems), list(_mtp_warnings(checkpoint))
    opened: tuple[SidecarRecord, Checkpoint] | None = None
    try:
        opened = open_sidecar(checkpoint.folder)
    except UserError as error:
        problems.append(str(error))
    found: tuple[SampledError, ...] = ()
    compared = 0
    exported, other_source = structure.exported, None
    if exported is not None:
        problems += [] if problems else _model_problems(exported)
        if given is not None:
            other_source = _other_source(exported, given, opened)
        alone = given is None or other_source is not None
        # What a comparison reads is not read twice.
        problems += _value_problems(exported, checkpoint.tensors if alone else opened[0].replaced if opened else ())
        faulty = _sidecar_problems(exported, opened)
        problems += faulty
        if given is not None and other_source is None:
            original = _as_calibrated(given, opened)
            compared, faults = _compare(exported, original, opened[0] if opened else None)
            problems += faults
            beside = differences(checkpoint, original, untied=_has_own_head(checkpoint, original))
            problems += beside.problems
            found, remarks, faults = _sample(exported, original, opened, 0 if faulty else samples)
            problems += [fault for fault in faults if fault not in problems]
            warnings += [*beside.warnings, *remarks]
    problems += _changed_files(checkpoint, *opened, progress) if opened else ()
    features = tuple(opened[0].features) if opened else ()
    return VerifyReport(
        folder=checkpoint.folder,
        problems=(*([other_source] if other_source else []), *_shortened(problems)),
        warnings=tuple(_shortened(warnings)),
        packed_linears=len(exported.shapes) if exported else 0,
        eight_bit=len(exported.eight) if exported else 0,
        unpacked_matrices=len(_unpacked_modules(checkpoint)),
        tensors=len(checkpoint.tensors),
        tensor_bytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        symmetric=exported.scheme.symmetric if exported else None,
        group_size=exported.scheme.group_size if exported else None,
        bits_per_weight=_bits_per_weight(exported) if exported else None,
        features=features,
        samples=found,
        compared_tensors=compared,
        runtimes=runtime_verdicts(exported, features, problems) if exported else (),
    )


def _changed_files(
    checkpoint: Checkpoint, record: SidecarRecord, extra: Checkpoint, progress: Progress | None
) -> Iterator[str]:
    """Weight files that are not the bytes that were written: a flipped bit in a code shows nowhere else."""
    files = {path.relative_to(checkpoint.folder).as_posix(): path for path in (*checkpoint.shards, *extra.shards)}
    files = {name: path for name, path in files.items() if name in record.sha256}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    done, total = 0, sum(sizes.values())
    for name, path in files.items():
        if progress is not None:
            progress(done, total, name)
        if file_sha256(path) != record.sha256[name]:
            yield f"{name}: its SHA-256 is not that of the file that was exported"
        done += sizes[name]


def _shortened(lines: Sequence[str]) -> list[str]:
    """The lines with at most `SHOWN_OF_A_KIND` of each kind, the rest counted. Kinds differ in more than names and
    numbers."""
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(" ".join(word for word in line.split() if not _VARYING.search(word)), []).append(line)
    found = []
    for kind, members in kinds.items():
        found += members[:SHOWN_OF_A_KIND]
        if len(members) > SHOWN_OF_A_KIND:
            found.append(f"and {len(members) - SHOWN_OF_A_KIND} more of this kind: {kind}")
    return found


def _model_problems(exported: Exported) -> list[str]:
    """What keeps our own runtime from building the model: parameters that are missing or of another shape."""
    view = exported.plain_view
    try:
        check_parameters(view, family_of(view.config, file=view.config_file))
    except UserError as error:
        return [str(error)]
    return []


def _other_source(exported: Exported, given: Checkpoint, opened: tuple[SidecarRecord, Checkpoint] | None) -> str | None:
    """The problem where the given source is not what the sidecar says the export was made from."""
    record = opened[0].made_from() if opened else None
    differing = record.differing(given.config, given.shards) if record else []
    if record is None or not differing:
        return None
    error = UserError(
        "this export was made from another model",
        file=exported.checkpoint.folder,
        found=f"{', '.join(differing[:3])} differ from {given.folder} ({given.config.get('model_type')})",
        expected=f"the {record.model_type} model it was made from",
        hint="Give that model; nothing was compared",
    )
    return str(error)


def check_structure(checkpoint: Checkpoint) -> Structure:
    """All that can be judged without reading weights: config against tensors both ways, names, shapes, strays."""
    problems = [*_config_problems(checkpoint), *_file_problems(checkpoint)]
    exported = None
    try:
        exported = as_exported(checkpoint)
        if exported is None:
            problems.append("not quantized: no packed matrices, and config.json names no pack-quantized scheme")
        else:
            problems += _ignore_problems(exported)
            linears(exported.plain_view, family_of(checkpoint.config, file=checkpoint.config_file))
    except UserError as error:
        problems.append(str(error))
    return Structure(problems=tuple(problems), exported=exported)


def _config_problems(checkpoint: Checkpoint) -> Iterator[str]:
    config = checkpoint.config
    if config.get(KEY) is not None and config.get(SCHEME_KEY) != SCHEME:
        yield f"config.json: {SCHEME_KEY} is {config.get(SCHEME_KEY)!r}, expected {SCHEME!r}"
    if config.get(KEY) is not None and not isinstance(config.get(NUMERIC_KEY), bool):
        yield f"config.json: {NUMERIC_KEY} is {config.get(NUMERIC_KEY)!r}, expected true or false"
    for key, value in config.items():
        if isinstance(value, dict) and KEY in value:
            yield f"config.json: {key} holds a second {KEY}"
    for name in (*checkpoint.dropped, *(n for n, i in checkpoint.tensors.items() if i.dtype in WEIGHT_DTYPES)):
        yield f"{name}: left over from an FP8 source"


def _file_problems(checkpoint: Checkpoint) -> Iterator[str]:
    folder = checkpoint.folder
    shards = set(checkpoint.shards)
    for path in sorted(folder.iterdir()):
        if path.name.endswith(WEIGHT_ENDINGS) and path not in shards:
            yield f"{path.name}: a weight file that the index does not name"
        if atomic.is_part(path) or path.name == staging.STAGE_NAME:
            yield f"{path.name}: left over from a killed export"
    index = folder / INDEX_NAME
    if not index.exists():
        yield f"{INDEX_NAME} is missing"
    else:
        metadata = read_json(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        expected = sum(info.nbytes for info in checkpoint.tensors.values())
        if total != expected:
            yield f"{INDEX_NAME}: total_size is {total}, the tensors have {expected} bytes"
    for path in sorted(shards):
        if _metadata(path) != {"format": "pt"}:
            yield f'{path.name}: metadata is {_metadata(path)}, expected {{"format": "pt"}}'


def _metadata(path: Path) -> object:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)).get("__metadata__")


def _unpacked_modules(checkpoint: Checkpoint) -> list[str]:
    plain = [(n, len(i.shape)) for n, i in checkpoint.tensors.items() if not n.endswith(PART_ENDINGS)]
    return ignored_modules(plain)


def _ignore_problems(exported: Exported) -> Iterator[str]:
    """The ignore list against what is stored unpacked, both ways. A head without a tensor is tied and listed."""
    listed, stored = set(exported.scheme.ignore), set(_unpacked_modules(exported.checkpoint))
    for module in sorted(stored - listed):
        yield f"{module}: stored unpacked, but not in the ignore list"
    for module in sorted(listed - stored):
        tied = module.endswith("lm_head") and not any(n.startswith(f"{module}.") for n in exported.checkpoint.tensors)
        if not tied:
            yield f"{module}: in the ignore list, but not stored as an unpacked matrix"


def _value_problems(exported: Exported, plain: Iterable[str]) -> Iterator[str]:
    """Scales that are not finite or not above zero, and those of the `plain` tensors that are not finite."""
    for name in plain:
        if name in exported.checkpoint.tensors and not name.endswith(PART_ENDINGS):
            try:
                exported.checkpoint.read(name)
            except UserError as error:
                yield str(error)
    for module in exported.shapes:
        try:
            scale = exported.checkpoint.read(module + SCALE)
        except UserError as error:
            yield str(error)
            continue
        if not bool((scale > 0).all()):
            where = torch.nonzero(scale <= 0)[0].tolist()
            yield f"{module}{SCALE}: not above zero at {where}"


def _sidecar_problems(exported: Exported, opened: tuple[SidecarRecord, Checkpoint] | None) -> list[str]:
    """What `load` would refuse of the sidecar, and the values of activation scales."""
    faults = sidecar_faults(exported, opened)
    if not faults and opened is not None:
        faults = unreadable(exported, opened[1])
    if faults or opened is None or exported.scheme.inputs.activations != "int4-channel":
        return faults
    try:
        found = _linears_of(exported.plain_view)
    except UserError:  # a fault of the structure, which has been told
        return []
    return value_faults(opened[1], found)


def _compare(exported: Exported, original: Checkpoint, record: SidecarRecord | None) -> tuple[int, list[str]]:
    """Every tensor of the source is here, packed or bit-equal, unless it was replaced on purpose."""
    checkpoint, problems, compared = exported.checkpoint, [], 0
    replaced = set(record.replaced) if record else set()
    packed_sources = {linear.source for linear in _linears_of(original) if linear.name in exported.shapes}
    for name, info in original.tensors.items():
        if name in packed_sources or name.removesuffix(".weight") in exported.shapes or name in replaced:
            continue
        here = checkpoint.tensors.get(name)
        if here is None:
            problems.append(f"{name}: in the source, but not in the export")
        elif here.shape != info.shape:
            problems.append(f"{name}: shape {list(here.shape)}, the source has {list(info.shape)}")
        elif (fault := _difference(checkpoint, original, name)) is not None:
            problems.append(fault)
        compared += 1
    extra = [n for n in checkpoint.tensors if n not in original.tensors and n not in replaced]
    known = {linear.name for linear in _linears_of(original)} | {n.removesuffix(".weight") for n in original.tensors}
    known.add(head_name(original))  # tied in the source, and a matrix of its own once it is packed
    untied = head_name(original) + ".weight"
    if untied in extra:  # a tied head beside a packed embedding: the source's embedding, as it was
        extra.remove(untied)
        compared += 1
        if not _same_bits(checkpoint.read(untied), original.read(embedding_name(original))):
            problems.append(f"{untied}: differs from the embedding that it was tied to")
    problems += [
        f"{n}: not in the source" for n in extra if not (n.endswith(PART_ENDINGS) and n.rsplit(".", 1)[0] in known)
    ]
    return compared, problems


def _difference(checkpoint: Checkpoint, original: Checkpoint, name: str) -> str | None:
    try:
        here, there = checkpoint.read(name), original.read(name)
    except UserError as error:  # not finite
        return str(error)
    if here.dtype != there.dtype:
        return f"{name}: {DTYPE_NAMES[here.dtype]}, expected {DTYPE_NAMES[there.dtype]}"
    return None if _same_bits(here, there) else f"{name}: differs from the source"


def _same_bits(here: Tensor, there: Tensor) -> bool:
    """Whether two tensors of one dtype hold the same bits: 0 and -0 are equal numbers."""
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (here, there)))


def _has_own_head(checkpoint: Checkpoint, original: Checkpoint) -> bool:
    """Whether the export holds a head, plain or packed, that is tied to the embedding in the source."""
    head = head_name(original) + ".weight"
    return head not in original.tensors and any(name.startswith(head) for name in checkpoint.tensors)


def _as_calibrated(source: Checkpoint, opened: tuple[SidecarRecord, Checkpoint] | None) -> Checkpoint:
    """The source, with its stream rotated inside the weights where that is what was quantized."""
    return source if opened is None else as_rotated(source, rotation_of(opened[0].settings))


def _linears_of(original: Checkpoint) -> list[Linear]:
    return linears(original, family_of(original.config, file=original.config_file))


def _sample(
    exported: Exported, original: Checkpoint, opened: tuple[SidecarRecord, Checkpoint] | None, count: int
) -> tuple[tuple[SampledError, ...], list[str], list[str]]:
    """Errors of `count` matrices evenly spread over the model, what to warn of in them, and which cannot be read. What
    is done to inputs at run time is taken back."""
    extra = opened[1] if opened else None
    candidates = [linear for linear in _linears_of(original) if linear.name in exported.shapes]
    chosen = [candidates[i * len(candidates) // count] for i in range(min(count, len(candidates)))]
    if len(candidates) <= count:
        chosen = candidates
    errors, faults = [], []
    for linear in chosen:
        try:
            errors.append((linear.name, _relative_error(exported, extra, original, linear)))
        except UserError as error:  # not finite, here or in the source
            faults.append(str(error))
    limit = max(OUTLIER_FLOOR, OUTLIER_RATIO * statistics.median(e for _, e in errors)) if errors else OUTLIER_FLOOR
    samples = tuple(SampledError(module=name, error=error, outlier=error >= limit) for name, error in errors)
    what = "far above the rest: sound where its inputs hardly vary, which `eval` tells"
    return samples, [f"{s.module}: relative error {s.error:.3f}, {what}" for s in samples if s.outlier], faults


def _relative_error(exported: Exported, extra: Checkpoint | None, original: Checkpoint, linear: Linear) -> float:
    weight_NK = read_linear(original, linear, torch.float32)
    folded = exported.scheme.inputs.activations == "int4-channel" and linear.name not in exported.eight
    scale_K = read_scale(extra, linear.name) if folded and extra is not None else None
    difference = torch.linalg.vector_norm(exported.weight(linear.name, scale_K) - weight_NK)
    size = torch.linalg.vector_norm(weight_NK)
    return float(difference / size) if size > 0 else (0.0 if difference == 0 else float("inf"))


def _bits_per_weight(exported: Exported) -> float:
    weights = sum(n * k for n, k in exported.shapes.values())
    parts: Sequence[int] = [i.nbytes for n, i in exported.checkpoint.tensors.items() if n.endswith(PART_ENDINGS)]
    return 8 * sum(parts) / weights


def _mtp_warnings(checkpoint: Checkpoint) -> Iterator[str]:
    declared = checkpoint.config.get("num_nextn_predict_layers") or 0
    if declared and not mtp_tensors(checkpoint, family_of(checkpoint.config, file=checkpoint.config_file)):
        yield f"config.json declares {declared} MTP layer(s) of which the folder holds no tensor"
