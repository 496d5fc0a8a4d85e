"""Error feedback between the rows of a matrix, where what one output is off can be made up for by others.

Dimensions: T tokens, N out, K in; G groups of R rows (attention heads), of which only rows of one group touch each
other; A rows that are rounded already, B rows of one turn.

Error feedback between columns takes the rows of a matrix apart: |E x|^2 counts every output alike. What the layer makes
of its outputs does not: queries matter as far as keys tell them apart. With M the second moments of gradients at the
outputs the error is tr(M E H E^T), the Kronecker-factored curvature of K-FAC (Martens and Grosse, arXiv 1503.05671),
rounded on both sides by YAQA (Tseng et al., arXiv 2505.22988) and for attentions by BoA (Kim et al., arXiv
2406.13474). Given rows A, it is least where the others are moved by M_BB^-1 M_BA E_A, whatever H is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.quant.factor import order_columns, usable_hessian
from glm5_quant.quant.grid import Grid, dequantize, expand, to_blocks
from glm5_quant.quant.shrinkage import trusted

# Rows of a group are rounded in so many turns; those of one turn, of all groups, at once.
TURNS = 8

RoundRows = Callable[[Tensor, Grid], tuple[Tensor, Grid]]


@dataclass
class OutputMoments:
    """Second moments of gradients at N = G R outputs, group by group.

    sum_GRR    float32, sum over tokens of g g^T / |g|: between the curvature itself, which a few tokens decide (all
               others read the first key of a window), and directions alone
    energy_G, square_G   float64, sums of |g| and |g|^2: what each token weighs there
    """

    sum_GRR: Tensor
    energy_G: Tensor
    square_G: Tensor

    @classmethod
    def empty(cls, groups: int, rows: int, *, device: str = "cpu") -> OutputMoments:
        nothing = torch.zeros(groups, dtype=torch.float64, device=device)
        return cls(torch.zeros(groups, rows, rows, device=device), nothing, nothing.clone())

    def add(self, gradient_TN: Tensor) -> None:
        """Add T tokens. Those without any gradient, or with one that is not finite, change nothing."""
        groups, rows = self.sum_GRR.shape[:2]
        gradient_GTR = gradient_TN.float().view(-1, groups, rows).transpose(0, 1)
        size_GT = gradient_GTR.norm(dim=-1)
        gradient_GTR = torch.where(torch.isfinite(size_GT)[..., None], gradient_GTR, 0.0)
        size_GT = size_GT.nan_to_num(0.0, 0.0)
        scaled_GTR = gradient_GTR * torch.where(size_GT > 0, size_GT.rsqrt(), 0.0)[..., None]
        self.sum_GRR.baddbmm_(scaled_GTR.transpose(1, 2), scaled_GTR)
        self.energy_G += size_GT.sum(-1, dtype=torch.float64)
        self.square_G += size_GT.double().square().sum(-1)

    @property
    def n_eff(self) -> Tensor:
        """Effective tokens behind each group's moments, float64 [G]."""
        return self.energy_G.square() / self.square_G.clamp(min=torch.finfo(torch.float64).tiny)


