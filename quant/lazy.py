"""The lazy batches of GPTQ (Frantar et al., arXiv 2210.17323): what one column's change does to later ones is carried
to those of its group of 16 at once, to those of its batch of 128 by a small matmul, beyond by one large matmul."""

from __future__ import annotations

from torch import Tensor

BATCH_COLUMNS = 128
SUB_COLUMNS = 16


def carry(into_EKN: Tensor, by_EKK: Tensor, changes_EKN: Tensor, bounds: tuple[int, int, int], sign: float) -> None:
    """Add sign * by^T changes of columns first..last to columns last..until of `into_EKN`, in place.

    Letters: E batch, K columns of the matrix (its inputs), N rows of it. `bounds` is (first, last, until).
    """
    first, last, until = bounds
    if last < until:
        into_EKN[:, last:until].baddbmm_(
            by_EKK[:, first:last, last:until].transpose(1, 2), changes_EKN[:, first:last], alpha=sign
        )
