"""How much memory calibrating one layer takes, and how the work is cut to fit under a cap. Sizes in bytes.

Dimensions: W windows, T tokens of all windows, D hidden, K inputs of a linear.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from glm5_quant.calibrate.evidence import HESSIAN_BLOCK, LARGEST_HESSIAN
from glm5_quant.calibrate.seen import SAMPLE_TOKENS
from glm5_quant.calibrate.settings import Settings
from glm5_quant.model.families import Family, Linear
from glm5_quant.quant.rounding import SLICE_WEIGHTS

# torch, transformers and the interpreter themselves, measured as resident memory after import.
INTERPRETER_BYTES = 600 * 2**20
_F32 = 4
# Matrices of K x K alive at the worst moment: sums, H, H shrunk, permuted, factored and the factor; gaps beside them.
_SQUARES = 7
# float32 copies of a group's weights: source, target, restored, error; and the solver's working set of a slice of rows.
_COPIES, _SLICES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Cut:
    """`chunk_windows` windows go through a layer's attention together; feed-forward networks take `chunk_tokens` tokens
    at a time and keep up to `keep_bytes` of hidden activations instead of computing them twice; buffers of
    `scratch_bytes` lie on disk (0: in memory). `peak_bytes` is the prediction, `least_bytes` what no cut can go below.
    """

    chunk_windows: int
    chunk_tokens: int
    keep_bytes: int
    scratch_bytes: int
    stream_bytes: int
    peak_bytes: int
    least_bytes: int


def run_dtype(source: torch.dtype, device: str) -> torch.dtype:
    """The dtype layers run in: the one the model is served in where the hardware multiplies it fast, else float32.

    bfloat16 doubles the speed on CPUs that have it; its rounding (0.2%) is far below that of INT4.
    """
    if device != "cpu":
        return source
    fast = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if source == torch.bfloat16 and fast else torch.float32


def cut(items: list[Linear], settings: Settings, hidden: int, family: Family, dtype: torch.dtype, cap: int) -> Cut:
    """Fit window chunks, token chunks and buffers under the cap."""
    tokens, item = settings.num_samples * settings.seqlen, dtype.itemsize
    streams = 2 if settings.quant.alphas else 1
    inside = [one for one in items if one.module.startswith(family.attention_path + ".")]
    outside = [one for one in items if not one.module.startswith(family.attention_path + ".")]
    first = [one for one in inside if one.layer == items[0].layer]
    attention = _solving(inside) + 2 * item * sum(one.n * one.k for one in first)
    fixed = INTERPRETER_BYTES + max(attention, _solving(outside))
    if settings.quant.activations == "int4-channel":  # the sample, and what is made of it while scales are searched
        fixed += 4 * _F32 * SAMPLE_TOKENS * max(one.k for one in items)
    boundaries = 2 * streams * tokens * hidden * item
    buffers = streams * tokens * hidden * (2 * item + 2 * _F32) + (streams - 1) * tokens * hidden * item
    on_disk = fixed + boundaries + buffers > cap * 3 // 4
    # Inputs kept for the source stream, outputs of the linears, and about as much again inside the attention.
    per_window = settings.seqlen * item * 3 * (sum(one.n for one in first) + hidden * 4)
    width = max((one.k for one in items if one.role == "down"), default=hidden)
    per_token = width * _F32 * 8
    room = max(cap - fixed - (0 if on_disk else boundaries + buffers), 0)
    chunk_windows = max(1, min(settings.num_samples, int(room * 0.6) // per_window))
    chunk_tokens = max(256, min(8192, int(room * 0.2) // per_token))
    keep = min(int(room * 0.3), streams * tokens * width * item)
    used = max(chunk_windows * per_window, chunk_tokens * per_token + keep)
    return Cut(
        chunk_windows=chunk_windows,
        chunk_tokens=chunk_tokens,
        keep_bytes=keep,
        scratch_bytes=buffers if on_disk else 0,
        stream_bytes=boundaries,
        peak_bytes=fixed + (0 if on_disk else boundaries + buffers) + used,
        least_bytes=fixed + max(per_window, 256 * per_token),
    )


def _solving(items: list[Linear]) -> int:
    """Memory of solving the largest group: K x K matrices, its weights (or one block of columns), a slice of rows."""
    largest = 0
    groups: dict[str, list[Linear]] = {}
    for one in items:
        groups.setdefault(one.group, []).append(one)
    for members in groups.values():
        k = members[0].k if members[0].k <= LARGEST_HESSIAN else HESSIAN_BLOCK
        weights = sum(one.n for one in members) * k
        working = _COPIES * weights + _SLICES * min(weights, SLICE_WEIGHTS) + _SQUARES * k * k
        largest = max(largest, working * _F32)
    return largest


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
