"""Grouped-query attention whose group size falls with depth, with rotary positions and the dynamic sparse mask.

Letters: B batch, T new tokens, S cached and new tokens, H query heads, G key/value heads, C head channels,
D hidden, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from glm5_quant.model.glm5 import sparse_mask
from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.gating import Routing
from glm5_quant.model.glm5.rotary import apply_ring_phase, apply_rotary

SHORT_TRAINING = 512  # up to this length, plain matrix products beat the flash kernel's backward pass on CPU


@dataclass
class Trace:
    """What a forward pass leaves for whoever asked: routing and mask density a layer, predictor losses in training."""

    align_rows: int = 0  # query rows a sequence on which the mask predictor is trained; 0 outside training
    routing: list[Routing] = field(default_factory=list)
    mask_density_BT: list[Tensor] = field(default_factory=list)
    alignment: list[Tensor] = field(default_factory=list)


class Attention(nn.Module):
    """Causal attention of one layer."""

    def __init__(self, config: Glm5RefConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.sparse_ratio, self.min_context = config.dsa_sparse_ratio, config.dsa_min_context
        heads, kv_heads, d = config.num_attention_heads, config.kv_heads(layer_idx), config.hidden_size
        self.q_proj = nn.Linear(d, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(d, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(d, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, d, bias=False)
        self.mask_predictor = sparse_mask.MaskPredictor(config)
        self.ring_phase = nn.Parameter(torch.zeros(heads, self.head_dim // 2)) if config.ring_phase else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        prev_expert_index: Tensor | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]. `attention_mask` None means plain causal; else [B, 1, T, S], bool or additive."""
        query, key, value = self.project(hidden_states, position_embeddings)
        index_query, index_key = self.mask_predictor(hidden_states.detach(), prev_expert_index)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            if self.sparse_ratio > 0:
                index_key = cache.update_indexer(index_key, self.layer_idx)
        visible = _as_bool(attention_mask)
        if trace is not None and trace.align_rows:
            self.align(trace, query, key, index_query, index_key, visible)
        if self.sparse_ratio > 0 and key.shape[2] > self.min_context:
            kept = sparse_mask.keep_mask(index_query, index_key, visible, self.sparse_ratio, self.min_context)
            out = _attend(query, key, value, kept)
            if trace is not None:
                seen = visible if visible is not None else _causal(query, key)
                trace.mask_density_BT.append(kept.sum(-1) / seen.sum(-1).clamp_min(1))
        else:
            out = _attend(query, key, value, visible)
            if trace is not None:
                trace.mask_density_BT.append(torch.ones(hidden_states.shape[:2], device=hidden_states.device))
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:2], -1))
        return projected

    def project(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, H, T, C], key and value [B, G, T, C]; query and key carry their positions."""
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary(query, *position_embeddings), apply_rotary(key, *position_embeddings)
        if self.ring_phase is not None:
            query = apply_ring_phase(query, self.ring_phase)
        return query, key, value

    def align(
        self, trace: Trace, query: Tensor, key: Tensor, index_query: Tensor, index_key: Tensor, visible: Tensor | None
    ) -> None:
        """Add the predictor's training loss on a few random query rows."""
        rows = torch.randint(query.shape[2], (trace.align_rows,), device=query.device)
        seen = (visible if visible is not None else _causal(query, key))[:, rows].expand(len(query), -1, -1)
        paid = sparse_mask.paid_attention(query[:, :, rows].detach(), key.detach(), seen)
        trace.alignment.append(sparse_mask.alignment_loss(index_query[:, rows], index_key, seen, paid))


def _as_bool(mask: Tensor | None) -> Tensor | None:
    """[B, 1, T, S] of either convention to bool [B, T, S], True where a key may be seen."""
    if mask is None:
        return None
    return (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]


def _causal(query: Tensor, key: Tensor) -> Tensor:
    return sparse_mask.causal_visible(query.shape[2], key.shape[2], query.device)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax attention [B, H, T, C]; `visible` [B, T, S] or None for plain causal."""
    if visible is None and query.shape[2] not in (1, key.shape[2]):
        visible = _causal(query, key)  # is_causal aligns top-left, a cached prefix needs bottom-right
    if visible is None and query.requires_grad and query.shape[2] <= SHORT_TRAINING:
        return _attend_short(query, key, value)
    mask = None if visible is None else visible[:, None]
    causal = mask is None and query.shape[2] > 1
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True)


def _attend_short(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention for training on short windows: the heads of a group are folded into the rows."""
    batch, heads, length, channels = query.shape
    groups = key.shape[1]
    folded = query.reshape(batch * groups, heads // groups * length, channels)
    future = torch.full((length, length), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    bias = future.repeat(heads // groups, 1)[None]
    logits = torch.baddbmm(bias, folded, key.reshape(-1, length, channels).mT, alpha=channels**-0.5)
    return (logits.softmax(dim=-1) @ value.reshape(-1, length, channels)).view(query.shape)
