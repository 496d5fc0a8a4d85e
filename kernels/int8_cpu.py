"""INT8 linear algebra on CPUs with VNNI: u8 tokens times s8 weights, exact integer sums, float32 results.

Letters: N out, K in, T tokens.

Two engines of PyTorch do the same: FBGEMM's (faster up to about 24 rows; PyTorch says it will go) and oneDNN's. Signed
tokens would be a thousand times slower without AMX, so oneDNN gets u8 with zero-point 128; without VNNI both engines
saturate 16-bit sums, so they are refused.
"""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple, cast

import torch
from torch import Tensor

TINIEST = 1e-30
LEVELS = 127


class Rows(NamedTuple):
    """Tokens made ready once for every matrix that reads them.

    FBGEMM rounds by itself, with one scale for all rows: values are float32 rows over their peaks. oneDNN: values are
    uint8 with zero-point 128. scale: float32 [T, 1], what a row's result is multiplied by; None stands for 1.
    """

    values: Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, x_TK: Tensor) -> Rows:
        """Rows from float tokens [T, K]."""
        x_TK = x_TK.float()
        if engine() == "fbgemm" and x_TK.shape[0] == 1:
            return cls(x_TK, None)
        peak_T1 = x_TK.abs().amax(-1, keepdim=True).clamp_min_(TINIEST)
        if engine() == "fbgemm":
            return cls(x_TK / peak_T1, peak_T1)
        scale_T1 = peak_T1 / LEVELS
        return cls((x_TK / scale_T1).round_().add_(128).to(torch.uint8), scale_T1)

    def take(self, token: Tensor) -> Rows:
        """The rows of some tokens."""
        return Rows(self.values[token], None if self.scale is None else self.scale[token])


class Int8Weight(NamedTuple):
    """handle: the engine's own packing; sums: int32 [N] of each row's codes; scale: float32 [N].

    shape: int8 [N, K] of one stored element (FBGEMM reads its sizes only); spare: zeros [N], FBGEMM's bias or oneDNN's
    zero-points.
    """

    handle: Tensor
    sums: Tensor
    scale: Tensor
    shape: Tensor
    spare: Tensor


def engine() -> str:
    """The engine in use: "fbgemm" where this PyTorch still has it, else "onednn"; ValueError without VNNI."""
    if not has_vnni():
        raise ValueError("INT8 weights need a CPU with VNNI instructions; load with resident='int4'")
    return "fbgemm" if hasattr(torch, "fbgemm_linear_int8_weight_fp32_activation") else "onednn"


@functools.cache
def has_vnni() -> bool:
    """Whether this CPU sums products of u8 and s8 in 32 bits."""
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())


def pack(weight_NK: Tensor) -> Int8Weight:
    """Symmetric INT8 with one scale a row from float32 weights; a row of zeros has scale 0."""
    scale_N = weight_NK.abs().amax(-1) / LEVELS
    codes_NK = (weight_NK / scale_N.clamp_min(TINIEST)[:, None]).round_().to(torch.int8)
    sums_N = codes_NK.sum(-1, dtype=torch.int32)
    shape = codes_NK[:1, :1].clone().expand(codes_NK.shape)
    if engine() == "onednn":
        handle = torch.ops.onednn.qlinear_prepack(codes_NK, None)
        return Int8Weight(handle, sums_N, scale_N, shape, torch.zeros_like(sums_N))
    with warnings.catch_warnings():  # PyTorch announces that FBGEMM's operators will go; oneDNN's then take over
        warnings.simplefilter("ignore", UserWarning)
        handle = torch.fbgemm_pack_quantized_matrix(codes_NK)
        weight = Int8Weight(handle, sums_N, scale_N, shape, torch.zeros_like(scale_N))
        _fbgemm(codes_NK[:1].float(), weight)
    return weight


def linear(rows: Rows, weight: Int8Weight) -> Tensor:
    """rows @ W^T in float32 [T, N]."""
    compute = _onednn if rows.values.dtype == torch.uint8 else _fbgemm
    out_TN = compute(rows.values, weight)
    return out_TN if rows.scale is None else out_TN.mul_(rows.scale)


def _fbgemm(values_TK: Tensor, weight: Int8Weight) -> Tensor:
    out_TN = torch.fbgemm_linear_int8_weight_fp32_activation(
        values_TK, weight.shape, weight.handle, weight.sums, 1.0, 0, weight.spare
    )
    return out_TN.mul_(weight.scale)


def _onednn(values_TK: Tensor, weight: Int8Weight) -> Tensor:
    return cast(
        Tensor,
        torch.ops.onednn.qlinear_pointwise(
            values_TK, 1.0, 128, weight.handle, weight.scale, weight.spare, None, 1.0, 0, torch.float32, "none", [], ""
        ),
    )
