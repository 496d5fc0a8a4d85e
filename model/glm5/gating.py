"""Token-wise dynamic gating: which two experts a token takes, and the losses that keep the choice balanced.

Letters: T tokens, D hidden, E experts, K experts taken by a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5_quant.model.glm5.configuration import Glm5RefConfig


class Routing(NamedTuple):
    """Choice of one layer: logits_TE float32, index_TK int64, weight_TK float32 summing to 1 over K."""

    logits_TE: Tensor
    index_TK: Tensor
    weight_TK: Tensor


class Gate(nn.Module):
    """Two-layer MLP on the token's own LayerNorm, then a softmax with temperature, then the top K renormalized.

    Nothing here looks at another token, so the length of a batch-mate cannot change a route.
    """

    def __init__(self, config: Glm5RefConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.temperature = config.moe_routing_temperature
        self.per_token_norm = config.moe_gating_layernorm_mode == "per_token"
        if self.per_token_norm:
            self.norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.moe_gating_hidden_size, bias=False)
        self.fc2 = nn.Linear(config.moe_gating_hidden_size, config.num_experts, bias=False)

    def forward(self, hidden_TD: Tensor) -> Routing:
        """Route each row of `hidden_TD` [T, D]."""
        x_TD = self.norm(hidden_TD) if self.per_token_norm else hidden_TD
        logits_TE = self.fc2(F.silu(self.fc1(x_TD))).float()
        probability_TE = torch.softmax(logits_TE / self.temperature, dim=-1)
        weight_TK, index_TK = torch.topk(probability_TE, self.top_k, dim=-1)
        return Routing(logits_TE, index_TK, weight_TK / weight_TK.sum(dim=-1, keepdim=True))


def load_balancing_loss(routing: Routing, temperature: float = 1.0) -> Tensor:
    """E * sum_e (share of choices on e) * (mean probability of e), 1.0 when balanced (Switch Transformer, eq. 4-6)."""
    experts = routing.logits_TE.shape[-1]
    probability_E = torch.softmax(routing.logits_TE / temperature, dim=-1).mean(dim=0)
    share_E = torch.bincount(routing.index_TK.flatten(), minlength=experts).to(probability_E) / routing.index_TK.numel()
    return experts * (share_E * probability_E).sum()


def gating_l1_loss(routing: Routing) -> Tensor:
    """Mean absolute gating logit: keeps the logits small, so that a small error in one does not flip a route."""
    return routing.logits_TE.abs().mean()
