"""What each part of the method is worth: a few rows of a few matrices solved again, with one part more each time.

Dimensions: N out, K in, R sampled rows of all matrices of a group.
It costs little because rows do not touch each other: 64 of a matrix tell what its other thousands would. Everything is
solved on the tokens that are fitted on, and judged on those kept out, against the source stream, as in the record of
the whole matrix. One thing is chosen on the tokens that judge it: the strength of the target correction, one number of
five. Folded rotation is in the weights before anything is solved, and compensation is fitted to a whole layer: neither
is a step here. Where only one stream is followed (`fast`), errors are those of the layer alone, on its own inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from glm5_quant.calibrate.evidence import Part
from glm5_quant.calibrate.seen import Seen
from glm5_quant.model.families import Linear
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.errors import quadratic_rows
from glm5_quant.quant.grid import dequantize, minmax_grid, quantize
from glm5_quant.quant.rotation import rotate, rotate_moments
from glm5_quant.quant.rounding import solve
from glm5_quant.quant.rows import RowFeedback
from glm5_quant.quant.shadow import find_columns, prefix_residual
from glm5_quant.quant.shrinkage import Noise, trusted

ROWS = 64
# At most this many layers are looked at, and one of ten.
MOST_LAYERS, ONE_OF = 3, 10
PLAIN = "round to nearest"
SHADOWS = "shadows"
ROWS_TOO = "feedback between rows"
PARTS = (
    PLAIN,
    "weighted grid",
    "error feedback",
    "shrinkage",
    ROWS_TOO,
    "target correction",
    "rotation",
    "descent and refit",
    SHADOWS,
)


def sampled_layers(layers: int) -> frozenset[int]:
    """Layers that are looked at, spread over the depth."""
    count = max(1, min(MOST_LAYERS, layers // ONE_OF))
    return frozenset((2 * i + 1) * layers // (2 * count) for i in range(count))


@dataclass(kw_only=True)
class Ablation:
    """One layer's. `errors` holds, by matrix and part, the relative held-out error once that part is put to those
    before it. `names` are the matrices that may have shadows."""

    config: QuantConfig
    scale_dtype: torch.dtype
    names: frozenset[str] = frozenset()
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    _expert: int | None = None

    def add(
        self,
        linears: Sequence[Linear],
        weights_NK: list[Tensor],
        targets_NK: list[Tensor],
        part: Part,
        feedback: Sequence[RowFeedback] = (),
    ) -> None:
        """Take a group of matrices apart, where tokens are held out. Of routed experts, the first that has some.

        `feedback`: that between their rows, by which errors are counted then.
        """
        if not part.held.tokens or not part.fit.tokens:
            return
        expert = linears[0].expert
        if expert is not None:
            self._expert = expert if self._expert is None else self._expert
            if expert != self._expert:
                return
        group = _Group.of(weights_NK, targets_NK, part, feedback)
        found = _Ladder(self.config, self.scale_dtype, part, group)
        for linear in linears:
            self.errors[linear.name] = {}
        for name, restored_RK in found.climb([linear.name in self.names for linear in linears]):
            for linear, error in zip(linears, group.errors(restored_RK), strict=True):
                if name != SHADOWS or linear.name in self.names:
                    self.errors[linear.name][name] = error


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Sampled rows of the matrices of a group, and what judges them."""

    weight_RK: Tensor
    target_RK: Tensor
    slices: list[slice]
    floors: list[float]
    sizes: list[float]
    part: Part
    feedback: list[RowFeedback]

    @classmethod
    def of(cls, weights_NK: list[Tensor], targets_NK: list[Tensor], part: Part, given: Sequence[RowFeedback]) -> _Group:
        some = [one.some(ROWS) for one in given]
        rows = [index for _, index in some] or [_spread(len(weight)) for weight in weights_NK]
        picked = [weight[index] for weight, index in zip(weights_NK, rows, strict=True)]
        ends = torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
        held_KK = part.held.hessian_KK
        slices, weight_RK = [slice(start, stop) for start, stop in pairwise(ends)], torch.cat(picked)
        feedback = [one for one, _ in some]
        rows_R = quadratic_rows(_counted(weight_RK, feedback, slices), held_KK)
        return cls(
            weight_RK=weight_RK,
            target_RK=torch.cat([target[index] for target, index in zip(targets_NK, rows, strict=True)]),
            slices=slices,
            floors=[part.floor_of(number, index) for number, index in enumerate(rows)],
            sizes=[float(rows_R[own].sum(dtype=torch.float64)) for own in slices],
            part=part,
            feedback=feedback,
        )

    def errors(self, restored_RK: Tensor) -> list[float]:
        """Relative error of each matrix on held-out tokens, against the source stream."""
        held = self.part.held
        error_RK, weight_RK = (
            _counted(one, self.feedback, self.slices) for one in (restored_RK - self.weight_RK, self.weight_RK)
        )
        rows_R = quadratic_rows(error_RK, held.hessian_KK).double()
        if held.gap_KK is not None:
            rows_R -= 2.0 * (error_RK * (weight_RK @ held.gap_KK)).sum(-1).double()
        totals = [float(rows_R[one].sum()) + floor for one, floor in zip(self.slices, self.floors, strict=True)]
        return [max(total, 0.0) / size if size > 0 else 0.0 for total, size in zip(totals, self.sizes, strict=True)]


def _counted(rows_RK: Tensor, feedback: Sequence[RowFeedback], slices: list[slice]) -> Tensor:
    """Rows as their errors are counted: by each matrix's feedback, or as they are where there is none."""
    if not feedback:
        return rows_RK
    return torch.cat([one.weigh(rows_RK[own]) for one, own in zip(feedback, slices, strict=True)])


