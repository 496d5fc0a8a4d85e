"""Which token ids are numeric, by the rule of `quant.numeric`, decoded from the tokenizer at hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5_quant.model.tokenizing import decoded_vocabulary


def numeric_rule_text() -> str:
    """The kinds of tokens that count as numeric."""
    from glm5_quant.quant.numeric import NumericRule, describe

    return "quant.numeric: " + ", ".join(kind for kind, counts in describe(NumericRule()).items() if counts)


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
