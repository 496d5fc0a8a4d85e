"""4-bit weights times bf16 or 8-bit tokens by C kernels of our own, on CPUs with AVX512-BF16; figures: docs/kernels.md.

Letters: E experts, N out, K in, T tokens, D hidden size, A experts a token chooses.

PyTorch's own operators either widen 4-bit weights for a few tokens only, or need a second copy of them. The C files
beside this one read the codes where they lie. They are compiled once, at the first use, by the C compiler that Triton
and `torch.compile` need as well, and kept in the user's cache folder. Without a compiler, or on another CPU,
`library()` is None and cpu.py uses PyTorch's operators. GLM5_QUANT_NATIVE=0 turns the kernels off.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from glm5_quant.kernels.layout import PackedMatrix, Shadow, block_count

SOURCES = ("native_linear.c", "native_few.c", "native_many.c", "native_int8.c", "native_experts.c")
HEADERS = ("native.h",)
FLAGS = (
    "-O3", "-std=c11", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni",
    "-mfma", "-mf16c", "-shared", "-fPIC", "-pthread",
)  # fmt: skip
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.int8: 3}
COMPILE_SECONDS = 300
FEW_ROWS = 10
EXACT_ROWS = 2
_LOG = logging.getLogger(__name__)


class Matrix(ctypes.Structure):
    """`Matrix` of native.h: addresses into a packed matrix, which has to outlive it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "zero", "scale", "columns", "residual", "residual_scale")),
        *((name, ctypes.c_int64) for name in ("n", "k", "count")),
        *((name, ctypes.c_int32) for name in ("scale_kind", "residual_kind", "bits")),
    )


def suits(tokens: int) -> bool:
    """Whether the C kernels are there and the fastest for this many tokens.

    With AMX, PyTorch's bf16 product has another peak: there they are for few tokens only.
    """
    return library() is not None and (tokens <= FEW_ROWS or not _has("_is_amx_tile_supported"))


