"""From evidence to codes: solve a group of linears that read the same input, and record what came of it.

Dimensions: N out, K in, B blocks, T tokens. Rows of all linears of a group are stacked, since rows do not touch each
other: one factorisation of H serves q, k and v, or gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from glm5_quant.calibrate.ablation import Ablation
from glm5_quant.calibrate.evidence import Evidence, Part
from glm5_quant.calibrate.seen import Seen
from glm5_quant.calibrate.shadows import Facts, ShadowFinder, Solution
from glm5_quant.calibrate.spill import Spill
from glm5_quant.model.families import Linear
from glm5_quant.model.journal import SIDECAR_PREFIX, ModuleRecord
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.eight import round_eight
from glm5_quant.quant.errors import quadratic_rows
from glm5_quant.quant.grid import Grid, dequantize, minmax_grid, quantize
from glm5_quant.quant.packing import pack_bytes, pack_codes, pack_zeros
from glm5_quant.quant.rounding import Solved, solve
from glm5_quant.quant.rows import RowFeedback
from glm5_quant.quant.shrinkage import Noise
from glm5_quant.quant.statistics import Moments
from glm5_quant.quant.target import choose_alpha, few, ridge, target_direction

ROWS = 1024
Weigh = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class LayerResult(Spill):
    """What one layer gathers on its way to the journal: packed tensors by full name, and a record a linear."""

    modules: dict[str, ModuleRecord] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The weight the rounding aims at, and the strength of its correction toward the source stream.

    `shift_NK` is the part of the correction that makes up for what the residual stream lacks: no error of the matrix.
    """

    weight_NK: Tensor
    alpha: float = 0.0
    shift_NK: Tensor | None = None

    @property
    def own_NK(self) -> Tensor:
        """The target without that part."""
        return self.weight_NK if self.shift_NK is None else self.weight_NK - self.shift_NK


def solve_group(
    linears: Sequence[Linear],
    weights_NK: Sequence[Tensor],
    evidence: Evidence,
    config: QuantConfig,
    scale_dtype: torch.dtype,
    result: LayerResult,
    shadows: ShadowFinder | None = None,
    dtype: torch.dtype = torch.float32,
    ablation: Ablation | None = None,
    eight: Collection[str] = (),
    feedback: Sequence[RowFeedback] = (),
) -> list[Tensor]:
    """Solve linears that share `evidence`; returns their dequantized weights, [N, K] in `dtype` each.

    `feedback` is that between the rows of each linear, or () where all outputs count alike: errors are counted by it.

    With no token seen at all, and none to lean on, the weights are rounded to nearest on their own unweighted grid and
    the record says so.
    `shadows` is offered what was solved; `ablation` measures what each part of it was worth.
    Those that `eight` names are rounded to nearest in 8 bits, and take their inputs as they are.
    """
    evidence.require_finite(linears[0].name, dtype)
    in_eight = linears[0].name in eight
    if in_eight:
        config, ablation = replace(config, rotation="none", activations="none"), None
    seen = _seen(evidence, weights_NK[0].shape[1], config)
    solved = [
        _solve_part(
            [weight[:, part.columns].float() for weight in weights_NK],
            part,
            config,
            seen.columns(part.columns),
            scale_dtype,
            None if shadows is None else partial(shadows.add, linears, part.columns.start),
            None
            if ablation is None or part is not evidence.parts[0]
            else partial(ablation.add, linears, feedback=feedback),
            in_eight=in_eight,
            feedback=() if in_eight else feedback,
        )
        for part in evidence.parts
    ]
    out, row = [], 0
    for number, (linear, weight) in enumerate(zip(linears, weights_NK, strict=True)):
        rows = slice(row, row + weight.shape[0])
        row = rows.stop
        codes = torch.cat([part.codes[rows] for part in solved], dim=1)
        grid = Grid(
            scale=torch.cat([part.grid.scale[rows] for part in solved], dim=1),
            zero=torch.cat([part.grid.zero[rows] for part in solved], dim=1),
            group_size=config.group_size,
        )
        result.tensors |= packed_tensors(
            linear.name, codes, grid, scale_dtype, symmetric=config.symmetric, in_eight=in_eight
        )
        if seen.scale_K is not None:
            result.tensors[f"{SIDECAR_PREFIX}{linear.name}.activation_scale"] = seen.scale_K.clone()
        judged = [part.judged[number] for part in solved]
        record = _record(linear, weight, judged, evidence, config.group_size)
        result.modules[linear.name] = record.model_copy(update={"bits": 8}) if in_eight else record
        out.append(_runtime_weight(codes, grid, seen, dtype))
    return out