@dataclass(frozen=True)
class RowFeedback:
    """What is needed to round the rows of one matrix in turns.

    order_GR    int64, row within its group that is rounded at each step: descending diag M
    reach_GRR   float32, in that order: [:, A, B] what an error of 1 in row A moves row B of a later turn by
    root_GRR    float32, M = root root^T in natural order, scaled so that the mean of diag M is about 1 (damping)
    """

    order_GR: Tensor
    reach_GRR: Tensor
    root_GRR: Tensor

    @classmethod
    def of(cls, moments: OutputMoments, damp: float, trust: float | None) -> RowFeedback:
        """Moments shrunk by the number of tokens behind them and damped as those of inputs are (shrinkage.py,
        damping.py); not shrunk where `trust` is None. A group without any gradient has no feedback."""
        mean_GRR = usable_hessian(moments.sum_GRR)
        if trust is not None:
            mean_GRR = trusted(mean_GRR, moments.n_eff, trust)
        order = order_columns(mean_GRR, damp)
        reach_GRR = order.unit_EKK.clone()
        for start, stop in _turns(reach_GRR.shape[-1]):
            own_GBB, before_GAB = order.unit_EKK[:, start:stop, start:stop], reach_GRR[:, :start, start:stop]
            before_GAB.copy_(torch.linalg.solve_triangular(own_GBB, before_GAB, upper=True, left=False))
        spread_GR = order.variance_EK.gather(1, order.order_EK).sqrt()
        in_order_GRR = order.unit_EKK * spread_GR[:, None]
        rows = order.order_EK[..., None].expand_as(in_order_GRR)
        root_GRR = torch.empty_like(in_order_GRR).scatter_(1, rows, in_order_GRR)
        # The factor is of M over its mean diagonal, group by group; between groups that counts.
        mean_G = moments.sum_GRR.diagonal(dim1=-2, dim2=-1).mean(-1)
        root_GRR *= (mean_G / mean_G.mean() if mean_G.any() else mean_G + 1.0).sqrt()[:, None, None]
        return cls(order.order_EK, reach_GRR, root_GRR)

    @property
    def rows(self) -> int:
        return self.order_GR.numel()

    def some(self, count: int) -> tuple[RowFeedback, Tensor]:
        """That of a few groups, evenly spread, which hold `count` rows or more; and the numbers of those rows."""
        groups, size = self.order_GR.shape
        picked = min(groups, -(-count // size))
        group_P = torch.arange(picked) * groups // picked
        feedback = RowFeedback(self.order_GR[group_P], self.reach_GRR[group_P], self.root_GRR[group_P])
        return feedback, (group_P[:, None] * size + torch.arange(size)).flatten()

    def weigh(self, matrix_NK: Tensor) -> Tensor:
        """root^T X: rows whose plain squared errors add up to those that M counts."""
        grouped_GRK = matrix_NK.reshape(*self.order_GR.shape, -1)
        return torch.bmm(self.root_GRR.transpose(1, 2), grouped_GRK).flatten(0, 1)


def round_in_turns(
    weight_NK: Tensor, grid: Grid, feedback: Sequence[RowFeedback], round_rows: RoundRows
) -> tuple[Tensor, Grid]:
    """Codes uint8 [N, K] and grid of stacked matrices, each with its feedback.

    `round_rows` is given what some rows aim at, and their grid, and returns their codes and grid.
    Raises ValueError where the feedback is not that of all rows.
    """
    if sum(one.rows for one in feedback) != len(weight_NK):
        raise ValueError(f"feedback between {sum(one.rows for one in feedback)} rows of {len(weight_NK)}")
    codes_NK = torch.empty(weight_NK.shape, dtype=torch.uint8, device=weight_NK.device)
    scale_NB, error_NK = grid.scale.clone(), torch.zeros_like(weight_NK)
    # Blocks of zeros stay zeros, whatever other rows lack.
    live_NB = to_blocks(weight_NK, grid.group_size).abs().amax(-1) > 0
    longest = max(len(_turns(one.order_GR.shape[-1])) for one in feedback)
    for turn in range(longest):
        rows, moved = [], []
        first = 0
        for one in feedback:
            groups, size = one.order_GR.shape
            turns = _turns(size)
            if turn < len(turns):
                start, stop = turns[turn]
                index_GR = first + torch.arange(groups, device=weight_NK.device)[:, None] * size + one.order_GR
                rows.append(index_GR[:, start:stop].flatten())
                reach_GAB = one.reach_GRR[:, :start, start:stop]
                moved.append(torch.bmm(reach_GAB.transpose(1, 2), error_NK[index_GR[:, :start]]).flatten(0, 1))
            first += one.rows
        row_M = torch.cat(rows)
        part = Grid(scale=grid.scale[row_M], zero=grid.zero[row_M], group_size=grid.group_size)
        aim_MK = weight_NK[row_M] + torch.cat(moved) * expand(live_NB[row_M], grid, weight_NK.shape[-1])
        codes_NK[row_M], part = round_rows(aim_MK, part)
        scale_NB[row_M] = part.scale
        error_NK[row_M] = weight_NK[row_M] - dequantize(codes_NK[row_M], part)
    return codes_NK, Grid(scale=scale_NB, zero=grid.zero, group_size=grid.group_size)


def _turns(rows: int) -> list[tuple[int, int]]:
    step = -(-rows // TURNS)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
