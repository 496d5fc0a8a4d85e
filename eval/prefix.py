"""What stands before a text: the tokens a model expects first, never doubled and never scored.

Rules, first match wins: `[gMASK]<sop>` when the vocabulary has both (GLM); what the tokenizer itself puts before plain
text; the tokenizer's BOS when it names one; nothing. EOS is never used as a prefix: a model that has no BOS (Qwen) was
not trained with one, and an EOS before every window can multiply the perplexity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glm5_quant.model.tokenizing import SAMPLES

GLM_PREFIX = ("[gMASK]", "<sop>")


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Token ids before every window, their text, and the rule that chose them."""

    ids: tuple[int, ...] = ()
    text: str = ""
    rule: str = "none"

    def strip(self, ids: Sequence[int]) -> list[int]:
        """`ids` without prefixes they already begin with, so that putting ours in front never doubles it."""
        found = list(ids)
        size = len(self.ids)
        while size and tuple(found[:size]) == self.ids:
            found = found[size:]
        return found


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` alone: no BOS, no EOS, nothing a post-processor adds."""
    # verbose=False: the tokenizer's warning about its length limit does not apply, since texts are cut into windows.
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def find_prefix(tokenizer: Any, rule: str = "auto") -> Prefix:
    """The prefix of a tokenizer. `rule` is "auto" or "none"; a missing tokenizer (stub models) has no prefix.

    Raises ValueError for another rule.
    """
    if rule not in ("auto", "none"):
        raise ValueError(f"prefix must be 'auto' or 'none', found {rule!r}")
    if rule == "none" or tokenizer is None:
        return Prefix()
    vocabulary = tokenizer.get_vocab()
    if all(token in vocabulary for token in GLM_PREFIX):
        return Prefix(ids=tuple(vocabulary[token] for token in GLM_PREFIX), text="".join(GLM_PREFIX), rule="glm")
    added = _added_in_front(tokenizer)
    if added:
        return Prefix(ids=added, text=tokenizer.decode(list(added)), rule="tokenizer")
    bos = tokenizer.bos_token_id
    if bos is not None:
        return Prefix(ids=(int(bos),), text=str(tokenizer.bos_token), rule="bos")
    return Prefix()


def _added_in_front(tokenizer: Any) -> tuple[int, ...]:
    for sample in SAMPLES:
        plain, full = encode(tokenizer, sample), list(tokenizer.encode(sample))
        if plain:
            break
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()
