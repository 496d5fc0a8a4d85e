"""The dynamic sparse mask against sorting each query's keys. Letters: B batch, Q queries, S keys, R predictor rank."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from glm5_quant.model.glm5 import sparse_mask
from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.modeling import Glm5RefForCausalLM


def naive_keep(score_QS: Tensor, visible_QS: Tensor, ratio: float, min_context: int) -> Tensor:
    """Sort the visible keys of one query after the other and drop the lowest."""
    keep = visible_QS.clone()
    for q in range(len(score_QS)):
        seen = visible_QS[q].nonzero().flatten().tolist()
        if len(seen) > min_context:
            lowest = sorted(seen, key=lambda s: score_QS[q, s].item())[: math.floor(ratio * len(seen))]
            keep[q, lowest] = False
    return keep


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("queries", [1, 8, 40])
def test_the_mask_keeps_what_sorting_keeps(
    ratio: float, chunk: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(sparse_mask, "QUERY_CHUNK", chunk)
    query, key = torch.randn(2, queries, 4), torch.randn(2, 40, 4)
    kept = sparse_mask.keep_mask(query, key, None, ratio, 10)
    visible = sparse_mask.causal_visible(queries, 40, query.device)[0]
    score = sparse_mask.scores(query, key)
    for row in range(2):
        assert torch.equal(kept[row], naive_keep(score[row], visible, ratio, 10))


def test_padding_does_not_count_as_a_visible_key() -> None:
    torch.manual_seed(1)
    query, key = torch.randn(1, 30, 4), torch.randn(1, 30, 4)
    visible = sparse_mask.causal_visible(30, 30, query.device).clone()
    visible[:, :, :9] = False  # nine padding tokens on the left
    kept = sparse_mask.keep_mask(query, key, visible, 0.3, 5)
    alone = sparse_mask.keep_mask(query[:, 9:], key[:, 9:], None, 0.3, 5)
    assert torch.equal(kept[:, 9:, 9:], alone)
    assert not kept[:, :, :9].any()


def test_the_mask_is_causal_and_every_query_keeps_something() -> None:
    torch.manual_seed(2)
    query, key = torch.randn(1, 50, 4), torch.randn(1, 50, 4)
    kept = sparse_mask.keep_mask(query, key, None, 0.9, 0)
    assert not (kept & ~sparse_mask.causal_visible(50, 50, query.device)).any()
    assert (kept.sum(-1) >= 1).all()


def test_ratio_zero_and_short_contexts_keep_every_visible_key() -> None:
    torch.manual_seed(3)
    query, key = torch.randn(1, 20, 4), torch.randn(1, 20, 4)
    causal = sparse_mask.causal_visible(20, 20, query.device)
    assert torch.equal(sparse_mask.keep_mask(query, key, None, 0.0, 0), causal)
    assert torch.equal(sparse_mask.keep_mask(query, key, None, 0.5, 20), causal)


def test_the_predictor_sees_which_experts_the_token_took_below() -> None:
    torch.manual_seed(4)
    predictor = sparse_mask.MaskPredictor(Glm5RefConfig(hidden_size=16, gqa_group_size=[4, 2, 1]))
    hidden = torch.randn(1, 3, 16)
    first, _ = predictor(hidden, torch.tensor([[[0, 1], [2, 3], [4, 5]]]))
    second, _ = predictor(hidden, torch.tensor([[[0, 1], [2, 3], [4, 6]]]))
    assert torch.equal(first[:, :2], second[:, :2])
    expected = predictor.q(hidden)[0, 2] + predictor.expert_q.weight[4] + predictor.expert_q.weight[5]
    torch.testing.assert_close(first[0, 2], expected)
    assert not torch.allclose(first[0, 2], second[0, 2])


def test_the_alignment_loss_is_the_divergence_from_the_attention_paid() -> None:
    torch.manual_seed(5)
    query, key = torch.randn(1, 3, 4, dtype=torch.float64), torch.randn(1, 6, 4, dtype=torch.float64)
    visible = sparse_mask.causal_visible(3, 6, query.device)
    paid = sparse_mask.paid_attention(torch.randn(1, 2, 3, 8), torch.randn(1, 1, 6, 8), visible)
    expected = 0.0
    for q in range(3):
        seen = visible[0, q].nonzero().flatten()
        log_share = torch.log_softmax((query[0, q] @ key[0, seen].T).float() / 2, 0)
        mass = paid[0, :, q, seen].mean(0)
        expected += (mass * (mass.log() - log_share)).sum().item() / 3
    got = sparse_mask.alignment_loss(query, key, visible, paid).item()
    assert got == pytest.approx(expected, abs=1e-5)


def test_predictors_are_well_under_one_percent_of_the_parameters() -> None:
    model = Glm5RefForCausalLM(Glm5RefConfig(gqa_group_size=[4, 2, 1]))
    predictor = sum(p.numel() for name, p in model.named_parameters() if "mask_predictor" in name)
    assert predictor / sum(p.numel() for p in model.parameters()) < 0.006
