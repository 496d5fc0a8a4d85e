"""glm5-tiny: the small trained model that ships with the package, and its corpus."""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """The packaged checkpoint: weights in bfloat16, config, tokenizer and model card."""
    return Path(__file__).resolve().parent / "weights"
