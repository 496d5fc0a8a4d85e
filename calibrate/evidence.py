"""What calibration saw of one group of matrices that share an input: moments to solve with, and some kept out.

Dimensions: T tokens, K input channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5_quant.calibrate.seen import Sample
from glm5_quant.model.errors import UserError
from glm5_quant.quant.statistics import Moments, accumulate_cross, untouched_zeros

# Beyond this many input channels H is kept block-diagonal: GLM-5's o_proj reads 16,384, and one full H of that size,
# factored, takes more memory than the rest of the run. Errors then feed back within a block only.
LARGEST_HESSIAN = 8192
HESSIAN_BLOCK = 4096
# Beyond so many tokens for each channel (QuantConfig.channel_tokens) every second (or third, ...) is taken. But so many
# values always are: with few channels they cost nothing beside the forward pass, and the inputs of an expert's
# down-projection are heavy-tailed (128 channels: 5,120 tokens leave 5% more error than 38,000).
FEWEST_VALUES = 1 << 23
# Outputs are formed for so many held-out tokens at a time.
FLOOR_TOKENS = 1024


@dataclass
class Part:
    """Moments of some neighbouring input channels: of the tokens to fit on, and of the held-out ones.

    `fit_lack_NK` and `held_lack_NK` sum w r x~^T, where r is what the quantized stream lacks of the source's (see
    quant/target.py); None where the group does not write to the stream.
    `floor` sums w (W (x - x~))^2 over the held-out tokens, float64 [N] for each matrix of the group: the part of
    the error against the source stream that no choice for W^ changes.
    """

    columns: slice
    fit: Moments
    held: Moments
    fit_lack_NK: Tensor | None = None
    held_lack_NK: Tensor | None = None
    floor: list[Tensor] = field(default_factory=list)

    def lacks(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean r x~^T of the tokens to fit on and of the held-out ones, float32 [N, K]."""
        tiny = torch.finfo(torch.float32).tiny
        fit, held = (max(moments.gap_weight_sum, tiny) for moments in (self.fit, self.held))
        if self.fit_lack_NK is None or self.held_lack_NK is None:
            return None, None
        return self.fit_lack_NK / fit, self.held_lack_NK / held

    def total(self) -> Moments:
        """Both together. The fit part is used up: its sums are added to in place, since H of GLM-5 is 151 MB."""
        self.fit.merge(self.held)
        return self.fit

    def floor_of(self, number: int, rows: Tensor | slice = slice(None)) -> float:
        """Mean over the held-out tokens of |W (x - x~)|^2 for one matrix of the group, or for some of its rows."""
        if self.held.gap_weight_sum <= 0:
            return 0.0
        return float(self.floor[number][rows].sum()) / self.held.gap_weight_sum

    def forget(self) -> None:
        """Drop what the moments can make again from their sums."""
        self.fit.forget()
        self.held.forget()


