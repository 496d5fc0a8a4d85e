"""Rotary position embedding with the optional ring phase.

Letters: B batch, H heads, T tokens, P = head_dim / 2 rotated pairs, C = head_dim channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5_quant.model.glm5.configuration import Glm5RefConfig


class RotaryEmbedding(nn.Module):
    """cos and sin of position * theta^(-2p/head_dim), computed in float32 (RoFormer, eq. 15)."""

    inv_freq: Tensor

    def __init__(self, config: Glm5RefConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [B, T, C] in the dtype of `like`; position_ids [B, T]."""
        angle_BTP = position_ids[..., None].float() * self.inv_freq.float()
        angle_BTC = torch.cat((angle_BTP, angle_BTP), dim=-1)
        return angle_BTC.cos().to(like.dtype), angle_BTC.sin().to(like.dtype)


def inverse_frequencies(config: Glm5RefConfig) -> Tensor:
    """theta^(-2p/head_dim) for each rotated pair p, float32 [P]."""
    exponent_P = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return config.rope_theta**-exponent_P


def rotate_half(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a), a and b the halves of the last dimension."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary(x_BHTC: Tensor, cos_BTC: Tensor, sin_BTC: Tensor) -> Tensor:
    """Rotate each pair (c, c + C/2) of every head by its position's angle."""
    return x_BHTC * cos_BTC[:, None] + rotate_half(x_BHTC) * sin_BTC[:, None]


def apply_ring_phase(x_BHTC: Tensor, phase_HP: Tensor) -> Tensor:
    """Add a learnable phase to the rotary angle of each head and pair.

    It is applied to queries only: the same phase on both would cancel, since attention sees their difference.
    """
    phase_HC = torch.cat((phase_HP, phase_HP), dim=-1)[None, :, None, :]
    return x_BHTC * phase_HC.cos().to(x_BHTC.dtype) + rotate_half(x_BHTC) * phase_HC.sin().to(x_BHTC.dtype)
