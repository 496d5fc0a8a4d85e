"""What ships as glm5-tiny: its size and shape, and that it answers. Figures in full are in docs/glm5-tiny.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from glm5_quant.model import tiny
from glm5_quant.model.glm5 import register
from glm5_quant.model.tiny.corpus import EVALUATION_SEED, dialogues
from glm5_quant.model.tiny.score import buckets, score


@pytest.fixture(scope="module")
def packaged() -> tuple[Any, Any]:
    register()
    model = AutoModelForCausalLM.from_pretrained(tiny.folder(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(tiny.folder())


def test_the_weights_are_bfloat16_finite_and_at_most_sixteen_megabytes() -> None:
    path = tiny.folder() / "model.safetensors"
    assert path.stat().st_size <= 16_000_000
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert tensor.isfinite().all(), name


def test_every_width_of_a_quantized_matrix_is_a_multiple_of_sixty_four() -> None:
    with safe_open(tiny.folder() / "model.safetensors", "pt") as file:
        matrices = [name for name in file.keys() if "_proj" in name]  # noqa: SIM118
        assert len(matrices) >= 18
        for name in matrices:
            assert all(size % 64 == 0 for size in file.get_slice(name).get_shape()[-2:]), name


def test_the_folder_holds_all_that_a_checkpoint_needs() -> None:
    names = {path.name for path in tiny.folder().iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
    }


def test_the_config_has_eight_experts_top_two_and_eight_thousand_positions(packaged: tuple[Any, Any]) -> None:
    config = packaged[0].config
    assert config.num_experts >= 8
    assert config.num_experts_per_tok == 2
    assert config.max_position_embeddings == 8192
    assert config.dsa_sparse_ratio == 0.3


def test_held_out_questions_are_answered_and_no_expert_idles_or_dominates(packaged: tuple[Any, Any]) -> None:
    result = score(*packaged, dialogues(EVALUATION_SEED + 500_000, 8, 40))
    assert result.share("asked 1-20") >= 0.9
    assert result.share("noted") >= 0.99
    assert result.expert_share.min() > 0.03
    assert result.expert_share.max() < 0.40


def test_it_answers_in_words_when_asked_in_chat(packaged: tuple[Any, Any]) -> None:
    model, tokenizer = packaged
    messages = [
        {"role": "user", "content": "Note: the upper limit of Alder is 3500 USD."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "Note: the lower limit of Alder is 271 USD."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is the upper limit of Alder?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer == "The upper limit of Alder is 3500 USD."


@pytest.mark.slow
def test_positions_to_eight_thousand_give_finite_logits(packaged: tuple[Any, Any]) -> None:
    model, tokenizer = packaged
    ids = torch.randint(10, len(tokenizer), (1, 8192), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids, logits_to_keep=64, use_cache=False).logits
    assert logits.isfinite().all()


def test_an_answer_counts_for_its_kind_and_its_distance() -> None:
    assert buckets("number", 20) == ["asked", "number", "asked 1-20", "number 1-20"]
    assert buckets("word", 99)[-1] == "word 21-99"
    assert buckets("fact", 100)[-1] == "fact 100-200"
    assert buckets("sum", 3) == ["sum"]
