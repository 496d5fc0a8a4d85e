"""Inputs that behave like a layer's: correlated channels of very different size, and a few that are extreme."""

from __future__ import annotations

import torch


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_inputs(tokens: int, k: int, seed: int = 0, channels: int = 0) -> torch.Tensor:
    """float32 [tokens, k]; channels picks which fixed covariance, seed which tokens are drawn from it."""
    mix = gaussian(k, k, seed=1000 + channels) / k**0.5 + torch.eye(k)
    size = gaussian(k, seed=2000 + channels).exp()
    return (gaussian(tokens, k, seed=seed) @ mix) * size


def moments_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / x.shape[0]
