"""What two models' next-token distributions say about each scored token.

Per token: negative log-likelihood of both, KL(source || quantized) in nats, and the most likely token of both. Work is
done in float32 over chunks of positions, so that no more than one chunk of probabilities exists beside the logits of
the window; sums over tokens are float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class SourceScores:
    """The source at S scored positions: log-probabilities in chunks [C, V], NLL and top-1 (float64/int64 [S])."""

    log_probs: tuple[torch.Tensor, ...]
    targets: torch.Tensor
    nll: NDArray[np.float64]
    top1: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """One export against the source at S scored positions: arrays of length S."""

    targets: NDArray[np.int64]
    nll_source: NDArray[np.float64]
    nll: NDArray[np.float64]
    kl: NDArray[np.float64]
    top1_source: NDArray[np.int64]
    top1: NDArray[np.int64]

    def first_bad(self) -> int | None:
        """Index of the first token whose figures are not finite, or None."""
        fine = np.isfinite(self.nll_source) & np.isfinite(self.nll) & np.isfinite(self.kl)
        return None if fine.all() else int(np.argmin(fine))


def gather_chunks(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> Iterator[torch.Tensor]:
    """float32 [C, V] logits that predict the tokens at (rows, positions), chunk by chunk."""
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    rows, positions = rows.to(logits.device), positions.to(logits.device)
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)
        yield logits[rows[chunk], positions[chunk] - 1].float()


def score_source(
    logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
) -> SourceScores:
    """Reduce the source's logits [B, T, V] to log-probabilities of what precedes each target (int64 [S] each)."""
    log_probs = tuple(torch.log_softmax(chunk, dim=-1) for chunk in gather_chunks(logits, rows, positions))
    nll, top1 = _nll_and_top1(iter(log_probs), targets)
    return SourceScores(log_probs=log_probs, targets=targets, nll=nll, top1=top1)


def compare(source: SourceScores, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> TokenScores:
    """Score an export's logits [B, T, V] at the same positions against the source."""
    start, kls, nlls, tops = 0, [], [], []
    for reference, chunk in zip(source.log_probs, gather_chunks(logits, rows, positions), strict=True):
        log_q = torch.log_softmax(chunk, dim=-1)
        reference = reference.to(log_q.device)
        kls.append(kl_of(reference, log_q))
        target = source.targets[start : start + len(log_q)]
        nll, top = _nll_and_top1(iter([log_q]), target)
        nlls.append(nll)
        tops.append(top)
        start += len(log_q)
    return TokenScores(
        targets=source.targets.numpy(),
        nll_source=source.nll,
        nll=np.concatenate(nlls),
        kl=np.concatenate(kls),
        top1_source=source.top1,
        top1=np.concatenate(tops),
    )


def kl_of(log_p: torch.Tensor, log_q: torch.Tensor) -> NDArray[np.float64]:
    """KL(p || q) in nats per row of [C, V] log-probabilities; entries of zero probability add nothing."""
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
    # A NaN in p fails `p > 0`; it has to stay visible, or a broken model would look perfect.
    terms = torch.where(p.isnan(), p, terms)
    summed: NDArray[np.float64] = terms.sum(-1, dtype=torch.float64).cpu().numpy()
    return summed


def _nll_and_top1(
    chunks: Iterator[torch.Tensor], targets: torch.Tensor
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    start, nlls, tops = 0, [], []
    for chunk in chunks:
        target = targets[start : start + len(chunk)].to(chunk.device)
        nlls.append(-chunk.gather(1, target[:, None])[:, 0].double().cpu().numpy())
        tops.append(chunk.argmax(-1).cpu().numpy())
        start += len(chunk)
    return np.concatenate(nlls), np.concatenate(tops)