def _seen(evidence: Evidence, k: int, config: QuantConfig) -> Seen:
    """What codes see of the inputs. Channel scales are those of the tokens that are fitted on."""
    rotated, device = config.rotation == "full", evidence.parts[0].fit.sum_KK.device
    if config.activations != "int4-channel" or evidence.sample is None:
        return Seen(rotated=rotated)
    return Seen(rotated=rotated, scale_K=evidence.sample.scales(k, rotated=rotated).to(device))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Squared errors of one matrix over one part of its inputs, all under the same moments."""

    size: float
    wrong: float
    wrong_rtn: float
    held_size: float
    held_wrong: float
    held_rtn: float
    held_floor: float
    alpha: float


@dataclass(frozen=True, kw_only=True)
class SolvedPart:
    """Codes and grid of the stacked rows over one part of the inputs, and what each matrix's error is there."""

    codes: Tensor
    grid: Grid
    judged: list[Judged]


def _solve_part(
    weights_NK: list[Tensor],
    part: Part,
    config: QuantConfig,
    seen: Seen,
    scale_dtype: torch.dtype,
    offer: Callable[[Solution, list[Facts]], None] | None,
    take_apart: Callable[[list[Tensor], list[Tensor], Part], None] | None = None,
    *,
    in_eight: bool = False,
    feedback: Sequence[RowFeedback] = (),
) -> SolvedPart:
    lacks = part.lacks()
    weighs: list[Weigh] = [one.weigh for one in feedback] or [_as_it_is] * len(weights_NK)
    targets = [
        _target(weight, part.fit, part.held, config, *lacks, weigh)
        for weight, weigh in zip(weights_NK, weighs, strict=True)
    ]
    if take_apart is not None:
        take_apart(weights_NK, [target.own_NK for target in targets], part)
    held, total = part.held, part.total()
    stacked, hessian = seen.weight(torch.cat([target.weight_NK for target in targets])), seen.moments(total.hessian_KK)
    noise = Noise.of(hessian, total, seen.inputs(total.sample_TK)) if config.shrink and not in_eight else None
    if in_eight:
        solved = Solved(*round_eight(stacked, group_size=config.group_size, scale_dtype=scale_dtype), error=None)
    else:
        solved = solve(
            stacked,
            hessian,
            config,
            scale_dtype=scale_dtype,
            n_eff=total.n_eff,
            noise=noise,
            feedback=feedback,
            measure=False,
        )
    judge = _Judge(total, held, config, scale_dtype)
    judged, row = [], 0
    for number, (weight, target) in enumerate(zip(weights_NK, targets, strict=True)):
        rows = slice(row, row + weight.shape[0])
        row = rows.stop
        grid = Grid(scale=solved.grid.scale[rows], zero=solved.grid.zero[rows], group_size=config.group_size)
        error = _effective(solved.codes[rows], grid, seen).sub_(weight)
        if target.shift_NK is not None:
            error -= target.shift_NK
        judged.append(judge(weight, error, target.alpha, part.floor_of(number), weighs[number]))
    if offer is not None:
        restored = dequantize(solved.codes, solved.grid)
        facts = [Facts(size=j.size, wrong=j.wrong, held_size=j.held_size) for j in judged]
        offer(
            Solution(
                weights_NK=weights_NK,
                target_NK=stacked,
                restored_NK=restored,
                hessian_KK=hessian,
                total=total,
                held=held,
                held_lack_NK=lacks[1],
                noise=noise,
                seen=seen,
            ),
            facts,
        )
    # An o_proj of GLM-5 has four parts, of 64 MB for each of these.
    part.forget()
    return SolvedPart(codes=solved.codes, grid=solved.grid, judged=judged)


