"""The routed feed-forward experts, stored as two stacks, and the block that routes to them.

Letters: T tokens, D hidden, I intermediate, E experts, K experts taken by a token, A = T*K assignments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.gating import Gate, Routing


class Experts(nn.Module):
    """E gated feed-forward networks: down(silu(gate x) * up x), gate rows first in `gate_up_proj` [E, 2I, D]."""

    def __init__(self, config: Glm5RefConfig) -> None:
        super().__init__()
        e, i, d = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.num_experts = e
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, i))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts for each token: [T, D], [T, K] int64, [T, K] -> [T, D].

        Assignments are sorted by expert so that each expert runs once on a contiguous block of rows.
        """
        flat_A = top_k_index.reshape(-1)
        order_A = torch.argsort(flat_A, stable=True)
        token_A = order_A // top_k_index.shape[1]
        counts = torch.bincount(flat_A, minlength=self.num_experts).tolist()[: self.num_experts]
        rows = torch.split(hidden_states[token_A], [*counts, flat_A.numel() - sum(counts)])
        stacks = zip(rows, self.gate_up_proj.unbind(0), self.down_proj.unbind(0), strict=False)
        done = [feed_forward(x_AD, gate_up, down) for x_AD, gate_up, down in stacks]
        done.append(torch.zeros_like(rows[-1]))  # index == E means "no expert"
        out_AD = torch.cat(done) * top_k_weights.reshape(-1)[order_A].to(hidden_states.dtype)[:, None]
        return torch.zeros_like(hidden_states).index_add(0, token_A, out_AD)


def feed_forward(x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert on its rows; `gate_up` [2I, D] has the gate rows first, `down` is [D, I]."""
    gate_TI, up_TI = F.linear(x_TD, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate_TI) * up_TI, down)


class SparseMlp(nn.Module):
    """Gate and experts of one layer."""

    def __init__(self, config: Glm5RefConfig) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config)

    def forward(self, hidden_BTD: Tensor) -> tuple[Tensor, Routing]:
        """Hidden states after the experts, and the routing that was used."""
        flat_TD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
        routing: Routing = self.gate(flat_TD)
        out_TD = self.experts(flat_TD, routing.index_TK, routing.weight_TK)
        return out_TD.view(hidden_BTD.shape), routing
