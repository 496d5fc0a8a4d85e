"""Configuration of the reference GLM-5: the keys DESIGN section 8 names, checked where they are made."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig


@strict
class Glm5RefConfig(PreTrainedConfig):  # type: ignore[misc]
    """Settings of one `glm5_ref` model. A value that cannot work raises ValueError naming the key.

    `gqa_group_size` gives the query heads that share one key/value head, for the first, middle and last third of the
    layers. `dsa_sparse_ratio` of the visible keys are dropped for each query that sees more than `dsa_min_context` of
    them.
    """

    model_type = "glm5_ref"

    vocab_size: int = 2496
    hidden_size: int = 128
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    head_dim: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_gating_hidden_size: int = 64
    moe_routing_temperature: float = 1.0
    moe_gating_layernorm_mode: str = "per_token"
    moe_router_load_balancing_loss_coef: float = 0.02
    moe_gating_l1_coef: float = 0.0001
    gqa_group_size: list[int] | None = None
    dsa_sparse_ratio: float = 0.3
    dsa_min_context: int = 1024
    dsa_predictor_rank: int = 8
    rope_theta: float = 1_000_000.0
    ring_phase: bool = False
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    int4_quantization_scheme: str | None = None
    protect_numeric_tokens: bool = True
    layer_types: list[str] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.gqa_group_size is None:
            self.gqa_group_size = [8, 4, 2]
        if self.layer_types is None:
            # the cache layer that transformers keeps for models with a key index beside keys and values
            self.layer_types = ["indexed_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Raise ValueError naming the first key whose value cannot work."""
        for key in _POSITIVE:
            value = getattr(self, key)
            _require(isinstance(value, int | float) and value > 0, key, value, "a number above 0")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (rotary pairs)")
        sizes = self.gqa_group_size or []
        _require(len(sizes) == 3, "gqa_group_size", sizes, "three numbers, one for each third of the layers")
        divides = all(size > 0 and self.num_attention_heads % size == 0 for size in sizes)
        _require(divides, "gqa_group_size", sizes, f"divisors of num_attention_heads={self.num_attention_heads}")
        top_k = self.num_experts_per_tok
        _require(1 <= top_k <= self.num_experts, "num_experts_per_tok", top_k, f"1..{self.num_experts} (num_experts)")
        _require(0 <= self.dsa_sparse_ratio < 1, "dsa_sparse_ratio", self.dsa_sparse_ratio, "0 <= ratio < 1")
        _require(self.dsa_min_context >= 0, "dsa_min_context", self.dsa_min_context, "0 or more keys")
        mode = self.moe_gating_layernorm_mode
        _require(mode in ("per_token", "none"), "moe_gating_layernorm_mode", mode, '"per_token" or "none"')
        for key in ("moe_router_load_balancing_loss_coef", "moe_gating_l1_coef"):
            _require(getattr(self, key) >= 0, key, getattr(self, key), "0 or more")
        scheme = self.int4_quantization_scheme
        _require(scheme in (None, "eampq"), "int4_quantization_scheme", scheme, 'null or "eampq"')

    def kv_heads(self, layer: int) -> int:
        """Key/value heads of a layer: fewer query heads share one as depth grows."""
        assert self.gqa_group_size is not None
        return self.num_attention_heads // self.gqa_group_size[layer * 3 // self.num_hidden_layers]


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "num_experts",
    "moe_gating_hidden_size",
    "moe_routing_temperature",
    "dsa_predictor_rank",
    "rope_theta",
    "max_position_embeddings",
    "rms_norm_eps",
)


def _require(holds: bool, key: str, found: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{key} of a glm5_ref config is {found!r}; expected {expected}")