def _effective(codes_NK: Tensor, grid: Grid, seen: Seen) -> Tensor:
    """The weight the runtime multiplies plain inputs with: dequantized, and what codes see taken back."""
    return seen.plain(dequantize(codes_NK, grid))


def _runtime_weight(codes_NK: Tensor, grid: Grid, seen: Seen, dtype: torch.dtype) -> Tensor:
    """`_effective` in another dtype, some rows at a time: in float32 an o_proj of GLM-5 takes 400 MB."""
    out_NK = torch.empty(codes_NK.shape, dtype=dtype, device=codes_NK.device)
    for start in range(0, len(codes_NK), ROWS):
        rows = slice(start, start + ROWS)
        part = Grid(scale=grid.scale[rows], zero=grid.zero[rows], group_size=grid.group_size)
        out_NK[rows] = _effective(codes_NK[rows], part, seen)
    return out_NK


def packed_tensors(
    name: str, codes_NK: Tensor, grid: Grid, scale_dtype: torch.dtype, *, symmetric: bool, in_eight: bool = False
) -> dict[str, Tensor]:
    """The tensors of one linear as the export stores them (compressed-tensors `pack-quantized`)."""
    tensors = {
        f"{name}.weight_packed": pack_bytes(codes_NK) if in_eight else pack_codes(codes_NK),
        f"{name}.weight_scale": grid.scale.to(scale_dtype).contiguous(),
        f"{name}.weight_shape": torch.tensor(codes_NK.shape, dtype=torch.int64),
    }
    if not symmetric and not in_eight:
        tensors[f"{name}.weight_zero_point"] = pack_zeros(grid.zero)
    return tensors


def _target(
    weight_NK: Tensor,
    fit: Moments,
    held: Moments,
    config: QuantConfig,
    fit_lack_NK: Tensor | None,
    held_lack_NK: Tensor | None,
    weigh: Weigh,
) -> Target:
    """The damped target, its strength judged on held-out tokens; the weight itself where that cannot be judged.

    The lacks are those of `Part.lacks`; `weigh` makes of rows what their errors are counted in.
    """
    thin = few(fit.n_eff, weight_NK.shape[1])
    if not config.alphas or thin or fit.gap_KK is None or held.gap_KK is None or not held.tokens:
        return Target(weight_NK=weight_NK)
    direction = target_direction(weight_NK, fit.hessian_KK, fit.gap_KK, config.target_delta, fit_lack_NK)
    counted = (weigh(weight_NK), weigh(direction))
    alpha = choose_alpha(*counted, held.hessian_KK, held.gap_KK, config.alphas, fit.n_eff, held_lack_NK)
    shift = None if fit_lack_NK is None else ridge(fit_lack_NK, fit.hessian_KK, config.target_delta).mul_(alpha)
    return Target(weight_NK=direction.mul_(alpha).add_(weight_NK), alpha=alpha, shift_NK=shift)


def _as_it_is(rows_NK: Tensor) -> Tensor:
    return rows_NK


