"""The reference GLM-5 as a transformers model: decoder layer, base model, causal language model.

Letters: B batch, T tokens, D hidden, V vocabulary, K experts taken by a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.deprecation import deprecate_kwarg

from glm5_quant.model.glm5.attention import Attention, Trace
from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.experts import Experts, SparseMlp
from glm5_quant.model.glm5.gating import gating_l1_loss, load_balancing_loss
from glm5_quant.model.glm5.rotary import RotaryEmbedding, inverse_frequencies


@dataclass
class Glm5RefOutput(ModelOutput):  # type: ignore[misc]
    """Outputs of both models; `routing` is filled with output_routing=True: one entry a layer.

    routing[i] = {"expert_index": [B, T, K] int64, "expert_weight": [B, T, K], "gate_logits": [B, T, E],
    "mask_density": [B, T], the share of visible keys each query kept}.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[dict[str, Tensor], ...] | None = None


class DecoderLayer(nn.Module):
    """Attention, then experts, each on a normalized input and added back."""

    def __init__(self, config: Glm5RefConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = SparseMlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        prev_expert_index: Tensor | None = None,
        trace: Trace | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor]:
        """(hidden states [B, T, D], experts taken [B, T, K]); the layer above needs the second."""
        attended = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, attention_mask, cache, prev_expert_index, trace
        )
        hidden_states = hidden_states + attended
        mixed, routing = self.mlp(self.post_attention_layernorm(hidden_states))
        if trace is not None:
            trace.routing.append(routing)
        return hidden_states + mixed, routing.index_TK.view(*hidden_states.shape[:2], -1)


class Glm5RefPreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What transformers needs to know of every glm5_ref model."""

    config_class = Glm5RefConfig
    base_model_prefix = "model"
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Experts):
            init.normal_(module.gate_up_proj, std=self.config.initializer_range)
            init.normal_(module.down_proj, std=self.config.initializer_range)
        if isinstance(module, Attention) and module.ring_phase is not None:
            init.zeros_(module.ring_phase)
        if isinstance(module, RotaryEmbedding):
            init.copy_(module.inv_freq, inverse_frequencies(self.config))


class Glm5RefModel(Glm5RefPreTrainedModel):
    """Embedding, decoder layers, final norm."""

    def __init__(self, config: Glm5RefConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        trace: Trace | None = None,
        **kwargs: Any,
    ) -> Glm5RefOutput:
        """Token ids [B, T] to hidden states [B, T, D]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + hidden_states.shape[1], device=hidden_states.device)[None]
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        states = [hidden_states]
        expert_index = None
        for layer in self.layers:
            hidden_states, expert_index = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=causal_mask,
                position_ids=position_ids,
                cache=cache,
                prev_expert_index=expert_index,
                trace=trace,
            )
            states.append(hidden_states)
        hidden_states = self.norm(hidden_states)
        return Glm5RefOutput(
            last_hidden_state=hidden_states,
            cache=cache,
            hidden_states=(*states[:-1], hidden_states) if output_hidden_states else None,
        )


class Glm5RefForCausalLM(Glm5RefPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The base model with a head that shares the embedding's matrix."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Glm5RefConfig) -> None:
        super().__init__(config)
        self.model = Glm5RefModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_routing: bool = False,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Glm5RefOutput:
        """Logits [B, T, V] (or the last `logits_to_keep`); with `labels` [B, T] also the loss, -100 ignored."""
        trace = Trace() if output_routing or labels is not None else None
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            trace=trace,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        logits = self.lm_head(hidden[:, keep] if not isinstance(keep, int) else hidden)
        loss = None
        if labels is not None and trace is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            loss = loss + self.routing_loss(trace)
        return Glm5RefOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            routing=_routing(trace, hidden.shape[:2]) if output_routing and trace is not None else None,
        )

    def routing_loss(self, trace: Trace) -> Tensor:
        """Load balancing and L1 on the gating logits, each a mean over layers times its coefficient."""
        balance = torch.stack(
            [load_balancing_loss(r, self.config.moe_routing_temperature) for r in trace.routing]
        ).mean()
        l1 = torch.stack([gating_l1_loss(r) for r in trace.routing]).mean()
        total: Tensor = self.config.moe_router_load_balancing_loss_coef * balance + self.config.moe_gating_l1_coef * l1
        return total


def _routing(trace: Trace, shape_BT: torch.Size) -> tuple[dict[str, Tensor], ...]:
    return tuple(
        {
            "expert_index": routing.index_TK.view(*shape_BT, -1),
            "expert_weight": routing.weight_TK.view(*shape_BT, -1),
            "gate_logits": routing.logits_TE.view(*shape_BT, -1),
            "mask_density": density_BT,
        }
        for routing, density_BT in zip(trace.routing, trace.mask_density_BT, strict=True)
    )
