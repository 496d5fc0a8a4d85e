"""What a matrix's codes see of its inputs: rotated, and divided by fixed channel scales, where the runtime does that.

Dimensions: N out, K in, T tokens. Codes of a matrix W are codes of W R diag(a) where its inputs x come as (R x) / a:
the product is the same, and H of what is seen is diag(1/a) R H R diag(1/a) (EAMPQ, "Activations").
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from glm5_quant.quant.activation import channel_scales, fold_moments, fold_scales
from glm5_quant.quant.rotation import rotate, rotate_moments

SAMPLE_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Seen:
    """`rotated`: by the 64-point transform; `scale_K`: float32 divisors, None for none."""

    rotated: bool = False
    scale_K: Tensor | None = None

    def columns(self, part: slice) -> Seen:
        """The same of some neighbouring inputs, cut at borders of whole blocks."""
        return self if self.scale_K is None else replace(self, scale_K=self.scale_K[part])

    def weight(self, weight_NK: Tensor) -> Tensor:
        """Rows that multiply plain inputs, as rows that multiply what is seen of them."""
        turned_NK = rotate(weight_NK) if self.rotated else weight_NK
        return turned_NK if self.scale_K is None else fold_scales(turned_NK, self.scale_K)

    def inputs(self, x_TK: Tensor) -> Tensor:
        """What is seen of plain inputs, float32."""
        turned_TK = rotate(x_TK.float()) if self.rotated else x_TK.float()
        return turned_TK if self.scale_K is None else turned_TK / self.scale_K

    def plain(self, rows_NK: Tensor) -> Tensor:
        """The way back of `weight`."""
        unscaled_NK = rows_NK if self.scale_K is None else rows_NK / self.scale_K
        return rotate(unscaled_NK) if self.rotated else unscaled_NK

    def moments(self, hessian_KK: Tensor) -> Tensor:
        """Second moments of what is seen, from those of the plain inputs."""
        turned_KK = rotate_moments(hessian_KK) if self.rotated else hessian_KK
        return turned_KK if self.scale_K is None else fold_moments(turned_KK, self.scale_K)


@dataclass(kw_only=True)
class Sample:
    """Some of the inputs that a group of matrices sees, evenly spread over the tokens to come: what scales are of."""

    step: int
    seen: int = 0
    parts: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, tokens: int) -> Sample:
        return cls(step=max(1, tokens // SAMPLE_TOKENS))

    def add(self, x_TK: Tensor) -> None:
        self.parts.append(x_TK[-self.seen % self.step :: self.step].float().clone())
        self.seen += len(x_TK)

    def scales(self, k: int, *, rotated: bool) -> Tensor:
        """a float32 [K], of geometric mean 1, so that folded weights keep their size: the runtime's factor a token
        takes care of the rest. Ones where no token was seen."""
        rows = sum(len(part) for part in self.parts)
        if not rows:
            return torch.ones(k)
        sample_TK = torch.cat(self.parts)
        scale_K = channel_scales(rotate(sample_TK) if rotated else sample_TK)
        return scale_K / scale_K.log().mean().exp()
