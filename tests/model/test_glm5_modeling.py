"""The reference GLM-5 as a whole: caching, padding, routing output, saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from glm5_quant.model.glm5 import register
from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.modeling import Glm5RefForCausalLM, Glm5RefModel

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "gqa_group_size": [4, 2, 1],
    "dsa_min_context": 6,
    "initializer_range": 0.3,
}


def model(**overrides: Any) -> Glm5RefForCausalLM:
    torch.manual_seed(0)
    made = Glm5RefForCausalLM(Glm5RefConfig(**{**SHAPE, **overrides}))
    made.eval()
    return made


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(1))


def test_generation_with_a_cache_gives_the_tokens_of_one_full_pass() -> None:
    made, prompt = model(), ids(1, 9)
    out = made.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    full = made(input_ids=out).logits.argmax(-1)
    assert torch.equal(full[0, 8:-1], out[0, 9:])
    uncached = made.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False, use_cache=False
    )
    assert torch.equal(out, uncached)


def test_logits_fed_in_pieces_equal_those_of_one_full_pass() -> None:
    made, tokens = model(), ids(2, 31)
    full = made(input_ids=tokens).logits
    cache, pieces = DynamicCache(config=made.config), []
    for start, stop in ((0, 11), (11, 12), (12, 25), (25, 31)):
        pieces.append(made(input_ids=tokens[:, start:stop], cache=cache).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-4, rtol=1e-4)


def test_left_padding_and_a_longer_batch_mate_change_neither_logits_nor_routes() -> None:
    made, tokens = model(), ids(1, 15)
    alone = made(input_ids=tokens, output_routing=True)
    padded = torch.cat([torch.zeros(1, 8, dtype=torch.long), tokens], 1)
    batch = torch.cat([padded, ids(1, 23)], 0)
    mask = torch.ones_like(batch)
    mask[0, :8] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    together = made(input_ids=batch, attention_mask=mask, position_ids=positions, output_routing=True)
    torch.testing.assert_close(together.logits[0, 8:], alone.logits[0], atol=1e-4, rtol=1e-4)
    assert alone.routing is not None
    for ours, theirs in zip(alone.routing, together.routing, strict=True):
        assert torch.equal(ours["expert_index"][0], theirs["expert_index"][0, 8:])
        torch.testing.assert_close(ours["mask_density"][0], theirs["mask_density"][0, 8:])


def test_a_later_token_cannot_change_an_earlier_logit() -> None:
    made, tokens = model(), ids(1, 20)
    changed = tokens.clone()
    changed[0, 14:] = (changed[0, 14:] + 1) % 128
    before, after = made(input_ids=tokens).logits, made(input_ids=changed).logits
    torch.testing.assert_close(before[:, :14], after[:, :14])
    assert not torch.allclose(before[:, 14:], after[:, 14:])


def test_output_routing_reports_experts_scores_and_mask_density_of_every_token() -> None:
    out = model()(input_ids=ids(2, 12), output_routing=True)
    assert out.routing is not None
    assert len(out.routing) == 3
    for layer in out.routing:
        assert layer["expert_index"].shape == (2, 12, 2)
        assert layer["gate_logits"].shape == (2, 12, 8)
        torch.testing.assert_close(layer["expert_weight"].sum(-1), torch.ones(2, 12))
        best = layer["gate_logits"].topk(2, dim=-1).indices
        assert torch.equal(best, layer["expert_index"])
        assert layer["mask_density"][:, :6].eq(1).all()
        assert layer["mask_density"][:, 6:].lt(1).all()
    assert model()(input_ids=ids(2, 12)).routing is None


def test_the_loss_is_cross_entropy_plus_the_two_routing_losses() -> None:
    tokens = ids(2, 12)
    plain = model(moe_router_load_balancing_loss_coef=0.0, moe_gating_l1_coef=0.0)
    out = plain(input_ids=tokens, labels=tokens)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    added = model(moe_router_load_balancing_loss_coef=0.02, moe_gating_l1_coef=0.0)(input_ids=tokens, labels=tokens)
    assert 0.02 * 0.9 < (added.loss - out.loss).item() < 0.02 * 4


def test_every_parameter_but_the_mask_predictor_learns_from_the_loss() -> None:
    made, tokens = model(), ids(4, 24)
    made.train()
    made(input_ids=tokens, labels=tokens).loss.backward()
    silent = {name for name, p in made.named_parameters() if p.grad is None or not p.grad.any()}
    assert all("mask_predictor" in name for name in silent)


def test_saving_and_auto_loading_gives_the_same_logits(tmp_path: Path) -> None:
    register()
    made, tokens = model(ring_phase=True), ids(1, 20)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, Glm5RefForCausalLM)
    assert torch.equal(loaded(input_ids=tokens).logits, made(input_ids=tokens).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert isinstance(AutoModel.from_pretrained(tmp_path), Glm5RefModel)


def test_the_head_can_be_asked_for_the_last_logits_only() -> None:
    made, tokens = model(), ids(1, 10)
    torch.testing.assert_close(made(input_ids=tokens, logits_to_keep=2).logits, made(input_ids=tokens).logits[:, -2:])


def test_hidden_states_are_those_before_each_layer_and_the_normalized_last() -> None:
    made, tokens = model(), ids(1, 10)
    out = made(input_ids=tokens, output_hidden_states=True)
    assert out.hidden_states is not None
    assert len(out.hidden_states) == 4
    torch.testing.assert_close(out.hidden_states[0], made.model.embed_tokens(tokens))
    torch.testing.assert_close(made.lm_head(out.hidden_states[-1]), out.logits)


def test_ids_and_embeddings_cannot_both_be_given() -> None:
    made = model()
    with pytest.raises(ValueError, match="input_ids"):
        made(input_ids=ids(1, 4), inputs_embeds=torch.zeros(1, 4, 32))
