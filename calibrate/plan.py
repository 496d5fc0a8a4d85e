"""What a calibration would cost, from headers only: sizes, memory, disk, coverage; and how it is cut to fit.

Dimensions: W windows, T tokens of all windows, D hidden, K inputs of a linear.
"""

from __future__ import annotations

import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from glm5_quant.calibrate.context import activation
from glm5_quant.calibrate.evidence import HESSIAN_BLOCK, LARGEST_HESSIAN
from glm5_quant.calibrate.memory import cut, run_dtype, usable_memory
from glm5_quant.calibrate.precision import part_of, table_bytes
from glm5_quant.calibrate.settings import Settings, work_folder
from glm5_quant.calibrate.shadows import candidate_bytes, shadowed
from glm5_quant.model.build import check_parameters
from glm5_quant.model.checkpoint import Checkpoint
from glm5_quant.model.errors import UserError, human_bytes
from glm5_quant.model.families import (
    Family,
    Linear,
    check_sizes,
    expert_count,
    family_of,
    linears,
    model_config,
    refuse_quantized,
)
from glm5_quant.model.files import expanded
from glm5_quant.model.rotated import as_rotated
from glm5_quant.model.staging import check_apart

SOURCE_TOKENS_PER_CHANNEL = 20
# Windows that are read unless the user says how many: as many as a linear's statistics need, but no more than this.
MOST_WINDOWS = 128
# With few channels tokens count by values: 16,384 of 128 channels leave 1% more error than 38,000 (docs/lab-log.md).
NEEDED_VALUES = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A calibration's cost and pieces. Sizes in bytes.

    `eight`: matrices stored in 8 bits. `windows` are read; `chunk_windows` of them go through a layer's attention
    together; feed-forward networks take `chunk_tokens` tokens at a time.
    """

    family: Family
    layers: int
    by_layer: dict[int, list[Linear]]
    eight: frozenset[str]
    source_bytes: int
    quantized_weights: int
    export_bytes: int
    journal_bytes: int
    stream_bytes: int
    peak_memory_bytes: int
    memory_cap_bytes: int
    least_memory_bytes: int
    disk_free_bytes: int
    experts: int
    windows: int
    tokens: int
    seqlen: int
    tokens_per_expert: float | None
    coverage_target: int
    chunk_windows: int
    chunk_tokens: int
    memory_short: bool
    work_dir: Path
    warnings: list[str] = field(default_factory=list)

    @property
    def disk_needed_bytes(self) -> int:
        return self.journal_bytes + self.stream_bytes

    def chunks(self, windows: int) -> list[tuple[int, int]]:
        """Ranges of windows that go through a layer together."""
        return [(i, min(i + self.chunk_windows, windows)) for i in range(0, windows, self.chunk_windows)]

    def source_windows(self, windows: int, held_windows: int) -> int:
        """How many windows, the last ones, the source stream follows beside the quantized one.

        All of them where there are experts: both streams replay the source's routing. In a dense model the gap between
        the streams is known well enough from SOURCE_TOKENS_PER_CHANNEL fitted tokens for each input of the widest
        linear; the held-out windows come on top.
        """
        if self.experts:
            return windows
        widest = max(min(item.k, LARGEST_HESSIAN) for items in self.by_layer.values() for item in items)
        return min(windows, held_windows - (-SOURCE_TOKENS_PER_CHANNEL * widest // self.seqlen))

    def refuse_impossible(self) -> None:
        """Raise `UserError` for what cannot work: too little memory or disk. A journal that is there has its part of
        the disk already: it is gone on with, or makes room."""
        if self.memory_cap_bytes < self.least_memory_bytes:
            raise UserError(
                "one layer does not fit in the memory allowed",
                item="--max-memory",
                found=human_bytes(self.memory_cap_bytes),
                expected=f"at least {human_bytes(self.least_memory_bytes)}",
            )
        taken = folder_bytes(work_folder(self.work_dir))
        if self.disk_free_bytes + taken < self.disk_needed_bytes:
            there = f", and {human_bytes(taken)} of the journal that is there" if taken else ""
            raise UserError(
                "too little free disk for the journal",
                file=self.work_dir,
                found=human_bytes(self.disk_free_bytes) + there,
                expected=f"{human_bytes(self.disk_needed_bytes)} (codes {human_bytes(self.journal_bytes)}, "
                f"hidden states {human_bytes(self.stream_bytes)})",
                hint="Use another --work-dir or fewer --num-samples",
            )


def make_plan(checkpoint: Checkpoint, settings: Settings, work_dir: Path | str) -> Plan:
    """Plan a calibration from config and headers.

    Raises:
        UserError: unknown model type, tensors that are missing or of the wrong shape, nothing to quantize, or a work
            folder that cannot be written.
    """
    work_dir = expanded(work_dir)
    check_apart(work_dir, checkpoint.folder)
    checkpoint.side_files()  # a link out of the folder is an error now, not at export
    check_sizes(checkpoint)
    refuse_quantized(checkpoint)  # before what is missing: packed weights have other names
    checkpoint = as_rotated(checkpoint, settings.quant.rotation)
    family = family_of(checkpoint.config, file=checkpoint.config_file)
    config = model_config(checkpoint.config, file=checkpoint.config_file)
    activation(config, checkpoint.config_file)
    check_parameters(checkpoint, family)
    items = [item for item in linears(checkpoint, family) if part_of(item, family) not in settings.keep]
    eight = {item.name for item in items if part_of(item, family) in settings.int8}
    if len(eight) == len(items):
        raise UserError("nothing to quantize", file=checkpoint.folder)
    _check_blocks(items, settings.quant.group_size)
    by_layer: dict[int, list[Linear]] = {}
    for item in items:
        by_layer.setdefault(item.layer, []).append(item)
    experts = expert_count(config) if family.has_experts else 0
    top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
    if not settings.num_samples:
        settings = replace(settings, num_samples=useful_windows(items, settings, top_k / experts if experts else 1.0))
    tokens, hidden = settings.num_samples * settings.seqlen, int(config.hidden_size)
    cap = settings.max_memory_bytes or usable_memory(settings.device)
    pieces = cut(items, settings, config, family, run_dtype(checkpoint.dtype, settings.device), cap)
    each = tokens * top_k / experts if experts else None
    weights = sum(item.n * item.k for item in items)
    blocks = sum(item.n * -(-item.k // settings.quant.group_size) for item in items)
    offering = shadowed(items, family, eight)
    # Hidden states of the pass that counts who is routed where; they are gone before the streams begin.
    candidates = settings.windows_to_read * settings.seqlen * hidden * 4 if settings.choose_samples and experts else 0
    eight_weights = sum(item.n * item.k for item in items if item.name in eight)
    packed = (weights + eight_weights) // 2 + blocks * (
        checkpoint.dtype.itemsize + (0 if settings.quant.symmetric else 1)
    )
    tables, replaced = table_bytes(checkpoint, family, settings)
    kept = sum(i.nbytes for i in checkpoint.tensors.values()) - _source_bytes(checkpoint, items) - replaced
    return Plan(
        family=family,
        layers=int(config.num_hidden_layers),
        by_layer=by_layer,
        eight=frozenset(eight),
        source_bytes=sum(i.nbytes for i in checkpoint.tensors.values()),
        quantized_weights=weights,
        export_bytes=packed + tables + kept,
        journal_bytes=packed + tables + candidate_bytes(offering, settings.quant.shadow_budget),
        stream_bytes=max(pieces.stream_bytes, candidates),
        peak_memory_bytes=pieces.peak_bytes,
        memory_cap_bytes=cap,
        least_memory_bytes=pieces.least_bytes,
        disk_free_bytes=_free_disk(work_dir),
        experts=experts,
        windows=settings.num_samples,
        tokens=tokens,
        seqlen=settings.seqlen,
        tokens_per_expert=each,
        coverage_target=settings.coverage_target,
        chunk_windows=pieces.chunk_windows,
        chunk_tokens=pieces.chunk_tokens,
        memory_short=pieces.short,
        work_dir=work_dir,
        warnings=_warnings(items, settings, each, int(getattr(config, "max_position_embeddings", 0) or 0)),
    )


def useful_windows(items: list[Linear], settings: Settings, routed: float) -> int:
    """Windows whose tokens tell the statistics something new, MOST_WINDOWS at most.

    SOURCE_TOKENS_PER_CHANNEL tokens for each input of a linear, or NEEDED_VALUES in all, are enough of those that reach
    it; windows that are held out come on top. `routed` is an expert's even share of the tokens.
    """
    needed = 0.0
    for k, expert in {(min(item.k, LARGEST_HESSIAN), item.expert is not None) for item in items}:
        share = routed if expert and not settings.all_experts else 1.0
        needed = max(needed, max(SOURCE_TOKENS_PER_CHANNEL * k, NEEDED_VALUES / k) / share)
    return min(math.ceil(needed / settings.seqlen / (1.0 - settings.held_out)), MOST_WINDOWS)


def _check_blocks(items: list[Linear], group_size: int) -> None:
    """Inputs whose H is cut (evidence.py) are cut at borders of blocks of weights."""
    wide = next((item for item in items if item.k > LARGEST_HESSIAN), None)
    if wide is not None and HESSIAN_BLOCK % group_size:
        raise UserError(
            f"{wide.k:,} inputs are solved {HESSIAN_BLOCK:,} at a time, which are no whole blocks of that size",
            item="group_size",
            found=f"{group_size} for {wide.name}",
            expected=f"a divisor of {HESSIAN_BLOCK:,}, such as 32, 64 or 128",
        )


def _source_bytes(checkpoint: Checkpoint, items: list[Linear]) -> int:
    return sum(checkpoint.tensors[name].nbytes for name in {item.source for item in items})


def _free_disk(folder: Path) -> int:
    """Free bytes where the work folder is or will be; an unwritable place is an error now, not after hours."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError("work folder cannot be written", file=place, hint="Use another --work-dir")
    return shutil.disk_usage(place).free


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder, 0 where there is none. Files that vanish meanwhile count nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total


