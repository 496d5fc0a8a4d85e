"""How far to trust second moments that few tokens stand behind (EAMPQ step 2).

Dimensions: T tokens, K input channels, E leading batch (experts).
Correlations move toward zero by r = n / (n + c N_eff), a rule for tokens whose inputs are all about as large. Inputs of
down-projections are not: a few tokens carry H, and it knows less than their number says. What it knows can be told from
the tokens themselves (Schäfer and Strimmer 2005, for correlations), so r is the larger of the two. The diagonal, which
grids are weighted by, is uncertain too: its logarithms move toward their mean by the share of their spread that is
noise (James and Stein). With many tokens neither would change much, and neither is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.quant.statistics import Moments

# Tokens for each channel from which on their number says enough. With 11 dense SmolLM2 ended 3% higher in KL, with
# hundreds stories260k-glm4moe 2.6% (docs/lab-log.md).
FEW_PER_CHANNEL = 4
# Correlations are squared so many rows at a time: H of GLM-5 is 151 MB.
ROWS = 256
# A diagonal that would move by less than this stays: the copy is 151 MB at GLM-5's size.
LEAST_CHANGE = 0.01


@dataclass(frozen=True)
class Noise:
    """`correlation`: share of the squared correlations in H that chance alone accounts for, 0 to 1. `diagonal_K`:
    variance of the logarithms of diag H, float32 [K]."""

    correlation: float
    diagonal_K: Tensor

    @classmethod
    def of(cls, hessian_KK: Tensor, moments: Moments, sample_TK: Tensor) -> Noise | None:
        """From tokens of `moments`' sample, as `hessian_KK` sees them; None without any, or where there are plenty.

        The variance of a weighted mean m = sum w y / sum w of independent y is sum w^2 (y - m)^2 / (sum w)^2, with
        y = x_i x_j for each entry of H.
        """
        k = hessian_KK.shape[-1]
        diagonal_K = hessian_KK.diagonal().double()
        few = moments.n_eff < FEW_PER_CHANNEL * k
        if not few or not len(sample_TK) or moments.weight_sum <= 0 or not bool((diagonal_K > 0).any()):
            return None
        root_K = torch.where(diagonal_K > 0, diagonal_K.rsqrt(), 0.0)
        # The sample stands for all tokens behind H.
        share = moments.tokens / len(sample_TK) / moments.weight_sum**2
        weight_T = moments.sample_weights.double().square() * share
        square_TK = (sample_TK.double() * root_K).square()
        fourth_K = weight_T @ square_TK.square()
        all_pairs = float(weight_T @ square_TK.sum(-1).square() - fourth_K.sum())
        squares = -float(k)
        for row in range(0, k, ROWS):
            part_RK = hessian_KK[row : row + ROWS] * root_K.float() * root_K[row : row + ROWS, None].float()
            squares += float(part_RK.square_().sum(dtype=torch.float64))
        squares = max(squares, 0.0)
        noise = all_pairs - squares / moments.n_eff
        return cls(
            correlation=min(max(noise / squares, 0.0), 1.0) if squares > 0 else 0.0,
            diagonal_K=(fourth_K - 1.0 / moments.n_eff).clamp(min=0.0).float(),
        )


def trusted(hessian_KK: Tensor, n_eff: float | Tensor, trust: float, noise: Noise | None = None) -> Tensor:
    """H with correlations times 1 - r and, given `noise`, its diagonal drawn together; float32 [..., K, K].

    r = n / (n + trust * N_eff), or `noise.correlation` where that is more. `noise` belongs to one matrix.
    """
    n = hessian_KK.shape[-1]
    n_eff = torch.as_tensor(n_eff, dtype=torch.float32, device=hessian_KK.device)
    r = n / (n + trust * n_eff)
    diagonal = hessian_KK.diagonal(dim1=-2, dim2=-1)
    if noise is not None:
        r = r.clamp(min=noise.correlation)
    mixed = hessian_KK * (1.0 - r)[..., None, None]
    if noise is not None:
        drawn_K = drawn_together(diagonal, noise.diagonal_K.to(diagonal.device))
        stretch_K = torch.where(diagonal > 0, drawn_K / diagonal, 1.0).sqrt_()
        if float((stretch_K - 1.0).abs().amax()) > LEAST_CHANGE:
            mixed.mul_(stretch_K).mul_(stretch_K[:, None])
            diagonal = drawn_K
    mixed.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    return mixed


def shrinkage(n: int, n_eff: float, trust: float) -> float:
    """r = n / (n + trust * N_eff): how far correlations of n channels move toward zero, by the number of tokens."""
    return n / (n + trust * n_eff)


def drawn_together(diagonal_K: Tensor, noise_K: Tensor) -> Tensor:
    """diag H with each logarithm moved toward their mean by noise / (noise + spread), float32 [K]; zeros stay zeros.

    noise_K: variance of the logarithms. The spread is what theirs leaves once the mean noise is taken off.
    """
    seen = diagonal_K > 0
    if not bool(seen.any()):
        return diagonal_K
    logarithm_K = diagonal_K.clamp(min=torch.finfo(torch.float32).tiny).log()
    mean = logarithm_K[seen].mean()
    spread = ((logarithm_K[seen] - mean).square().mean() - noise_K[seen].mean()).clamp(min=0.0)
    kept_K = spread / (spread + noise_K).clamp(min=torch.finfo(torch.float32).tiny)
    kept_K = torch.where(noise_K > 0, kept_K, 1.0)
    return torch.where(seen, (mean + kept_K * (logarithm_K - mean)).exp(), diagonal_K)
