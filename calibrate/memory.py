"""How much memory calibrating one layer takes, and how the work is cut to fit under a cap. Sizes in bytes.

Dimensions: W windows, T tokens of all windows, D hidden, K inputs of a linear.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch

from glm5_quant.calibrate.evidence import HESSIAN_BLOCK, LARGEST_HESSIAN
from glm5_quant.calibrate.seen import SAMPLE_TOKENS
from glm5_quant.calibrate.settings import Settings
from glm5_quant.model.causal import KEYS_AT_ONCE, QUERIES
from glm5_quant.model.families import Family, Linear
from glm5_quant.quant.rounding import SLICE_WEIGHTS
from glm5_quant.quant.target import few

# glibc's numbers for the two settings of its allocator.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Tensors from this size on are mapped one by one, and go back to the system when they are freed. Left to itself, glibc
# raises the limit to the largest one freed (32 MiB at most), and holes between what stays grow with every expert.
_MAPPED_BYTES, _TRIMMED_BYTES = 4 * 2**20, 64 * 2**20
# torch, transformers and the interpreter themselves, measured as resident memory after import.
INTERPRETER_BYTES = 600 * 2**20
_F32 = 4
# More tokens at a time are no faster: what is computed between two products leaves the cache.
MOST_CHUNK_TOKENS = 4096
# Matrices of K x K alive at the worst moment: sums, H, H shrunk, a factor that failed, H in float64. Where tokens are
# held out, also their sums and H, and the gap of both; else, of experts, the sums of all tokens that they lean on.
_SQUARES, _HELD_SQUARES, _POOL_SQUARES = 7, 4, 1
# float32 copies of a group's weights: source, target, all targets, restored, error, rounded to nearest; where errors
# are counted by what the attention makes of them, most of these another time as they count. And the solver's working
# set of a slice of rows.
_COPIES, _COUNTED_COPIES, _SLICES = 6, 5, 8


@dataclass(frozen=True, kw_only=True)
class Cut:
    """`chunk_windows` windows go through a layer's attention together; feed-forward networks take `chunk_tokens` tokens
    at a time. Both streams at a layer's ends, and buffers for all tokens, lie in files of `stream_bytes`. `short`: the
    cap leaves no room for freed memory that is not given back. `peak_bytes` is the prediction, `least_bytes` what no
    cut can go below.
    """

    chunk_windows: int
    chunk_tokens: int
    stream_bytes: int
    short: bool
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


def cut(items: list[Linear], settings: Settings, config: Any, family: Family, dtype: torch.dtype, cap: int) -> Cut:
    """Fit window chunks, token chunks and buffers under the cap. `config` is the model's."""
    tokens, item, hidden = settings.num_samples * settings.seqlen, dtype.itemsize, int(config.hidden_size)
    streams = 2 if settings.quant.alphas else 1
    inside = [one for one in items if one.module.startswith(family.attention_path + ".")]
    outside = [one for one in items if not one.module.startswith(family.attention_path + ".")]
    first = [one for one in inside if one.layer == items[0].layer]
    weights = 2 * item * sum(one.n * one.k for one in first)
    held_tokens = tokens if settings.quant.alphas else 0
    fixed = INTERPRETER_BYTES + max(
        weights + _solving(inside, held_tokens, probed=settings.quant.probed_tokens > 0), _solving(outside, held_tokens)
    )
    if settings.quant.activations == "int4-channel":  # the sample, and what is made of it while scales are searched
        fixed += 4 * _F32 * SAMPLE_TOKENS * max(one.k for one in items)
    # Inputs of the linears in one stream, outputs of all, and about as much again inside the attention.
    per_window = settings.seqlen * item * 3 * (sum(one.n for one in first) + hidden * 4)
    scores = 0
    if getattr(config, "qk_head_dim", None) != getattr(config, "v_head_dim", None):
        # PyTorch fuses attention only where the two are as wide; elsewhere scores lie open, of all queries at a time or
        # of a few (causal.py).
        scores = int(config.num_attention_heads) * settings.seqlen * (item + _F32)
        per_window += scores * (QUERIES if settings.seqlen <= KEYS_AT_ONCE else settings.seqlen)
    passing = per_window + _indexing(config, settings.seqlen)
    if settings.quant.probed_tokens:  # what is probed (probe.py) is kept for the way back
        passing += per_window + scores * settings.seqlen
    width = max((one.k for one in items if one.role == "down"), default=hidden)
    per_token = width * _F32 * 8
    stream_bytes = _files(tokens * item, streams, hidden, first, outside)
    if settings.device != "cpu":  # there they lie in its memory
        fixed += stream_bytes
    room = max(cap - fixed, 0)
    most_windows = min(settings.num_samples, MOST_CHUNK_TOKENS // settings.seqlen)
    solving_room, passing_room = int(room * 0.6), int((room + fixed - INTERPRETER_BYTES - weights) * 0.8)
    chunk_windows = max(1, min(most_windows, solving_room // per_window, passing_room // passing))
    chunk_tokens = max(256, min(MOST_CHUNK_TOKENS, int(room * 0.2) // per_token))
    used = max(chunk_windows * per_window, chunk_tokens * per_token)
    used = max(used, INTERPRETER_BYTES + weights + chunk_windows * passing - fixed)
    return Cut(
        chunk_windows=chunk_windows,
        chunk_tokens=chunk_tokens,
        stream_bytes=stream_bytes,
        short=fixed + stream_bytes > cap * 3 // 4,
        peak_bytes=fixed + used,
        least_bytes=max(fixed + max(per_window, 256 * per_token), INTERPRETER_BYTES + weights + passing),
    )


def _files(channel: int, streams: int, hidden: int, inside: list[Linear], outside: list[Linear]) -> int:
    """Bytes of files for all tokens, of which one channel takes `channel`: both streams at both ends of a layer, and
    what is kept of its attention (`inside`) or of its feed-forward networks."""
    groups = {one.group: one.k for one in inside}.values()
    attention = (streams - 1) * sum(groups) + max(groups, default=0) + streams * hidden
    experts = any(one.expert is not None for one in outside)
    width = max((one.k for one in outside if one.role == "down"), default=0)
    # Inputs, what is lacking, and where there are experts the sums of their outputs, in float32, and a shared one's.
    feed_forward = width + (2 * streams - 1) * hidden + (streams * 3 * hidden if experts else 0)
    return channel * (2 * streams * hidden + max(attention, feed_forward))


def _indexing(config: Any, seqlen: int) -> int:
    """What an indexer of sparse attention takes of a window while it runs: transformers copies its keys for every
    query, and scores all pairs in each of its heads, in float32."""
    return seqlen**2 * _F32 * (getattr(config, "index_head_dim", 0) + getattr(config, "index_n_heads", 0))


def _solving(items: list[Linear], held_tokens: int, *, probed: bool = False) -> int:
    """Memory of solving the largest group: K x K matrices, its weights (or one block of columns), a slice of rows.

    `held_tokens`: tokens of which some are held out, in groups of few enough channels. `probed`: errors go between
    rows.
    """
    largest = 0
    groups: dict[str, list[Linear]] = {}
    for one in items:
        groups.setdefault(one.group, []).append(one)
    for members in groups.values():
        k = members[0].k if members[0].k <= LARGEST_HESSIAN else HESSIAN_BLOCK
        weights = sum(one.n for one in members) * k
        held = not few(held_tokens, members[0].k)
        squares = _SQUARES + (_HELD_SQUARES if held else _POOL_SQUARES if members[0].expert is not None else 0)
        copies = _COPIES + (_COUNTED_COPIES if probed and members[0].role != "o_proj" else 0)
        working = copies * weights + _SLICES * min(weights, SLICE_WEIGHTS) + squares * k * k
        # The sums of all blocks are there from the beginning.
        working += (members[0].k - k) * k * (4 if held else 1)
        largest = max(largest, working * _F32)
    return largest


def give_freed_memory_back() -> None:
    """Have glibc return large freed tensors to the system, for the rest of this process; elsewhere nothing happens.

    For where memory is short: tensors are mapped anew each time, a sixth of the time that SmolLM2-135M takes.
    """
    setting = _allocator("mallopt")
    if setting is not None:
        setting(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        setting(_M_TRIM_THRESHOLD, _TRIMMED_BYTES)


def bound_kernel_caches() -> None:
    """Have PyTorch and oneDNN keep few of the kernels they make for every number of tokens, since each expert has its
    own: 80 MB a layer of 8 experts, up to a thousand kernels. For the rest of this process, and only before its first
    product; limits that are set already stay."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def trim_freed_memory() -> None:
    """Have glibc return what is free in its heap now, holes included; elsewhere nothing happens."""
    trim = _allocator("malloc_trim")
    if trim is not None:
        trim(0)


def _allocator(function: str) -> Any:
    return getattr(ctypes.CDLL(None), function, None) if os.name == "posix" else None


def usable_memory(device: str) -> int:
    """What a run may take where nothing is said: six tenths of this machine's memory, nine of what a GPU has free."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 9 // 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 6 // 10