def _warnings(items: list[Linear], settings: Settings, tokens_per_expert: float | None, positions: int) -> list[str]:
    found = []
    if 0 < positions < settings.seqlen:
        found.append(f"windows of {settings.seqlen} tokens, where the model's config has {positions} positions at most")
    if settings.quant.group_size != 64:
        found.append(
            f"blocks of {settings.quant.group_size}: `verify` reads them, but `eval` and this package's runtime "
            "compute blocks of 64 only"
        )
    if tokens_per_expert is not None and tokens_per_expert < settings.coverage_target:
        found.append(
            f"about {tokens_per_expert:.0f} tokens an expert if they were shared evenly, below the coverage target of "
            f"{settings.coverage_target}: use more --num-samples"
        )
    if settings.quant.activations.startswith("int4") and settings.quant.rotation != "full":
        found.append(
            "inputs of 4 bits without --rotation full: each block's extreme channel takes the steps from the other 63"
        )
    ragged = [item for item in items if settings.quant.group_size == 64 and item.k % 64]
    if ragged:
        found.append(
            f"{len(ragged)} linears have inputs that are no multiple of {settings.quant.group_size} (first "
            f"{ragged[0].name}: {ragged[0].k}): their last block is shorter, which only this package's runtime loads"
        )
    return found
