"""Attention of the reference GLM-5 against loops in float64. Letters: B batch, T tokens, H heads, C head channels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from glm5_quant.model.glm5 import attention as glm5_attention
from glm5_quant.model.glm5.attention import Attention, Trace
from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.rotary import RotaryEmbedding, apply_ring_phase, apply_rotary


def config(**overrides: Any) -> Glm5RefConfig:
    base = {"hidden_size": 24, "head_dim": 8, "num_attention_heads": 4, "gqa_group_size": [4, 2, 1]}
    return Glm5RefConfig(**{**base, "num_hidden_layers": 3, "dsa_min_context": 4, **overrides})


def naive_rotate(x_C: Tensor, position: int, theta: float) -> Tensor:
    """Rotate pair (c, c + C/2) by position * theta^(-2c/C), one pair at a time."""
    half = len(x_C) // 2
    out = x_C.clone()
    for pair in range(half):
        angle = position * theta ** (-2 * pair / len(x_C))
        a, b = x_C[pair].item(), x_C[pair + half].item()
        out[pair] = a * math.cos(angle) - b * math.sin(angle)
        out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def naive_attention(layer: Attention, x_TD: Tensor, theta: float, keep: Tensor | None = None) -> Tensor:
    """One sequence, one head and one query at a time; `keep` [T, T] says which keys a query may see."""
    length, channels = len(x_TD), layer.head_dim
    q, k, v = (x_TD @ m.weight.T for m in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads, groups = q.shape[1] // channels, k.shape[1] // channels
    out = torch.zeros_like(q)
    for head in range(heads):
        at, kv = slice(head * channels, (head + 1) * channels), head * groups // heads
        of = slice(kv * channels, (kv + 1) * channels)
        for t in range(length):
            query = naive_rotate(q[t, at], t, theta)
            seen = [s for s in range(t + 1) if keep is None or keep[t, s]]
            logits = torch.stack([query @ naive_rotate(k[s, of], s, theta) for s in seen]) / channels**0.5
            out[t, at] = torch.softmax(logits, 0) @ v[seen, of]
    return out @ layer.o_proj.weight.T


def run(layer: Attention, made: Glm5RefConfig, x_BTD: Tensor, **kwargs: Any) -> Tensor:
    positions = torch.arange(x_BTD.shape[1])[None]
    rotary = RotaryEmbedding(made)(x_BTD, positions)
    out: Tensor = layer(x_BTD, rotary, **kwargs)
    return out


def test_rotary_agrees_with_one_pair_at_a_time() -> None:
    torch.manual_seed(0)
    made = config()
    x = torch.randn(1, 2, 30, 8, dtype=torch.float64)
    cos, sin = RotaryEmbedding(made)(x.float(), torch.arange(100, 130)[None])
    rotated = apply_rotary(x, cos.double(), sin.double())
    for head in range(2):
        for t in range(30):
            expected = naive_rotate(x[0, head, t], 100 + t, made.rope_theta)
            torch.testing.assert_close(rotated[0, head, t], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("layer_idx", [0, 1, 2])
def test_grouped_query_attention_agrees_with_a_naive_one_at_every_depth(layer_idx: int) -> None:
    torch.manual_seed(1)
    made = config(dsa_sparse_ratio=0.0)
    layer = Attention(made, layer_idx).double()
    assert layer.k_proj.out_features == 8 * (1, 2, 4)[layer_idx]
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    out = run(layer, made, x)
    for row in range(2):
        expected = naive_attention(layer, x[row], made.rope_theta)
        torch.testing.assert_close(out[row], expected, atol=1e-6, rtol=0)


def test_ratio_zero_is_exact_and_a_mask_changes_the_output() -> None:
    torch.manual_seed(2)
    exact, sparse = config(dsa_sparse_ratio=0.0), config(dsa_sparse_ratio=0.5)
    full, masked = Attention(exact, 1), Attention(sparse, 1)
    masked.load_state_dict(full.state_dict())
    x = torch.randn(1, 24, 24)
    causal = torch.nn.functional.scaled_dot_product_attention(*_repeat(full, exact, x), is_causal=True)
    expected = full.o_proj(causal.transpose(1, 2).reshape(1, 24, -1))
    torch.testing.assert_close(run(full, exact, x), expected)
    assert not torch.allclose(run(masked, sparse, x), expected)
    torch.testing.assert_close(run(masked, sparse, x[:, :4]), run(full, exact, x[:, :4]))


def _repeat(layer: Attention, made: Glm5RefConfig, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = layer.project(x, RotaryEmbedding(made)(x, torch.arange(x.shape[1])[None]))
    times = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def test_sparse_attention_agrees_with_a_naive_one_under_the_same_mask() -> None:
    torch.manual_seed(3)
    made = config(dsa_sparse_ratio=0.4)
    layer = Attention(made, 2).double()
    x = torch.randn(1, 15, 24, dtype=torch.float64)
    expert = torch.randint(8, (1, 15, 2))
    from glm5_quant.model.glm5.sparse_mask import keep_mask

    kept = keep_mask(*layer.mask_predictor(x, expert), None, 0.4, 4)[0]
    out = run(layer, made, x, prev_expert_index=expert)
    torch.testing.assert_close(out[0], naive_attention(layer, x[0], made.rope_theta, kept), atol=1e-6, rtol=0)


def test_a_ring_phase_of_zero_changes_nothing_and_another_phase_is_a_rotation_of_the_query() -> None:
    torch.manual_seed(4)
    x = torch.randn(1, 4, 5, 8, dtype=torch.float64)
    assert torch.equal(apply_ring_phase(x, torch.zeros(4, 4, dtype=torch.float64)), x)
    phase = torch.rand(4, 4, dtype=torch.float64)
    turned = apply_ring_phase(x, phase)
    for head in range(4):
        for pair in range(4):
            a, b = x[0, head, :, pair], x[0, head, :, pair + 4]
            c, s = math.cos(phase[head, pair].item()), math.sin(phase[head, pair].item())
            torch.testing.assert_close(turned[0, head, :, pair], a * c - b * s)
            torch.testing.assert_close(turned[0, head, :, pair + 4], b * c + a * s)


def test_the_ring_phase_is_off_by_default_and_trainable_when_on() -> None:
    assert Attention(config(), 0).ring_phase is None
    made = config(ring_phase=True)
    layer = Attention(made, 0)
    run(layer, made, torch.randn(1, 6, 24)).square().sum().backward()
    assert layer.ring_phase is not None
    assert layer.ring_phase.grad is not None
    assert layer.ring_phase.grad.abs().sum() > 0


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_short_training_path_agrees_with_the_library_attention(groups: int) -> None:
    torch.manual_seed(5)
    q = torch.randn(2, 4, 19, 8, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, groups, 19, 8, dtype=torch.float64).unbind(0)
    short = glm5_attention._attend(q, k, v, None)
    plain = glm5_attention._attend(q.detach(), k, v, None)
    torch.testing.assert_close(short, plain)


def test_steps_with_a_cache_give_what_one_full_pass_gives_under_the_sparse_mask() -> None:
    torch.manual_seed(6)
    made = config(dsa_sparse_ratio=0.4)
    layer = Attention(made, 0).double()
    x, expert = torch.randn(1, 17, 24, dtype=torch.float64), torch.randint(8, (1, 17, 2))
    cos, sin = RotaryEmbedding(made)(x, torch.arange(17)[None])
    full = layer(x, (cos, sin), prev_expert_index=expert)
    cache, pieces = DynamicCache(config=made), []
    for start, stop in ((0, 6), (6, 7), (7, 12), *((t, t + 1) for t in range(12, 17))):
        at = slice(start, stop)
        pieces.append(layer(x[:, at], (cos[:, at], sin[:, at]), None, cache, expert[:, at]))
    torch.testing.assert_close(torch.cat(pieces, 1), full)


def test_a_trace_records_the_share_of_keys_each_query_kept() -> None:
    torch.manual_seed(7)
    made = config(dsa_sparse_ratio=0.25)
    layer, trace = Attention(made, 0), Trace()
    run(layer, made, torch.randn(1, 12, 24), trace=trace)
    expected = [1.0 if seen <= 4 else (seen - seen // 4) / seen for seen in range(1, 13)]
    torch.testing.assert_close(trace.mask_density_BT[0][0], torch.tensor(expected))
