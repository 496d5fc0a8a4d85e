"""Putting the source's part where the export's is, to see whether the residual stream comes nearer to the source's.

A quantized part may differ from the source's on purpose: an output or down-projection that also makes up for what the
quantized stream lacks is far from the source's on the same inputs, and yet the stream is better with it. So a part
that looks wrong by itself is judged by what it does: the export runs as it is, and a suspect's layer runs once more
with the source's part in the suspect's place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.eval.layer_errors import Energy, Place, first_tensor
from glm5_quant.eval.model_parts import decoder_layers, experts_of

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@torch.inference_mode()
def stream_shares(
    source: Any, export: Any, windows: Sequence[Tensor], suspects: Collection[Place]
) -> dict[Place, float]:
    """For each suspect, the share of the stream's squared error behind its layer that the source's part takes away.

    Negative where the stream is worse off with the source's part. Windows are int64 [1, T] each; a token's error
    counts relative to the source's |h|^2, since the next norm divides by |h|, and an expert is judged on its own
    tokens only.
    """
    errors = {place: Energy() for place in suspects}
    pairs = list(zip(decoder_layers(source), decoder_layers(export), strict=True))
    numbers = {layer for layer, _ in suspects}
    for ids in windows if suspects else ():
        wanted: dict[int, Tensor] = {}
        _run(source, ids, [(pairs[number][0], _note(number, wanted)) for number in numbers])
        judges = [(pairs[number][1], _judge(number, pairs[number][0], wanted, errors)) for number in numbers]
        _run(export, ids, judges)
    return {place: 1 - energy.lost / energy.total if energy.total else 0.0 for place, energy in errors.items()}


def _run(model: Any, ids: Tensor, hooks: Sequence[tuple[nn.Module, Hook]]) -> None:
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def _note(number: int, wanted: dict[int, Tensor]) -> Hook:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        wanted[number] = first_tensor(output).float()

    return hook


def _judge(number: int, twin: nn.Module, wanted: dict[int, Tensor], errors: dict[Place, Energy]) -> Hook:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        stream = wanted[number].to(first_tensor(output).device)
        size = stream.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        before = (first_tensor(output) - stream) / size
        for place in (place for place in errors if place[0] == number):
            if place[1] is None:
                errors[place].add((first_tensor(twin.forward(*args, **kwargs)) - stream) / size, before)
            else:
                changed, rows = _with_expert(module, twin, place[1], args, kwargs)
                errors[place].add(((changed - stream) / size).flatten(0, -2)[rows], before.flatten(0, -2)[rows])

    return hook


def _with_expert(
    layer: nn.Module, twin: nn.Module, expert: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output of the export's layer with one expert from the source, and which tokens took it, bool [T]."""
    experts, twins = experts_of(layer), experts_of(twin)
    assert experts is not None and twins is not None
    taken: list[Tensor] = []

    def swap(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        hidden, index, weights = [*given, *(named[name] for name in names[len(given) :])]
        index, weights = index.flatten(0, -2), weights.flatten(0, -2)
        chosen = index == expert
        rows = chosen.any(1)
        taken.append(rows)
        changed = output.clone()
        if rows.any():
            alone = torch.full_like(index[rows, :1], expert)
            inputs = hidden.reshape(-1, hidden.shape[-1])[rows], alone, (weights * chosen).sum(1, keepdim=True)[rows]
            # `forward` itself: calling the module would start this hook again.
            changed.view(-1, changed.shape[-1])[rows] += twins.forward(*inputs) - module.forward(*inputs)
        return changed

    handle = experts.register_forward_hook(swap, with_kwargs=True)
    try:
        changed = first_tensor(layer.forward(*args, **kwargs))
    finally:
        handle.remove()
    return changed, taken[0]
