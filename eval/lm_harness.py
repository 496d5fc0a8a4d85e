"""Our models in EleutherAI's lm-evaluation-harness (optional extra `lm-eval`), for tasks this package does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5_quant.model.errors import UserError


def harness_model(folder: str | Path, *, device: str = "cpu", batch_size: int = 1, **options: Any) -> Any:
    """A harness `LM` of a source folder or an export, for `lm_eval.simple_evaluate(model=..., tasks=[...])`.

    The model runs on packed codes through `model.load`. options: passed on to `lm_eval.models.huggingface.HFLM`.
    Raises UserError when the harness is not installed.
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(
            "lm-evaluation-harness is not installed", found=str(error), hint='Run: pip install "glm5-quant[lm-eval]"'
        ) from error
    from glm5_quant.model.loading import load
    from glm5_quant.model.texts import load_tokenizer

    model = load(folder, device=device)
    return HFLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=batch_size, **options)
