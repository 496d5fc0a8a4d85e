"""Which token ids are numeric, by the rule of `quant.numeric`, decoded from the tokenizer at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def decoded_vocabulary(tokenizer: Any) -> dict[int, str]:
    """Text of every vocabulary id but the special ones, decoded alone."""
    special = set(tokenizer.all_special_ids)
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    return dict(zip(ids, texts, strict=True))


def numeric_mask(tokenizer: Any, size: int | None = None) -> NDArray[np.bool_] | None:
    """bool [V]: True at numeric ids; None without a tokenizer. `size` widens the table to the model's vocabulary."""
    if tokenizer is None:
        return None
    from glm5_quant.quant.numeric import numeric_token_ids

    decoded = decoded_vocabulary(tokenizer)
    ids = np.asarray(numeric_token_ids(decoded), dtype=np.int64)
    length = max(size or 0, max(decoded, default=-1) + 1)
    mask = np.zeros(length, dtype=np.bool_)
    mask[ids] = True
    return mask
