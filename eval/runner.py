"""One way to call every model: transformers models, our exports, and plain functions from ids to logits."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch


class Runner:
    """A model that gives logits. Holds the model, its name, and how many tokens it has been run on (`tokens`).

    `model` is a transformers causal LM, or a function `(ids int64 [B, T], mask int64 [B, T] | None) -> logits [B, T,
    V]`.
    """

    def __init__(self, model: Any, name: str = "") -> None:
        self.model = model
        self.config = getattr(model, "config", None)
        self.name = name or Path(str(getattr(self.config, "_name_or_path", "") or "model")).name
        self.tokens = 0
        self._is_plain = self.config is None
        names = set() if self._is_plain else set(inspect.signature(model.forward).parameters)
        # transformers renamed the argument in 5.24; models outside it may still use the old name.
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps = "logits_to_keep" in names
        if hasattr(model, "eval"):
            model.eval()

    @property
    def device(self) -> torch.device:
        """Where the model's first weight lies."""
        if self._is_plain:
            return torch.device("cpu")
        return torch.device(self.model.device)

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, T, V] of whole windows, in the model's own dtype, on its own device. No cache is kept."""
        self.tokens += int(ids.numel() if mask is None else mask.sum())
        if self._is_plain:
            return torch.as_tensor(self.model(ids, mask))
        arguments: dict[str, Any] = {"input_ids": ids.to(self.device), "use_cache": False}
        if mask is not None:
            # Positions count real tokens, so that left and right padding give the same rotary angles.
            arguments["attention_mask"] = mask.to(self.device)
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0).to(self.device)
        output: torch.Tensor = self.model(**arguments).logits
        return output

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, cache: Any, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [1, T, V] of the next T tokens after those `cache` already holds; the cache grows by T.

        keep int64 [K]: only the logits at these of the T places are wanted, [1, K, V]; the head is spared the others.
        """
        self.tokens += ids.numel()
        if self._is_plain:
            whole = torch.as_tensor(cache.extend(self.model, ids))
            return whole if keep is None else whole[:, keep]
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + ids.shape[1], device=self.device)[None]
        arguments = {self._cache_name: cache, "use_cache": True, "position_ids": positions}
        spared = keep is not None and self._keeps
        if spared and keep is not None:
            arguments["logits_to_keep"] = keep.to(self.device)
        output: torch.Tensor = self.model(input_ids=ids.to(self.device), **arguments).logits
        return output if keep is None or spared else output[:, keep.to(output.device)]


class PlainCache:
    """The whole history as the "cache" of a plain function, which has no state of its own."""

    def __init__(self) -> None:
        self.ids = torch.zeros(1, 0, dtype=torch.int64)

    def extend(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Run the function on history + ids; return the logits of the new ones."""
        self.ids = torch.cat([self.ids, ids], dim=1)
        logits: torch.Tensor = model(self.ids, None)
        return logits[:, -ids.shape[1] :]

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self.ids.shape[1]