def linear(x_TK: Tensor, packed: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """x @ W^T with the shadow, [T, N] in float32 or bf16; x is bf16 [T, K]."""
    return _product(x_TK, _matrices(packed), packed.n, dtype)


def linear_int8(x_TK: Tensor, packed: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """x @ W^T with the shadow, [T, N] in `dtype`, x [T, K] of any float dtype, rounded as by `inputs.quantize` "int8".

    Exact integer sums of blocks, float32 between them; a token's result is the same however many are computed at once.
    """
    x_TK = x_TK.contiguous()
    out_TN = torch.empty(x_TK.shape[0], packed.n, dtype=dtype)
    if cast(Any, library()).glm5_linear_int8(
        _matrices(packed), x_TK.data_ptr(), KINDS[x_TK.dtype], x_TK.shape[0], out_TN.data_ptr(), KINDS[dtype],
        torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError("no memory for the working space of a linear layer")
    return out_TN


def eight(x_TK: Tensor, codes_NK: Tensor, scale_NB: Tensor, dtype: torch.dtype) -> Tensor:
    """x @ ((codes - 128) * scale)^T, [T, N] in float32 or bf16; codes uint8, one scale for 64 inputs, x bf16 [T, K]."""
    if scale_NB.shape != (codes_NK.shape[0], block_count(codes_NK.shape[1])):
        raise ValueError(f"8-bit codes {tuple(codes_NK.shape)} have one scale for 64, found {tuple(scale_NB.shape)}")
    codes_NK, scale_NB = codes_NK.contiguous(), scale_NB.contiguous()
    n, k = codes_NK.shape
    matrix = Matrix(
        codes=codes_NK.data_ptr(), scale=scale_NB.data_ptr(), n=n, k=k, scale_kind=KINDS[scale_NB.dtype], bits=8
    )
    return _product(x_TK, ctypes.byref(matrix), n, dtype)


def dense(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ W^T, all bf16, for a few tokens: PyTorch's product reads large matrices at half the speed of memory."""
    weight_NK = weight_NK.contiguous()
    n, k = weight_NK.shape
    matrix = Matrix(codes=weight_NK.data_ptr(), n=n, k=k, bits=16)
    return _product(x_TK, ctypes.byref(matrix), n, torch.bfloat16)


def _product(x_TK: Tensor, matrix: Any, n: int, dtype: torch.dtype) -> Tensor:
    x_TK = x_TK.contiguous()
    tokens, k = x_TK.shape
    out_TN = torch.empty(tokens, n, dtype=dtype)
    call = cast(Any, library()).glm5_linear
    if call(matrix, x_TK.data_ptr(), tokens, k, out_TN.data_ptr(), KINDS[dtype], torch.get_num_threads()):
        raise MemoryError("no memory for the working space of a linear layer")
    return out_TN


def experts(
    x_TD: Tensor, index_TA: Tensor, weight_TA: Tensor, gate_up: PackedMatrix, down: PackedMatrix, *, int8: bool = False
) -> Tensor:
    """The routed layer with silu, [T, D] in x's dtype; index E means "no expert".

    x: bf16; or any float dtype with `int8`, which rounds the inputs of both matrices to 8 bits (`linear_int8`).
    """
    x_TD, index_TA, weight_TA = x_TD.contiguous(), index_TA.long().contiguous(), weight_TA.float().contiguous()
    out_TD = torch.empty_like(x_TD)
    count, (tokens, choices) = gate_up.codes.shape[0], index_TA.shape
    failed = cast(Any, library()).glm5_experts(
        _matrices(gate_up), _matrices(down), count, x_TD.data_ptr(), KINDS[x_TD.dtype], int8, index_TA.data_ptr(),
        weight_TA.data_ptr(), tokens, choices, out_TD.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if failed == 2:
        found = f"{int(index_TA.min())}..{int(index_TA.max())}"
        raise ValueError(f"expert indices are {found}, outside 0..{count} ({count} means no expert)")
    if failed:
        raise MemoryError("no memory for the working space of the experts")
    return out_TD


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None with the reason in the log."""
    reason = _unfit()
    if reason:
        _LOG.debug("no native kernels: %s", reason)
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.warning("native kernels could not be built, PyTorch's operators are used instead: %s", _words(error))
        return None
    pointer, wide, narrow = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    loaded.glm5_linear.argtypes = [pointer, pointer, wide, wide, pointer, narrow, narrow]
    loaded.glm5_linear_int8.argtypes = [pointer, pointer, narrow, wide, pointer, narrow, narrow]
    loaded.glm5_experts.argtypes = [
        pointer, pointer, wide, pointer, narrow, narrow, pointer, pointer, wide, wide, pointer, narrow
    ]  # fmt: skip
    return loaded


def _unfit() -> str:
    """Why the kernels cannot run here, or nothing."""
    if os.environ.get("GLM5_QUANT_NATIVE") == "0":
        return "turned off by GLM5_QUANT_NATIVE=0"
    if platform.system() != "Linux" or not (_has("_is_avx512_bf16_supported") and _has("_is_vnni_supported")):
        return "they are for Linux on CPUs with AVX512-BF16 and VNNI"
    return "" if _compiler() else "no C compiler (set CC)"


@functools.cache
def _has(feature: str) -> bool:
    return bool(getattr(torch.cpu, feature, lambda: False)())


def _compiler() -> list[str] | None:
    """The command that CC gives ("ccache gcc"), else the first compiler there is."""
    named = shlex.split(os.environ.get("CC", ""))
    choices = (named, ["cc"], ["gcc"], ["clang"])
    return next((words for words in choices if words and shutil.which(words[0])), None)


def _compiled() -> Path:
    """The shared library, compiled unless the cache has it. Its name is a hash of everything it is made from.

    That includes the C library, since machines of several systems may share a home.
    """
    folder = Path(__file__).parent
    parts = [(folder / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    digest = hashlib.sha256(b"\0".join([*parts, " ".join((*FLAGS, *platform.libc_ver())).encode()])).hexdigest()[:16]
    target = _cache() / f"native-{digest}.so"
    if not _whole(target):
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            command = [*(_compiler() or ()), *FLAGS, *(str(folder / name) for name in SOURCES), "-o", str(made)]
            _LOG.info("compiling native kernels into %s", target)
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            content = made.read_bytes()
            made.write_bytes(content + hashlib.sha256(content).digest())
            made.replace(target)
    return target


def _whole(library: Path) -> bool:
    """Whether the file ends with the hash of the rest: loading a part of a library kills the process."""
    content = library.read_bytes() if library.is_file() else b""
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _cache() -> Path:
    """A folder that nobody else can write to: the user's cache, else a new temporary one for this process."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm5-quant"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    made = Path(tempfile.mkdtemp(prefix="glm5-quant-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _words(error: Exception) -> str:
    shown = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return shown[0] if shown else type(error).__name__


def _matrices(packed: PackedMatrix) -> Any:
    """One `Matrix`, or an array of them for a stack; made once and remembered with the tensors they point into."""
    if "native" not in packed.forms:
        packed.forms["native"] = _describe(packed)
    return packed.forms["native"][0]


def _describe(packed: PackedMatrix) -> tuple[Any, list[Tensor]]:
    codes, scale, zero = (part.contiguous() for part in (packed.codes, packed.scale, packed.zero))
    if packed.zero.numel() and int(packed.zero.max()) > 15:
        raise ValueError(f"zero-points must be 0..15, found {int(packed.zero.max())}")
    count = packed.experts or 1
    kept, owned, residual = [codes, scale, zero], [0] * (count + 1), None
    if packed.shadow is not None:
        shadow = _contiguous(packed.shadow)
        owned, residual = shadow.offsets.tolist(), shadow.residual
        kept += [shadow.columns, shadow.residual, *([] if shadow.scale is None else [shadow.scale])]
    found = (Matrix * count)()
    for e, matrix in enumerate(found):
        matrix.n, matrix.k, matrix.count = packed.n, packed.k, owned[e + 1] - owned[e]
        matrix.scale_kind, matrix.bits = KINDS[scale.dtype], 4
        for name, part in (("codes", codes), ("zero", zero), ("scale", scale)):
            setattr(matrix, name, part.data_ptr() + e * (part.nbytes // count))
        if residual is not None:
            matrix.residual_kind = KINDS[residual.dtype]
            for name, part in zip(("columns", "residual", "residual_scale"), kept[3:], strict=False):
                setattr(matrix, name, part[owned[e] :].data_ptr())
    return found, kept


def _contiguous(shadow: Shadow) -> Shadow:
    scale = None if shadow.scale is None else shadow.scale.float().contiguous()
    return Shadow(shadow.columns.int().contiguous(), shadow.residual.contiguous(), shadow.offsets, scale)
