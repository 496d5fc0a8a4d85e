"""Second moments of a layer's inputs, and what to do when there are few tokens behind them (EAMPQ steps 1 and 2).

Dimensions: T tokens, K input channels.
H = sum_t w_t x~_t x~_t^T / sum_t w_t over the quantized stream x~; G = sum_t w_t (x_t - x~_t) x~_t^T / sum_t w_t with
the source stream x (EAMPQ's C - H). Sums are kept in float32; how the caller batches tokens changes the order in which
they are added and rounded, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

CHUNK_TOKENS = 1024
# For products in a low precision, whose results are rounded to it.
LOW_CHUNK_TOKENS = 4096
# Elementwise work goes by so many tokens.
SLICE_TOKENS = 256
# So many tokens are kept as they are, the first ones: how far off a mean is takes their fourth moments (shrinkage.py).
SAMPLE_TOKENS = 1024
# Only tiles on and above the diagonal are computed; 192 is wide enough for full matmul speed.
TILE = 192


def accumulate(
    hessian_KK: Tensor,
    x_TK: Tensor,
    weight_T: Tensor | None = None,
    product_dtype: torch.dtype = torch.float32,
) -> None:
    """hessian += sum_t w_t x_t x_t^T, in place, **tiles on and above the diagonal only** (see `symmetric`).

    hessian_KK float32; x_TK any floating dtype; weight_T [T] at least 0, or None for ones. The product of a chunk is
    taken in `product_dtype`: bfloat16 rounds each chunk's sums by 0.2%, without bias, where 4,096 tokens know them to
    1.6% at best, and takes less than half the time.
    """
    k = hessian_KK.shape[-1]
    size = CHUNK_TOKENS if product_dtype == torch.float32 else LOW_CHUNK_TOKENS
    for start in range(0, x_TK.shape[0], size):
        x = x_TK[start : start + size]
        left = _rounded(x, None, None if weight_T is None else weight_T[start : start + size], product_dtype)
        x = x.to(product_dtype)
        for tile in range(0, k, TILE):
            _add_product(hessian_KK[tile : tile + TILE, tile:], left[:, tile : tile + TILE].T, x[:, tile:])


def accumulate_gap(
    gap_KK: Tensor,
    source_TK: Tensor,
    x_TK: Tensor,
    weight_T: Tensor | None = None,
    product_dtype: torch.dtype = torch.float32,
) -> None:
    """gap += sum_t w_t (source_t - x_t) x_t^T, in place, float32; the product of a chunk is taken in `product_dtype`.

    The difference is formed before it is rounded, so bfloat16 costs 0.4% of the *gap*, not of the moments themselves.
    """
    for start in range(0, x_TK.shape[0], LOW_CHUNK_TOKENS):
        part = slice(start, start + LOW_CHUNK_TOKENS)
        weight = None if weight_T is None else weight_T[part]
        left_TK = _rounded(source_TK[part], x_TK[part], weight, product_dtype)
        _add_product(gap_KK, left_TK.T, x_TK[part].to(product_dtype))


def accumulate_cross(
    sum_NK: Tensor,
    left_TN: Tensor,
    x_TK: Tensor,
    weight_T: Tensor | None = None,
    product_dtype: torch.dtype = torch.float32,
) -> None:
    """sum += sum_t w_t left_t x_t^T, in place, float32; the product of a chunk is taken in `product_dtype`."""
    for start in range(0, x_TK.shape[0], LOW_CHUNK_TOKENS):
        part = slice(start, start + LOW_CHUNK_TOKENS)
        left = _rounded(left_TN[part], None, None if weight_T is None else weight_T[part], product_dtype)
        _add_product(sum_NK, left.T, x_TK[part].to(product_dtype))


def _rounded(x_TK: Tensor, minus_TK: Tensor | None, weight_T: Tensor | None, dtype: torch.dtype) -> Tensor:
    """weight (x - minus) in float32, rounded once to `dtype`; a few tokens at a time, so that it stays in the cache."""
    if minus_TK is None and weight_T is None:
        return x_TK.to(dtype)
    out_TK = torch.empty(x_TK.shape, dtype=dtype, device=x_TK.device)
    for start in range(0, len(x_TK), SLICE_TOKENS):
        part = slice(start, start + SLICE_TOKENS)
        wide_TK = x_TK[part].float() if minus_TK is None else x_TK[part].float() - minus_TK[part].float()
        out_TK[part] = wide_TK if weight_T is None else wide_TK * weight_T[part, None].float()
    return out_TK


def _add_product(sum_NK: Tensor, left_NT: Tensor, right_TK: Tensor) -> None:
    """sum += left right, in place, float32; the product is taken in the dtype of its factors."""
    if left_NT.dtype == torch.float32:
        sum_NK.addmm_(left_NT, right_TK)
    else:
        sum_NK += left_NT @ right_TK


def untouched_zeros(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 zeros that take no memory before they are written to: H of GLM-5 is 151 MB, and often nothing is held out
    of it."""
    return torch.from_numpy(np.zeros(shape, np.float32)).to(device)


def symmetric(upper_KK: Tensor) -> Tensor:
    """The whole matrix of sums filled by `accumulate`: the lower triangle mirrors the upper one exactly."""
    upper = torch.triu(upper_KK)
    return upper + torch.triu(upper_KK, diagonal=1).transpose(-1, -2)


