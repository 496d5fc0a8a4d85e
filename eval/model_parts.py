"""Finding the parts of a causal language model: decoder layers, experts, routers, head."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers in order; [] for a model that is no transformers model."""
    base = getattr(model, "base_model", None)
    return list(getattr(base, "layers", []))


def experts_of(layer: nn.Module) -> nn.Module | None:
    """The module that is called with hidden states, expert ids and weights, or None in a dense layer."""
    for module in layer.modules():
        names = list(inspect.signature(type(module).forward).parameters)
        if names[1:4] == ["hidden_states", "top_k_index", "top_k_weights"]:
            return module
    return None


def name_in(layer: nn.Module, wanted: nn.Module) -> str:
    """The path of a module inside a layer."""
    found: str = next(name for name, module in layer.named_modules() if module is wanted)
    return found


def router_name(layer: nn.Module) -> str | None:
    """The path of the router beside a layer's experts: `gate` or `router`."""
    experts = experts_of(layer)
    if experts is None:
        return None
    parent = name_in(layer, experts).rpartition(".")[0]
    block = layer.get_submodule(parent)
    for name in ("gate", "router", "gating"):
        if isinstance(getattr(block, name, None), nn.Module):
            return f"{parent}.{name}" if parent else name
    return None


def head_of(model: Any) -> nn.Module | None:
    """The output head."""
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found if isinstance(found, nn.Module) else None
