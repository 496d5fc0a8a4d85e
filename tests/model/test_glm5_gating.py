"""Gating of the reference GLM-5, against sums written out by hand. Letters: T tokens, D hidden, E experts, K taken."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.experts import Experts, SparseMlp
from glm5_quant.model.glm5.gating import Gate, Routing, gating_l1_loss, load_balancing_loss


def config(**overrides: Any) -> Glm5RefConfig:
    base = {"hidden_size": 32, "moe_intermediate_size": 24, "num_experts": 6, "moe_gating_hidden_size": 20}
    return Glm5RefConfig(**{"gqa_group_size": [4, 2, 1], **base, **overrides})


def naive_route(gate: Gate, x_D: Tensor, temperature: float, top_k: int) -> tuple[list[int], list[float]]:
    """One token, in float64, by plain Python where it is short."""
    x = x_D.double()
    if gate.per_token_norm:
        x = (x - x.mean()) / (x.var(correction=0) + gate.norm.eps).sqrt()
        x = x * gate.norm.weight.double() + gate.norm.bias.double()
    hidden = gate.fc1.weight.double() @ x
    hidden = hidden * torch.sigmoid(hidden)
    logits = (gate.fc2.weight.double() @ hidden).tolist()
    powers = [math.exp(value / temperature) for value in logits]
    chosen = sorted(range(len(powers)), key=lambda e: -powers[e])[:top_k]
    total = sum(powers[e] for e in chosen)
    return chosen, [powers[e] / total for e in chosen]


@pytest.mark.parametrize("mode", ["per_token", "none"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_gate_agrees_with_a_naive_one_token_at_a_time(mode: str, temperature: float) -> None:
    torch.manual_seed(1)
    gate = Gate(config(moe_gating_layernorm_mode=mode, moe_routing_temperature=temperature))
    x_TD = torch.randn(40, 32) * 3
    routing = gate(x_TD)
    for token in range(40):
        chosen, weights = naive_route(gate, x_TD[token], temperature, 2)
        assert routing.index_TK[token].tolist() == chosen
        torch.testing.assert_close(routing.weight_TK[token].double(), torch.tensor(weights).double(), atol=1e-6, rtol=0)


def test_a_lower_temperature_gives_the_first_expert_more_weight() -> None:
    torch.manual_seed(2)
    x_TD = torch.randn(16, 32)
    hot, cold = Gate(config(moe_routing_temperature=2.0)), Gate(config(moe_routing_temperature=0.5))
    cold.load_state_dict(hot.state_dict())
    assert torch.equal(hot(x_TD).index_TK, cold(x_TD).index_TK)
    assert (cold(x_TD).weight_TK[:, 0] > hot(x_TD).weight_TK[:, 0]).all()


def test_the_length_of_a_batch_mate_does_not_change_a_route() -> None:
    torch.manual_seed(3)
    gate = Gate(config())
    own_TD, mate_TD = torch.randn(9, 32), torch.randn(500, 32) * 50
    alone, together = gate(own_TD), gate(torch.cat([own_TD, mate_TD]))
    assert torch.equal(alone.index_TK, together.index_TK[:9])
    torch.testing.assert_close(alone.weight_TK, together.weight_TK[:9], atol=1e-6, rtol=0)


def test_scaling_or_shifting_a_token_does_not_change_its_route_under_per_token_norm() -> None:
    torch.manual_seed(4)
    gate = Gate(config())
    x_TD = torch.randn(12, 32)
    assert torch.equal(gate(x_TD).index_TK, gate(x_TD * 100 + 7).index_TK)


def test_experts_agree_with_a_loop_over_tokens() -> None:
    torch.manual_seed(5)
    experts = Experts(config()).double()
    torch.nn.init.normal_(experts.gate_up_proj)
    torch.nn.init.normal_(experts.down_proj)
    x_TD = torch.randn(17, 32, dtype=torch.float64)
    index_TK = torch.stack([torch.randperm(6)[:2] for _ in range(17)])
    weight_TK = torch.rand(17, 2, dtype=torch.float64)
    expected = torch.zeros(17, 32, dtype=torch.float64)
    for token in range(17):
        for slot in range(2):
            e = int(index_TK[token, slot])
            gate, up = experts.gate_up_proj[e, :24] @ x_TD[token], experts.gate_up_proj[e, 24:] @ x_TD[token]
            out = experts.down_proj[e] @ (gate * torch.sigmoid(gate) * up)
            expected[token] += weight_TK[token, slot] * out
    torch.testing.assert_close(experts(x_TD, index_TK, weight_TK), expected)


def test_an_index_equal_to_the_number_of_experts_adds_nothing() -> None:
    torch.manual_seed(6)
    experts = Experts(config())
    torch.nn.init.normal_(experts.gate_up_proj)
    torch.nn.init.normal_(experts.down_proj)
    x_TD = torch.randn(4, 32)
    index_TK = torch.tensor([[0, 6], [6, 6], [2, 3], [6, 5]])
    out = experts(x_TD, index_TK, torch.ones(4, 2))
    assert torch.equal(out[1], torch.zeros(32))
    lone = experts(x_TD[:1], torch.tensor([[0]]), torch.ones(1, 1))
    torch.testing.assert_close(out[:1], lone)


def test_the_block_is_the_gate_followed_by_the_experts() -> None:
    torch.manual_seed(7)
    block = SparseMlp(config())
    torch.nn.init.normal_(block.experts.gate_up_proj)
    torch.nn.init.normal_(block.experts.down_proj)
    x_BTD = torch.randn(2, 5, 32)
    out_BTD, routing = block(x_BTD)
    flat = block.experts(x_BTD.view(10, 32), routing.index_TK, routing.weight_TK)
    torch.testing.assert_close(out_BTD, flat.view(2, 5, 32))


def test_balanced_routing_has_load_balancing_loss_one_and_a_collapsed_gate_has_the_number_of_experts_over_k() -> None:
    even = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    balanced = Routing(torch.zeros(4, 4), even, torch.full((4, 2), 0.5))
    assert load_balancing_loss(balanced).item() == pytest.approx(1.0)
    logits = torch.full((4, 4), -40.0)
    logits[:, 0] = 40.0
    collapsed = Routing(logits, torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5))
    assert load_balancing_loss(collapsed).item() == pytest.approx(4 * 0.5)


def test_the_load_balancing_gradient_pushes_the_busiest_expert_down() -> None:
    torch.manual_seed(8)
    logits = (torch.randn(64, 4) * 0.1 + torch.tensor([1.0, 0.0, 0.0, 0.0])).requires_grad_()
    index = logits.topk(2, dim=-1).indices
    load_balancing_loss(Routing(logits, index, torch.zeros(64, 2))).backward()
    assert logits.grad is not None
    assert logits.grad.sum(0).argmax() == 0


def test_the_l1_loss_is_the_mean_absolute_logit() -> None:
    routing = Routing(torch.tensor([[1.0, -3.0], [0.5, 0.0]]), torch.zeros(2, 2).long(), torch.zeros(2, 2))
    assert gating_l1_loss(routing).item() == pytest.approx(4.5 / 4)
