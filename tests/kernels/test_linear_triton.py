"""Triton's linear kernels under the interpreter, in fp16, against float64 and against their plain twins."""

from __future__ import annotations

import pytest
import torch
from support_kernels import random_packed, random_shadow, relative_error

triton = pytest.importorskip("triton")

from glm5_quant.kernels import linear_triton  # noqa: E402
from glm5_quant.kernels.dispatch import linear  # noqa: E402
from glm5_quant.kernels.table import Config  # noqa: E402

SMALL = Config(block_r=32, block_t=8, warps=1, stages=1, split_k=2)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 17, 33, 129])
@pytest.mark.parametrize(("n", "k"), [(40, 256), (33, 192), (1, 64), (65, 100)])
def test_linear_is_within_a_thousandth_of_float64(tokens: int, n: int, k: int) -> None:
    packed, weight = random_packed(n, k, dtype=torch.float16)
    x, bias = torch.randn(tokens, k).half(), torch.randn(n).half()
    found = linear(x, packed, bias, backend="triton")
    assert found.dtype == torch.float16
    assert relative_error(found, x.double() @ weight.T + bias.double()) < 1e-3
