"""The configuration of the reference GLM-5 keeps what it is given and refuses what cannot work, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from glm5_quant.model.glm5 import register
from glm5_quant.model.glm5.configuration import Glm5RefConfig

DESIGN_KEYS = {
    "moe_router_load_balancing_loss_coef": 0.02,
    "moe_routing_temperature": 1.0,
    "moe_gating_layernorm_mode": "per_token",
    "gqa_group_size": [8, 4, 2],
    "dsa_sparse_ratio": 0.3,
    "rope_theta": 1_000_000.0,
    "int4_quantization_scheme": None,
    "protect_numeric_tokens": True,
}


def config(**overrides: Any) -> Glm5RefConfig:
    return Glm5RefConfig(**{"num_attention_heads": 8, **overrides})


def test_the_keys_of_the_design_have_their_defaults() -> None:
    made = config().to_dict()
    assert {key: made[key] for key in DESIGN_KEYS} == DESIGN_KEYS


def test_auto_config_reads_back_every_value_unchanged(tmp_path: Path) -> None:
    register()
    register()
    written = config(
        moe_routing_temperature=0.7,
        dsa_sparse_ratio=0.25,
        rope_theta=5e5,
        gqa_group_size=[8, 2, 1],
        int4_quantization_scheme="eampq",
        protect_numeric_tokens=False,
        moe_router_load_balancing_loss_coef=0.03,
        eos_token_id=[0, 4],
    )
    written.save_pretrained(tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, Glm5RefConfig)
    ignore = ("transformers_version", "_name_or_path")
    assert {k: v for k, v in read.to_dict().items() if k not in ignore} == {
        k: v for k, v in written.to_dict().items() if k not in ignore
    }


def test_fewer_query_heads_share_a_key_head_as_depth_grows() -> None:
    made = config(num_hidden_layers=7)
    assert [made.kv_heads(layer) for layer in range(7)] == [1, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("head_dim", 63),
        ("gqa_group_size", [8, 4]),
        ("gqa_group_size", [8, 4, 3]),
        ("gqa_group_size", [8, 4, 0]),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", 9),
        ("dsa_sparse_ratio", 1.0),
        ("dsa_sparse_ratio", -0.1),
        ("dsa_sparse_ratio", float("nan")),
        ("dsa_min_context", -1),
        ("moe_routing_temperature", 0.0),
        ("moe_routing_temperature", float("nan")),
        ("moe_gating_layernorm_mode", "per_batch"),
        ("moe_router_load_balancing_loss_coef", -0.02),
        ("rope_theta", 0.0),
        ("int4_quantization_scheme", "gptq"),
        ("vocab_size", "many"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(Exception, match=key) as caught:
        config(**{key: value})
    assert isinstance(caught.value, ValueError | TypeError)