@dataclass
class Moments:
    """Running sums over one matrix's inputs, and the first of these. `gap_KK` is None where one stream is followed."""

    sum_KK: Tensor
    gap_sum_KK: Tensor | None = None
    weight_sum: float = 0.0
    weight_square_sum: float = 0.0
    gap_weight_sum: float = 0.0
    tokens: int = 0
    product_dtype: torch.dtype = torch.float32
    sample: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)
    _whole: Tensor | None = field(default=None, repr=False)

    @classmethod
    def empty(
        cls,
        k: int,
        *,
        gap: bool = False,
        device: torch.device | str = "cpu",
        product_dtype: torch.dtype = torch.float32,
    ) -> Moments:
        """Sums of nothing over k channels. `product_dtype`: see `accumulate`."""
        gap_sum = untouched_zeros(k, k, device=device) if gap else None
        return cls(untouched_zeros(k, k, device=device), gap_sum, product_dtype=product_dtype)

    def add(self, x_TK: Tensor, weight_T: Tensor | None = None, source_TK: Tensor | None = None) -> None:
        """Add T tokens: x_TK of the stream the layer will see; with `gap`, source_TK of the source model.

        Where the source model was followed over some tokens only, source_TK [R, K] belongs to the last R of the T.
        """
        if x_TK.ndim != 2 or x_TK.shape[1] != self.sum_KK.shape[0]:
            raise ValueError(f"inputs of shape {tuple(x_TK.shape)}, expected [T, {self.sum_KK.shape[0]}]")
        self._whole = None
        accumulate(self.sum_KK, x_TK, weight_T, self.product_dtype)
        self._keep(x_TK, weight_T)
        if self.gap_sum_KK is not None:
            self._add_gap(x_TK, weight_T, source_TK)
        self.tokens += x_TK.shape[0]
        if weight_T is None:
            self.weight_sum += x_TK.shape[0]
            self.weight_square_sum += x_TK.shape[0]
        else:
            self.weight_sum += float(weight_T.double().sum())
            self.weight_square_sum += float(weight_T.double().square().sum())

    def _keep(self, x_TK: Tensor, weight_T: Tensor | None) -> None:
        room = min(SAMPLE_TOKENS - self.tokens, len(x_TK))
        if room > 0:
            weight = torch.ones(room, device=x_TK.device) if weight_T is None else weight_T[:room].float()
            self.sample.append((x_TK[:room].clone(), weight.clone()))

    @property
    def sample_TK(self) -> Tensor:
        """The first tokens added, at most SAMPLE_TOKENS, in the dtype they came in: [t, K]."""
        return torch.cat([x for x, _ in self.sample]) if self.sample else self.sum_KK.new_empty(0, len(self.sum_KK))

    @property
    def sample_weights(self) -> Tensor:
        """Their weights, float32 [t]."""
        return torch.cat([weight for _, weight in self.sample]) if self.sample else self.sum_KK.new_empty(0)

    def _add_gap(self, x_TK: Tensor, weight_T: Tensor | None, source_TK: Tensor | None) -> None:
        assert self.gap_sum_KK is not None
        if source_TK is None or source_TK.shape[1:] != x_TK.shape[1:] or len(source_TK) > len(x_TK):
            raise ValueError("gap moments need source_TK as wide as x_TK, of all its tokens or of the last ones")
        first = len(x_TK) - len(source_TK)
        weight = None if weight_T is None else weight_T[first:]
        accumulate_gap(self.gap_sum_KK, source_TK, x_TK[first:], weight, self.product_dtype)
        self.gap_weight_sum += float(len(source_TK) if weight is None else weight.double().sum())

    def merge(self, other: Moments) -> None:
        """Add another's sums to this one's, in place. A gap sum that only one of the two has is dropped."""
        if self.gap_sum_KK is None or other.gap_sum_KK is None:
            self.gap_sum_KK = None
        if not other.tokens:
            return
        self.sample = self.sample or other.sample
        self.sum_KK += other.sum_KK
        if self.gap_sum_KK is not None and other.gap_sum_KK is not None:
            self.gap_sum_KK += other.gap_sum_KK
        self.weight_sum += other.weight_sum
        self.weight_square_sum += other.weight_square_sum
        self.gap_weight_sum += other.gap_weight_sum
        self.tokens += other.tokens
        self._whole = None

    def forget(self) -> None:
        """Drop what can be made again from the sums (H, another K x K matrix)."""
        self._whole = None

    def lean_on(self, pool: Moments, kappa: float) -> None:
        """H <- (N_eff H + kappa H_pool) / (N_eff + kappa), in place, as if kappa tokens of the pool had been added."""
        if pool.weight_sum <= 0 or kappa <= 0:
            return
        effective = self.n_eff
        added = kappa * (self.weight_sum / effective if effective else 1.0)
        self.sum_KK.add_(pool.sum_KK, alpha=added / pool.weight_sum)
        self.weight_sum += added
        self.weight_square_sum = self.weight_sum**2 / (effective + kappa)
        self._whole = None

    @property
    def n_eff(self) -> float:
        """Effective tokens (sum w)^2 / sum w^2; 0 when nothing was seen."""
        return self.weight_sum**2 / self.weight_square_sum if self.weight_square_sum > 0 else 0.0

    @property
    def hessian_KK(self) -> Tensor:
        """H, the weighted mean of x x^T (zeros when nothing was seen)."""
        if self._whole is None:
            self._whole = symmetric(self.sum_KK) / max(self.weight_sum, torch.finfo(torch.float32).tiny)
        return self._whole

    @property
    def gap_KK(self) -> Tensor | None:
        """G, the weighted mean of (source - x) x^T, or None."""
        if self.gap_sum_KK is None:
            return None
        return self.gap_sum_KK / max(self.gap_weight_sum, torch.finfo(torch.float32).tiny)