class _Judge:
    """Errors of solved matrices and of plain round-to-nearest, and the held-out error against the source stream.

    Moments are compared in the dtype their products are taken in (`Moments.product_dtype`): at GLM-5's size this takes
    as long as solving otherwise.
    """

    def __init__(self, total: Moments, held: Moments, config: QuantConfig, scale_dtype: torch.dtype) -> None:
        k, device = len(total.sum_KK), total.sum_KK.device
        self.config, self.scale_dtype = config, scale_dtype
        total_KK = total.hessian_KK if total.weight_sum > 0 else torch.eye(k, device=device)
        self.total_KK = total_KK.to(total.product_dtype)
        self.held_KK = held.hessian_KK.to(held.product_dtype) if held.tokens else None
        gap_KK = held.gap_KK if held.tokens else None
        self.gap_KK = None if gap_KK is None else gap_KK.to(held.product_dtype)

    def __call__(self, weight_NK: Tensor, error_NK: Tensor, alpha: float, floor: float, weigh: Weigh) -> Judged:
        """`floor`: what the streams' own distance adds to every held-out error, |W (x - x~)|^2."""
        rounded_NK = weigh(self._rounded(weight_NK).sub_(weight_NK))
        weight_NK, error_NK = weigh(weight_NK), weigh(error_NK)
        held_size, held_wrong, held_rtn = 0.0, floor, floor
        if self.held_KK is not None:
            held_size = _size(weight_NK, self.held_KK)
            held_wrong += _size(error_NK, self.held_KK)
            held_rtn += _size(rounded_NK, self.held_KK)
        if self.gap_KK is not None:
            moved_NK = (weight_NK.to(self.gap_KK.dtype) @ self.gap_KK).float()
            held_wrong -= 2 * float((error_NK * moved_NK).sum(dtype=torch.float64))
            held_rtn -= 2 * float((rounded_NK * moved_NK).sum(dtype=torch.float64))
        return Judged(
            size=_size(weight_NK, self.total_KK),
            wrong=_size(error_NK, self.total_KK),
            wrong_rtn=_size(rounded_NK, self.total_KK),
            held_size=held_size,
            held_wrong=max(held_wrong, 0.0),
            held_rtn=max(held_rtn, 0.0),
            held_floor=floor,
            alpha=alpha,
        )

    def _rounded(self, weight_NK: Tensor) -> Tensor:
        """Round to nearest, some rows at a time: what it takes on the way is several times the matrix."""
        group_size, symmetric = self.config.group_size, self.config.symmetric
        out_NK = torch.empty_like(weight_NK)
        for start in range(0, len(weight_NK), ROWS):
            part_NK = weight_NK[start : start + ROWS]
            grid = minmax_grid(part_NK, group_size=group_size, symmetric=symmetric, scale_dtype=self.scale_dtype)
            out_NK[start : start + ROWS] = dequantize(quantize(part_NK, grid), grid)
        return out_NK


def _size(matrix_NK: Tensor, hessian_KK: Tensor) -> float:
    """tr(M H M^T), at least 0."""
    return max(float(quadratic_rows(matrix_NK, hessian_KK).sum(dtype=torch.float64)), 0.0)


def _record(
    linear: Linear, weight_NK: Tensor, judged: list[Judged], evidence: Evidence, group_size: int
) -> ModuleRecord:
    """The parts' errors added up."""
    size, held_size = sum(j.size for j in judged), sum(j.held_size for j in judged)
    first = evidence.parts[0].fit
    return ModuleRecord(
        role=linear.role,
        n=linear.n,
        k=linear.k,
        tokens=first.tokens,
        effective_tokens=round(first.n_eff, 2),
        error=sum(j.wrong for j in judged) / size if size else 0.0,
        error_rtn=sum(j.wrong_rtn for j in judged) / size if size else 0.0,
        held_out_error=sum(j.held_wrong for j in judged) / held_size if held_size else None,
        held_out_rtn=sum(j.held_rtn for j in judged) / held_size if held_size else None,
        held_out_floor=sum(j.held_floor for j in judged) / held_size if held_size else 0.0,
        alpha=max(j.alpha for j in judged),
        zero_blocks=zero_blocks(weight_NK, group_size),
        fallback=None if first.weight_sum > 0 else "no calibration token: rounded to nearest on its own grid",
    )


def zero_blocks(weight_NK: Tensor, group_size: int) -> int:
    """Blocks of a matrix that hold nothing but zeros."""
    n, k = weight_NK.shape
    padded = torch.nn.functional.pad(weight_NK, (0, -k % group_size))
    return int((padded.view(n, -1, group_size) == 0).all(-1).sum())