@dataclass
class Evidence:
    """Moments of a group's inputs, in one part or in blocks of channels where there are very many.

    Tokens whose index among all calibration tokens is `held_from` or more are held out of the fit.
    """

    parts: list[Part]
    held_from: int
    stride: int = 1
    passed: int = 0
    weights_NK: Sequence[Tensor] = ()
    sample: Sample | None = None

    @classmethod
    def empty(
        cls,
        k: int,
        *,
        tokens: int,
        held_from: int,
        gap: bool,
        device: str,
        product_dtype: torch.dtype = torch.float32,
        sampled: bool = False,
        writes: int = 0,
        channel_tokens: int = 40,
    ) -> Evidence:
        """Moments of nothing. `gap` follows the source stream beside the quantized one; `tokens` are to come; of those
        that are fitted on, some are kept where `sampled`. `writes`: channels of the residual stream that the group
        writes to, if it is to make up for what the stream lacks there; only where H is in one part.
        `channel_tokens`: see QuantConfig."""
        stride = max(1, tokens // max(channel_tokens * k, FEWEST_VALUES // k))
        step = k if k <= LARGEST_HESSIAN else HESSIAN_BLOCK
        lacking = writes if gap and step == k else 0
        return cls(
            [
                Part(
                    slice(start, min(start + step, k)),
                    Moments.empty(min(step, k - start), gap=gap, device=device, product_dtype=product_dtype),
                    Moments.empty(min(step, k - start), gap=gap, device=device, product_dtype=product_dtype),
                    untouched_zeros(lacking, k, device=device) if lacking else None,
                    untouched_zeros(lacking, k, device=device) if lacking else None,
                )
                for start in range(0, k, step)
            ],
            held_from,
            stride,
            sample=Sample.of(tokens // stride) if sampled else None,
        )

    def of(self, weights_NK: Sequence[Tensor]) -> Evidence:
        """This evidence, for matrices of these source weights [N, K]: what their `Part.floor` is taken of."""
        self.weights_NK = weights_NK
        for part in self.parts:
            part.floor = [torch.zeros(len(weight), dtype=torch.float64) for weight in weights_NK]
        return self

    @property
    def wants_lack(self) -> bool:
        """Whether `add` is to be told what the stream lacks."""
        return self.parts[0].fit_lack_NK is not None

    @property
    def tokens(self) -> int:
        return self.parts[0].fit.tokens + self.parts[0].held.tokens

    def require_finite(self, name: str, dtype: torch.dtype) -> None:
        """Raise UserError where inputs of the matrix `name` held NaN or infinite values, in layers run in `dtype`."""
        for part in self.parts:
            for moments in (part.fit, part.held):
                for sum_KK in (moments.sum_KK, moments.gap_sum_KK):
                    # There each input is multiplied by itself, or by how far it is off.
                    if sum_KK is not None and not bool(torch.isfinite(sum_KK.diagonal()).all()):
                        raise overflown("inputs hold NaN or infinite values", name, dtype)

    def lean_on(self, pool: Evidence, kappa: float) -> None:
        """Move the moments to fit on toward the layer's by so many tokens' worth (EAMPQ step 2).

        Scales of inputs are those of its own tokens, if there are any."""
        if self.sample is not None and not self.sample.parts:
            self.sample = pool.sample
        for part, other in zip(self.parts, pool.parts, strict=True):
            part.fit.lean_on(other.fit, kappa)

    def add(
        self,
        x_TK: Tensor,
        source_TK: Tensor | None,
        index: Tensor | int,
        weight_T: Tensor | None = None,
        lack_TN: Tensor | None = None,
    ) -> None:
        """Add T tokens. `index`: their first index, when they follow one another, or ascending indices [T].

        The source stream may follow the last R of them only: source_TK [R, K], and lack_TN [R, N] with it.
        """
        if self.stride > 1:
            lack_TN = self._followed(lack_TN, len(x_TK))
            came = len(x_TK)
            x_TK, source_TK, index, weight_T = self._thinned(x_TK, source_TK, index, weight_T)
            self.passed += came
        count = x_TK.shape[0]
        first_source = count - (0 if source_TK is None else len(source_TK))
        if isinstance(index, int):
            cut = min(max(self.held_from - index, 0), count)
        else:
            cut = int(torch.searchsorted(index.contiguous(), self.held_from))
        if self.sample is not None:
            self.sample.add(x_TK[:cut])
        for part in self.parts:
            for moments, rows in ((part.fit, slice(0, cut)), (part.held, slice(cut, count))):
                if rows.stop == rows.start:
                    continue
                source, lack = None, None
                if moments.gap_sum_KK is not None and source_TK is not None:
                    followed = slice(max(rows.start - first_source, 0), max(rows.stop - first_source, 0))
                    source = source_TK[followed, part.columns]
                    lack = None if lack_TN is None else lack_TN[followed]
                x, weight = x_TK[rows, part.columns], None if weight_T is None else weight_T[rows]
                moments.add(x, weight, source)
                sum_NK = part.held_lack_NK if moments is part.held else part.fit_lack_NK
                if lack is not None and sum_NK is not None:
                    last = slice(len(x) - len(lack), None)
                    accumulate_cross(sum_NK, lack, x[last], _rows(weight, last), moments.product_dtype)
                if moments is part.held and source is not None:
                    self._add_floor(part, x, source, weight)

    def _add_floor(self, part: Part, x_TK: Tensor, source_TK: Tensor, weight_T: Tensor | None) -> None:
        first, dtype = len(x_TK) - len(source_TK), part.held.product_dtype
        weights = [weight_NK[:, part.columns].to(dtype) for weight_NK in self.weights_NK]
        for start in range(0, len(source_TK), FLOOR_TOKENS):
            tokens = slice(start, min(start + FLOOR_TOKENS, len(source_TK)))
            seen = slice(first + tokens.start, first + tokens.stop)
            apart_TK = (source_TK[tokens].float() - x_TK[seen].float()).to(dtype)
            for sums_N, weight_NK in zip(part.floor, weights, strict=True):
                moved_TN = (apart_TK @ weight_NK.T).float().square_()
                added_N = moved_TN.sum(0) if weight_T is None else weight_T[seen].float() @ moved_TN
                sums_N += added_N.double().cpu()

    def _thinned(
        self, x_TK: Tensor, source_TK: Tensor | None, index: Tensor | int, weight_T: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Every `stride`-th token of all, however they are cut; what the source stream holds of those."""
        count, kept = len(x_TK), slice(-self.passed % self.stride, None, self.stride)
        index_T = torch.arange(index, index + count, device=x_TK.device) if isinstance(index, int) else index
        return x_TK[kept], self._followed(source_TK, count), index_T[kept], _rows(weight_T, kept)

    def _followed(self, of_TK: Tensor | None, count: int) -> Tensor | None:
        """Of what belongs to the last tokens of `count`, the rows that thinning keeps."""
        return None if of_TK is None else of_TK[(len(of_TK) - count - self.passed) % self.stride :: self.stride]


def overflown(problem: str, item: str, dtype: torch.dtype) -> UserError:
    """The error for values that are not finite in layers run in `dtype`."""
    half = dtype == torch.float16
    hint = "On --device cpu layers of float16 models run in float32" if half else "The model itself overflows there"
    return UserError(problem, item=item, expected=f"finite numbers in {str(dtype).removeprefix('torch.')}", hint=hint)


def _rows(weight_T: Tensor | None, rows: slice) -> Tensor | None:
    return None if weight_T is None else weight_T[rows]
