"""Dynamic sparse attention: a small predictor decides which keys each query may drop.

Letters: B batch, Q queries, S keys, T tokens, D hidden, R predictor rank, E experts, K experts taken by a
token, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glm5_quant.model.glm5.configuration import Glm5RefConfig

QUERY_CHUNK = 512  # rows ranked at once, so that memory follows QUERY_CHUNK * S


class MaskPredictor(nn.Module):
    """Low-rank query/key scores that also see which experts the token took in the layer below."""

    def __init__(self, config: Glm5RefConfig) -> None:
        super().__init__()
        rank = config.dsa_predictor_rank
        self.q = nn.Linear(config.hidden_size, rank, bias=False)
        self.k = nn.Linear(config.hidden_size, rank, bias=False)
        self.expert_q = nn.Embedding(config.num_experts, rank)
        self.expert_k = nn.Embedding(config.num_experts, rank)

    def forward(self, hidden_BTD: Tensor, expert_BTK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Predictor queries and keys, each [B, T, R]; `expert_BTK` is None in the first layer."""
        query_BTR, key_BTR = self.q(hidden_BTD), self.k(hidden_BTD)
        if expert_BTK is not None:
            query_BTR = query_BTR + self.expert_q(expert_BTK).sum(dim=-2)
            key_BTR = key_BTR + self.expert_k(expert_BTK).sum(dim=-2)
        return query_BTR, key_BTR


def scores(query_BQR: Tensor, key_BSR: Tensor) -> Tensor:
    """How much each query wants each key, [B, Q, S] float32."""
    product: Tensor = query_BQR.float() @ key_BSR.float().transpose(1, 2) / query_BQR.shape[-1] ** 0.5
    return product


def causal_visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool [1, Q, S]: the last `queries` of `keys` positions, each seeing itself and what came before."""
    position_Q = torch.arange(keys - queries, keys, device=device)
    return (torch.arange(keys, device=device)[None, :] <= position_Q[:, None])[None]


def keep_mask(query_BQR: Tensor, key_BSR: Tensor, visible_BQS: Tensor | None, ratio: float, min_context: int) -> Tensor:
    """Bool [B, Q, S]: visible keys minus the floor(ratio * visible) lowest-scored. `visible_BQS` None: causal.

    A query that sees at most `min_context` keys keeps all of them. The rule looks at one query at a time, so a step
    with a cache keeps the same keys as one full pass. Keys that tie with the last one kept are kept too.
    """
    queries, keys = query_BQR.shape[1], key_BSR.shape[1]
    kept_BQS = torch.zeros(len(query_BQR), queries, keys, dtype=torch.bool, device=query_BQR.device)
    for start in range(0, queries, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, queries)
        reach = keys if visible_BQS is not None else keys - queries + stop  # causal rows see nothing beyond
        chunk_visible = None if visible_BQS is None else visible_BQS[:, start:stop]
        score_BQS = scores(query_BQR[:, start:stop], key_BSR[:, :reach])
        kept_BQS[:, start:stop, :reach] = _keep_rows(score_BQS, chunk_visible, ratio, min_context)
    return kept_BQS


def _keep_rows(score_BQS: Tensor, visible_BQS: Tensor | None, ratio: float, min_context: int) -> Tensor:
    """Rank every row by one k-th value call: hidden keys become -inf or +inf so that all rows share one rank."""
    queries, keys = score_BQS.shape[1:]
    if visible_BQS is None:
        visible_BQS = causal_visible(queries, keys, score_BQS.device)
        seen_BQ1 = torch.arange(keys - queries + 1, keys + 1, device=score_BQS.device)[None, :, None]
        hidden_rank_BQS = torch.arange(1, keys + 1, device=score_BQS.device) - seen_BQ1
    else:
        seen_BQ1 = visible_BQS.sum(dim=-1, keepdim=True)
        hidden_rank_BQS = (~visible_BQS).cumsum(dim=-1)
    drop_BQ1 = (seen_BQ1.double() * ratio).floor().long() * (seen_BQ1 > min_context)
    if not drop_BQ1.any():
        return visible_BQS
    rank = int(keys * ratio)  # >= drop of every row, and rank - drop <= number of hidden keys
    filler_BQS = torch.where(hidden_rank_BQS <= rank - drop_BQ1, -torch.inf, torch.inf)
    ranked_BQS = torch.where(visible_BQS, score_BQS, filler_BQS.to(score_BQS))
    threshold_BQ1 = ranked_BQS.kthvalue(rank + 1, dim=-1, keepdim=True).values
    return visible_BQS & ((score_BQS >= threshold_BQ1) | (drop_BQ1 == 0))


def alignment_loss(query_BQR: Tensor, key_BSR: Tensor, visible_BQS: Tensor, attention_BHQS: Tensor) -> Tensor:
    """KL from the attention actually paid (mean over heads, no gradient) to softmax of the predictor's scores.

    This is how the selection is trained, for the selection itself has no gradient (as DeepSeek-V3.2 does).
    """
    paid_BQS = attention_BHQS.detach().float().mean(dim=1)
    log_BQS = scores(query_BQR, key_BSR).masked_fill(~visible_BQS, -torch.inf).log_softmax(dim=-1)
    term_BQS = torch.where(visible_BQS, paid_BQS * (paid_BQS.clamp_min(1e-9).log() - log_BQS), 0.0)
    return term_BQS.sum(dim=-1).mean()


def paid_attention(query_BHQC: Tensor, key_BHSC: Tensor, visible_BQS: Tensor) -> Tensor:
    """Attention weights [B, H, Q, S] in float32 for a few query rows; key heads are repeated to match."""
    key_BHSC = key_BHSC.repeat_interleave(query_BHQC.shape[1] // key_BHSC.shape[1], dim=1)
    logit_BHQS = query_BHQC.float() @ key_BHSC.float().transpose(2, 3) / query_BHQC.shape[-1] ** 0.5
    return F.softmax(logit_BHQS.masked_fill(~visible_BQS[:, None], -torch.inf), dim=-1)