@dataclass(frozen=True)
class _Ladder:
    config: QuantConfig
    scale_dtype: torch.dtype
    part: Part
    group: _Group

    def climb(self, shadowed: list[bool]) -> list[tuple[str, Tensor]]:
        """Each part that is switched on, in order, with the rows it leaves: float32 [R, K] for plain inputs."""
        config, weight_RK, target_RK = self.config, self.group.weight_RK, self.group.target_RK
        grid = minmax_grid(
            weight_RK, group_size=config.group_size, symmetric=config.symmetric, scale_dtype=self.scale_dtype
        )
        steps = [(PLAIN, dequantize(quantize(weight_RK, grid), grid))]
        now = replace(
            config,
            weighted_grid=False,
            error_feedback=False,
            shrink=False,
            probed_tokens=0,
            rotation="none",
            descent_sweeps=0,
        )
        aim_RK = weight_RK
        changes: dict[str, dict[str, Any]] = {
            "weighted grid": {"weighted_grid": config.weighted_grid},
            "error feedback": {"error_feedback": config.error_feedback},
            "shrinkage": {"shrink": config.shrink and config.error_feedback},
            ROWS_TOO: {"probed_tokens": config.probed_tokens if self.group.feedback else 0},
            "target correction": {},
            "rotation": {"rotation": "full" if config.rotation == "full" else "none"},
            "descent and refit": {"descent_sweeps": config.descent_sweeps},
        }
        for name, change in changes.items():
            if name == "target correction":
                if not config.alphas:
                    continue
                aim_RK = target_RK
            elif now == (changed := replace(now, **change)):
                continue
            else:
                now = changed
            steps.append((name, self._solved(aim_RK, now)))
        if config.shadow_budget and any(shadowed):
            steps.append((SHADOWS, self._shadowed(aim_RK, steps[-1][1], now, shadowed)))
        return steps

    def _moments(self, now: QuantConfig) -> Tensor:
        hessian_KK = self.part.fit.hessian_KK
        return rotate_moments(hessian_KK) if now.rotation == "full" else hessian_KK

    def _noise(self, now: QuantConfig, hessian_KK: Tensor) -> Noise | None:
        if not now.shrink:
            return None
        return Noise.of(hessian_KK, self.part.fit, Seen(rotated=now.rotation == "full").inputs(self.part.fit.sample_TK))

    def _solved(self, aim_RK: Tensor, now: QuantConfig) -> Tensor:
        seen_RK = rotate(aim_RK) if now.rotation == "full" else aim_RK
        hessian_KK, n_eff = self._moments(now), self.part.fit.n_eff
        noise = self._noise(now, hessian_KK)
        solved = solve(
            seen_RK,
            hessian_KK,
            now,
            scale_dtype=self.scale_dtype,
            n_eff=n_eff,
            noise=noise,
            feedback=self.group.feedback if now.probed_tokens else (),
            measure=False,
        )
        restored_RK = dequantize(solved.codes, solved.grid)
        return rotate(restored_RK) if now.rotation == "full" else restored_RK

    def _shadowed(self, aim_RK: Tensor, restored_RK: Tensor, now: QuantConfig, shadowed: list[bool]) -> Tensor:
        """With each matrix's even share of the byte budget spent on its own columns."""
        hessian_KK = self._moments(now)
        if now.shrink:
            noise = self._noise(now, hessian_KK)
            hessian_KK = trusted(hessian_KK, self.part.fit.n_eff, now.shrink_trust, noise)
        left_RK = aim_RK - restored_RK
        left_RK = rotate(left_RK) if now.rotation == "full" else left_RK
        added_RK = torch.zeros_like(left_RK)
        count = max(1, round(self.config.shadow_budget * left_RK.shape[1]))
        for rows, wanted in zip(self.group.slices, shadowed, strict=True):
            found = find_columns(left_RK[rows], hessian_KK, count, now.damp) if wanted else None
            if found is not None and len(found.channels):
                added_RK[rows, found.channels] = prefix_residual(found.reach, found.within)
        return restored_RK + (rotate(added_RK) if now.rotation == "full" else added_RK)


@dataclass(frozen=True, kw_only=True)
class PartWorth:
    """What one part was worth, put to those before it, for the `matrices` that have it. `of_rtn` is the mean over them
    of their held-out errors as shares of round-to-nearest's, with the parts so far; `gain` the mean of what this part
    took off that share, and `gain_error` that mean's standard error over the matrices."""

    part: str
    matrices: int
    of_rtn: float
    gain: float
    gain_error: float


def worths(errors: Iterable[Mapping[str, float]]) -> list[PartWorth]:
    """The table of an ablation, from each matrix's errors by part."""
    matrices = [one for one in errors if one.get(PLAIN, 0.0) > 0]
    found = []
    for number, part in enumerate(PARTS):
        shares, gains = [], []
        for one in matrices:
            if part in one:
                so_far = [one[name] / one[PLAIN] for name in PARTS[: number + 1] if name in one]
                shares.append(so_far[-1])
                gains.append(so_far[-2] - so_far[-1] if len(so_far) > 1 else 0.0)
        if gains:
            count, gain = len(gains), sum(gains) / len(gains)
            spread = sqrt(sum((g - gain) ** 2 for g in gains) / (count - 1) / count) if count > 1 else 0.0
            worth = PartWorth(part=part, matrices=count, of_rtn=sum(shares) / len(shares), gain=gain, gain_error=spread)
            found.append(worth)
    return found


def _spread(n: int) -> Tensor:
    """Up to ROWS row numbers, evenly spread."""
    return torch.arange(min(n, ROWS)) * n // min(n, ROWS)
