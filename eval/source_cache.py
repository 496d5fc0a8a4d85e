"""The source's answers kept on disk, so that exports measured later (or one at a time) cost no second source pass.

Per scored token: NLL of the true token, and the top-k log-probabilities with their ids (8 bytes an entry, float32 and
int32). What lies outside the top k is one lump of probability; KL over k + 1 outcomes is a lower bound of the whole KL
(data-processing inequality), tight when the lump is small. One safetensors file a batch, each with a digest of its
token ids and of what made it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from glm5_quant.eval.divergence import SourceScores, TokenScores, gather_chunks, kl_of
from glm5_quant.model.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The source at S positions, cut to k outcomes: ids int32 [S, k] (most likely first), log_p float32 [S, k]."""

    ids: torch.Tensor
    log_p: torch.Tensor
    targets: torch.Tensor
    nll: NDArray[np.float64]


def cut_to_top_k(scores: SourceScores, k: int) -> TopK:
    """Keep the k most likely outcomes of each position."""
    parts = [chunk.topk(min(k, chunk.shape[-1]), dim=-1) for chunk in scores.log_probs]
    return TopK(
        ids=torch.cat([part.indices for part in parts]).to("cpu", torch.int32),
        log_p=torch.cat([part.values for part in parts]).cpu(),
        targets=scores.targets,
        nll=scores.nll,
    )


def compare_top_k(source: TopK, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> TokenScores:
    """Like `divergence.compare`, with KL over the source's top k and one lump for all other outcomes."""
    start, kls, nlls, tops = 0, [], [], []
    for chunk in gather_chunks(logits, rows, positions):
        span = slice(start, start + len(chunk))
        log_q = torch.log_softmax(chunk, dim=-1)
        picked = log_q.gather(1, source.ids[span].long().to(log_q.device)).cpu()
        kls.append(kl_of(_with_rest(source.log_p[span]), _with_rest(picked)))
        target = source.targets[span].to(log_q.device)
        nlls.append(-log_q.gather(1, target[:, None])[:, 0].double().cpu().numpy())
        tops.append(log_q.argmax(-1).cpu().numpy())
        start += len(chunk)
    return TokenScores(
        targets=source.targets.numpy(),
        nll_source=source.nll,
        nll=np.concatenate(nlls),
        kl=np.concatenate(kls),
        top1_source=source.ids[:, 0].long().numpy(),
        top1=np.concatenate(tops),
    )


def _with_rest(log_p: torch.Tensor) -> torch.Tensor:
    """float64 [S, k + 1]: log-probabilities and that of everything else."""
    wide = log_p.double()
    rest = (1.0 - wide.exp().sum(-1, keepdim=True)).clamp(min=1e-12)
    # NaN survives clamp, so a broken model still shows.
    return torch.cat([wide, rest.log()], dim=-1)


class SourceCache:
    """A folder of top-k answers. `made_by` names source, dtype, prefix and top_k; it must agree on reading."""

    def __init__(self, folder: Path | str, *, top_k: int, made_by: str) -> None:
        self.folder, self.top_k, self.made_by = Path(folder), top_k, made_by

    def _file(self, number: int) -> Path:
        return self.folder / f"batch-{number:06d}.safetensors"

    def has(self, number: int) -> bool:
        """Whether batch `number` was kept."""
        return self._file(number).exists()

    def mark_empty(self, number: int) -> None:
        """Note that batch `number` has nothing to score."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file(number).touch()

    def write(self, number: int, ids: torch.Tensor, scores: SourceScores) -> TopK:
        """Keep a batch; the file appears whole or not at all. Returns what a reader will get."""
        kept = cut_to_top_k(scores, self.top_k)
        tensors = {"ids": kept.ids, "log_p": kept.log_p, "targets": kept.targets, "nll": torch.from_numpy(kept.nll)}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._file(number)
        partial = path.with_suffix(".partial")
        try:
            save_file(tensors, partial, metadata={"tokens": _digest(ids), "made_by": self.made_by})
        except SafetensorError as error:
            raise UserError("the source's answers cannot be kept", file=path, found=str(error)) from error
        os.replace(partial, path)  # noqa: PTH105 - replaces an older file on every system
        return kept

    def read(self, number: int, ids: torch.Tensor) -> TopK:
        """A kept batch; UserError when it was made from other tokens, another source or other settings, or cannot be
        read."""
        path, hint = self._file(number), "Delete the folder or name another one."
        try:
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
                for item, expected in (("made_by", self.made_by), ("tokens", _digest(ids))):
                    if found.get(item) != expected:
                        raise UserError(
                            "the cache of the source's answers is for another run",
                            file=path,
                            item=item,
                            found=found.get(item),
                            expected=expected,
                            hint=hint,
                        )
                tensors = {name: file.get_tensor(name) for name in ("ids", "log_p", "targets", "nll")}
        except SafetensorError as error:
            problem = "the cache of the source's answers is for another run, or damaged"
            empty = path.stat().st_size == 0
            raise UserError(problem, file=path, found="no answers" if empty else str(error), hint=hint) from error
        return TopK(ids=tensors["ids"], log_p=tensors["log_p"], targets=tensors["targets"], nll=tensors["nll"].numpy())


def _digest(ids: torch.Tensor) -> str:
    shape = ",".join(map(str, ids.shape)).encode()
    return hashlib.sha256(shape + ids.numpy().tobytes()).hexdigest()[:32]
