"""What calibration saw of one group of matrices that share an input: moments to solve with, and some kept out.

Dimensions: T tokens, K input channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.calibrate.seen import Sample
from glm5_quant.quant.statistics import Moments

# Beyond this many input channels H is kept block-diagonal: GLM-5's o_proj reads 16,384, and one full H of that size,
# factored, takes more memory than the rest of the run. Errors then feed back within a block only.
LARGEST_HESSIAN = 8192
HESSIAN_BLOCK = 4096
# Statistics of more tokens than this for each input channel change nothing that could be measured: every second token
# (or third, ...) is then taken.
ENOUGH_PER_CHANNEL = 50


@dataclass
class Part:
    """Moments of some neighbouring input channels: of the tokens to fit on, and of the held-out ones."""

    columns: slice
    fit: Moments
    held: Moments

    def total(self) -> Moments:
        """Both together. The fit part is used up: its sums are added to in place, since H of GLM-5 is 151 MB."""
        self.fit.merge(self.held)
        return self.fit


@dataclass
class Evidence:
    """Moments of a group's inputs, in one part or in blocks of channels where there are very many.

    Tokens whose index among all calibration tokens is `held_from` or more are held out of the fit.
    """

    parts: list[Part]
    held_from: int
    stride: int = 1
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
    ) -> Evidence:
        """Moments of nothing. `gap` follows the source stream beside the quantized one; `tokens` are to come; of those
        that are fitted on, some are kept where `sampled`."""
        stride = max(1, tokens // (ENOUGH_PER_CHANNEL * k))
        step = k if k <= LARGEST_HESSIAN else HESSIAN_BLOCK
        return cls(
            [
                Part(
                    slice(start, min(start + step, k)),
                    Moments.empty(min(step, k - start), gap=gap, device=device, product_dtype=product_dtype),
                    Moments.empty(min(step, k - start), gap=gap, device=device, product_dtype=product_dtype),
                )
                for start in range(0, k, step)
            ],
            held_from,
            stride,
            sample=Sample.of(tokens // stride) if sampled else None,
        )

    @property
    def tokens(self) -> int:
        return self.parts[0].fit.tokens + self.parts[0].held.tokens

    def add(self, x_TK: Tensor, source_TK: Tensor | None, index: Tensor | int, weight_T: Tensor | None = None) -> None:
        """Add T tokens. `index`: their first index, when they follow one another, or ascending indices [T].

        The source stream may follow the last R of them only: source_TK [R, K].
        """
        if self.stride > 1:
            x_TK, source_TK, index, weight_T = self._thinned(x_TK, source_TK, index, weight_T)
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
                source = None
                if moments.gap_sum_KK is not None and source_TK is not None:
                    followed = slice(max(rows.start - first_source, 0), max(rows.stop - first_source, 0))
                    source = source_TK[followed, part.columns]
                moments.add(
                    x_TK[rows, part.columns],
                    None if weight_T is None else weight_T[rows],
                    source,
                )

    def _thinned(
        self, x_TK: Tensor, source_TK: Tensor | None, index: Tensor | int, weight_T: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Every `stride`-th token; what the source stream holds of those."""
        count, step = len(x_TK), self.stride
        index_T = torch.arange(index, index + count, device=x_TK.device) if isinstance(index, int) else index
        if source_TK is not None:
            source_TK = source_TK[(len(source_TK) - count) % step :: step]
        return x_TK[::step], source_TK, index_T[::step], None if weight_T is None else weight_T[::step]
