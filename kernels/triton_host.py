"""What every launch shares on the host side: inputs the kernels can take, and what the device can run.

Letters: T tokens, K in, B blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from glm5_quant.kernels.layout import PAIR, PackedMatrix, Shadow, padded_k
from glm5_quant.kernels.table import Config

HALVES = (torch.float16, torch.bfloat16)


def interpreted() -> bool:
    """True under TRITON_INTERPRET=1, where kernels run as Python on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def uses_asm() -> bool:
    """True where the PTX of `offset_codes` can run: NVIDIA GPUs, not the interpreter, not AMD."""
    return not interpreted() and torch.version.hip is None


def launch_options(config: Config) -> dict[str, Any]:
    """Warps and pipeline stages of a launch."""
    return {"num_warps": config.warps, "num_stages": config.stages}


def kernel_input(x_TK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """x padded with zeros to whole pairs of blocks, with unit stride along K, and scales the kernel can read.

    ValueError says why an input cannot be computed.
    """
    if x_TK.dtype not in HALVES:
        raise ValueError(f"the Triton kernels take float16 or bfloat16 inputs, found {x_TK.dtype}")
    if interpreted():
        if x_TK.dtype == torch.bfloat16:
            raise ValueError("Triton's interpreter cannot compute in bfloat16; use float16 or the reference backend")
        if scale.dtype == torch.bfloat16:
            scale = scale.float()
    elif not x_TK.is_cuda:
        raise ValueError(f"the Triton kernels need a GPU, found an input on {x_TK.device}")
    k = x_TK.shape[-1]
    if k % PAIR:
        return functional.pad(x_TK, (0, padded_k(k) - k)), scale
    return (x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()), scale


def without_gaps(packed: PackedMatrix, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero-points as the kernels read them, one row after another; copied only where they are not."""
    return packed.codes.contiguous(), scale.contiguous(), packed.zero.contiguous()


def shadow_arguments(shadow: Shadow | None, spare: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Columns, residual, factors and their count; `spare` stands in for what is absent and is never read."""
    if shadow is None or not shadow.columns.numel():
        return spare, spare, spare, 0
    factor = spare if shadow.scale is None else shadow.scale
    return shadow.columns.contiguous(), shadow.residual.contiguous(), factor.contiguous(), shadow.columns.numel()
