"""Calibration windows: documents joined into rows of exactly `seqlen` tokens.

Every window is full, so there is no padding anywhere, no attention mask, and nothing a pad token could distort:
windows of equal length give the same statistics in any batch. Long documents run on from window to window and are
never skipped.

Dimensions: W windows, S tokens of a window (seqlen).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5_quant.calibrate.scripts import hint_about_scripts, script_shares
from glm5_quant.model.errors import UserError
from glm5_quant.model.texts import Text, Texts
from glm5_quant.model.tokenizing import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens of real text are far shorter than this. A document is clipped here before it is tokenized, so that a huge file
# need not be tokenized whole for a few windows.
_CHARACTERS_PER_TOKEN = 24


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Calibration windows and the account of what went into them."""

    ids: Tensor
    """int64 [W, S]; S is below `seqlen` only where the data do not fill a single window."""
    lengths: tuple[int, ...]
    documents: tuple[int, ...]
    """Number of documents with tokens in each window."""
    rows_in: int
    rows_empty: int
    rows_used: int
    rows_cut: int
    """Documents of which tokens were left out because the last window was full."""
    rows_left: int
    """Documents never needed: the windows were full before their turn came."""
    tokens_used: int
    tokens_cut: int
    """Tokens of documents begun but not kept; a lower bound where a huge document was not tokenized to its end."""
    scripts: dict[str, float]
    """Share of each writing system among the letters of the documents used."""
    sha256: str
    """Of the ids as little-endian int64, window after window."""
    warnings: tuple[str, ...]


def pack_windows(
    texts: Texts, tokenizer: PreTrainedTokenizerBase, *, num_samples: int = 128, seqlen: int = 512, seed: int = 0
) -> Packed:
    """Join documents, in an order drawn by `seed`, into at most `num_samples` windows of `seqlen` tokens.

    Between two documents stands only what the tokenizer itself puts around a text (BOS, EOS or nothing), once. Short
    data give fewer windows and a warning; the tail that fills no window is cut, unless it is all there is: then the
    one window is shorter. The same texts, tokenizer and seed give the same bytes.

    Raises UserError for settings out of range and where all documents together have fewer than two tokens.
    """
    if num_samples < 1 or seqlen < 2:
        raise UserError("too few or too short windows", found=f"{num_samples} x {seqlen}", expected="1 x 2 or more")
    rows = list(texts.rows)
    random.Random(seed).shuffle(rows)
    pieces, clipped = _tokenize(rows, tokenizer, num_samples * seqlen)
    total = sum(map(len, pieces))
    if total < 2:
        raise UserError("the data hold fewer than two tokens", file=texts.source, found=total)
    width = min(seqlen, total)
    windows = min(num_samples, total // width)
    ids = torch.tensor(list(chain.from_iterable(pieces))[: windows * width], dtype=torch.int64).view(windows, width)
    scripts = script_shares(row.plain for row in rows[: len(pieces)])
    packed = replace(
        _account(pieces, ids, clipped),
        rows_in=texts.rows_in,
        rows_empty=texts.rows_empty,
        rows_left=len(rows) - len(pieces),
        scripts=scripts,
    )
    warnings = (*texts.warnings, *_warnings(packed, num_samples, seqlen), *hint_about_scripts(scripts))
    return replace(packed, warnings=warnings)


def _tokenize(
    rows: Sequence[Text], tokenizer: PreTrainedTokenizerBase, budget_tokens: int
) -> tuple[list[list[int]], bool]:
    """Ids of as many rows as the budget needs, and whether the last row's text was clipped before its end."""
    pieces: list[list[int]] = []
    clipped = False
    for row in rows:
        if budget_tokens <= 0:
            break
        ids, clipped = _encode_at_least(row, tokenizer, budget_tokens)
        pieces.append(ids)
        budget_tokens -= len(ids)
    return pieces, clipped


def _encode_at_least(row: Text, tokenizer: PreTrainedTokenizerBase, need: int) -> tuple[list[int], bool]:
    """Ids of a row, or of a beginning of it that gives at least `need` ids."""
    length = need * _CHARACTERS_PER_TOKEN
    while row.text is not None and len(row.text) > length:
        ids = encode(tokenizer, replace(row, text=row.text[:length]))
        if len(ids) > need:
            return ids, True
        length *= 2
    return encode(tokenizer, row), False


def _account(pieces: list[list[int]], ids: Tensor, clipped: bool) -> Packed:
    windows, width = ids.shape
    kept = windows * width
    ends = list(accumulate(map(len, pieces), initial=0))
    spans = [(start, stop) for start, stop in pairwise(ends) if start < stop]
    return Packed(
        ids=ids,
        lengths=(width,) * windows,
        documents=tuple(
            sum(start < (window + 1) * width and stop > window * width for start, stop in spans)
            for window in range(windows)
        ),
        rows_in=len(pieces),
        rows_empty=0,
        rows_used=sum(start < kept for start, _ in spans),
        rows_cut=max(sum(stop > kept for _, stop in spans), int(clipped)),
        rows_left=0,
        tokens_used=kept,
        tokens_cut=ends[-1] - kept,
        scripts={},
        sha256=hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest(),
        warnings=(),
    )


def _warnings(packed: Packed, num_samples: int, seqlen: int) -> list[str]:
    windows, width = packed.ids.shape
    found = []
    if width < seqlen:
        found.append(f"the data fill no window: one window of {width} tokens instead of {num_samples} of {seqlen}")
    elif windows < num_samples:
        found.append(f"the data fill only {windows} of {num_samples} windows of {seqlen} tokens")
    if packed.rows_left and packed.rows_used == 1 and windows > 1:
        found.append(f"one long document fills all {windows} windows; {packed.rows_left} others were not needed")
    return found
