"""Cholesky factors that do not depend on the number of threads.

LAPACK's own parallel factorization gives other last bits with two threads than with one, and one changed bit is enough
to flip a code. Only its use on small diagonal blocks is held to one thread; the matmuls around them, which hold nearly
all the work, were found equal for any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glm5_quant.quant.threads import one_thread

BLOCK = 384


def cholesky(matrix_EKK: Tensor, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """(lower factor [E, K, K], ok bool [E]) of symmetric matrices; the factor is meaningless where ok is False.

    With `in_place` it takes the matrices' own memory.
    """
    k = matrix_EKK.shape[-1]
    lower_EKK = matrix_EKK if in_place else torch.zeros_like(matrix_EKK)
    ok_E = torch.ones(matrix_EKK.shape[0], dtype=torch.bool, device=matrix_EKK.device)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        column_ERB = matrix_EKK[:, start:, start:stop].clone()
        if start:
            column_ERB.baddbmm_(lower_EKK[:, start:, :start], lower_EKK[:, start:stop, :start].mT, alpha=-1.0)
        with one_thread():
            corner_EBB, info_E = torch.linalg.cholesky_ex(column_ERB[:, : stop - start])
        ok_E &= (info_E == 0) & torch.isfinite(corner_EBB).flatten(1).all(1)
        lower_EKK[:, start:stop, start:stop] = corner_EBB
        if stop < k:
            rest_EBR = column_ERB[:, stop - start :].mT
            lower_EKK[:, stop:, start:stop] = torch.linalg.solve_triangular(corner_EBB, rest_EBR, upper=False).mT
    return lower_EKK.tril_() if in_place else lower_EKK, ok_E
