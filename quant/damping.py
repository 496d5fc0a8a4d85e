"""What damping is a share of: the mean square of a typical input channel.

GPTQ (Frantar et al., arXiv 2210.17323) takes the arithmetic mean of diag H. A few massive channels (Sun et al., arXiv
2402.17762) lift it above all others: inputs of glm5-tiny's down-projections have a geometric mean of 0.0 to 1.4% of it,
so that 1% of the arithmetic mean outweighs most channels, and what is known of their correlations is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A channel that nothing reaches counts as this share of the arithmetic mean.
FLOOR = 1e-6


def typical_energy(hessian_KK: Tensor) -> Tensor:
    """Geometric mean of diag H, [...] for [..., K, K] in H's dtype; above 0 for any H without negative diagonal."""
    diagonal_K = hessian_KK.diagonal(dim1=-2, dim2=-1)
    mean = diagonal_K.mean(-1).clamp(min=torch.finfo(diagonal_K.dtype).tiny / FLOOR)
    return mean * (diagonal_K / mean[..., None]).clamp(min=FLOOR).log().mean(-1).exp()
