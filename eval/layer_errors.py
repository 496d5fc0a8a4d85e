"""Comparing two models part by part on the same inputs, so that a fault has an address.

The source reads a window; at each decoder layer, router, expert and head the export's part is given the very same
input. What differs then is that part's own error, not what earlier layers passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.eval.model_parts import decoder_layers, experts_of, head_of, router_name

Place = tuple[int, int | None]
"""A layer's number, and an expert of it or None for the whole layer."""

MOST_TOKENS = 128
HEAD_TOKENS = 64


@dataclass
class Energy:
    """Sums of squares of a difference and of its reference; `relative` is the root of their ratio."""

    lost: float = 0.0
    total: float = 0.0

    def add(self, difference: Tensor, reference: Tensor) -> None:
        """Add tensors of one shape."""
        self.lost += float(difference.float().square().sum())
        self.total += float(reference.float().square().sum())

    @property
    def relative(self) -> float:
        """Relative error, 0 where nothing was seen."""
        return (self.lost / self.total) ** 0.5 if self.total else 0.0


@dataclass
class PartErrors:
    """Errors of an export's parts on the source's inputs, by layer; head rows hold squares by vocabulary id [V]."""

    local: dict[int, Energy] = field(default_factory=dict)
    stream: dict[int, Energy] = field(default_factory=dict)
    experts: dict[tuple[int, int], Energy] = field(default_factory=dict)
    routers: dict[int, str] = field(default_factory=dict)
    head_lost: Tensor | None = None
    head_total: Tensor | None = None
    same_basis: bool = True


def first_tensor(output: Any) -> Tensor:
    """A layer's hidden states: the output itself, or its first part."""
    return output if isinstance(output, Tensor) else output[0]


def same_basis(source: Any, export: Any) -> bool:
    """False where the export's residual stream is rotated: its parts then cannot be given the source's inputs."""
    one, other = (model.get_input_embeddings() for model in (source, export))
    if not (hasattr(one, "weight") and hasattr(other, "weight")) or one.weight.shape != other.weight.shape:
        return True
    rows = slice(0, 256)
    energy = Energy()
    energy.add(other.weight[rows].float() - one.weight[rows].float(), one.weight[rows])
    return energy.relative < 0.5


@torch.inference_mode()
def part_errors(
    source: Any, export: Any, windows: Sequence[Tensor], refitted: Collection[int] = frozenset()
) -> PartErrors:
    """Compare an export with its source on windows (int64 [1, T] each). Both are transformers models of one family.

    `refitted`: the layers whose router the export says was fitted again, so that its weight is not the source's.
    """
    found = PartErrors(same_basis=same_basis(source, export))
    if not found.same_basis:
        return found
    pairs = list(zip(decoder_layers(source), decoder_layers(export), strict=True))
    for number, pair in enumerate(pairs):
        difference = router_difference(*pair, refitted=number in refitted)
        if difference:
            found.routers[number] = difference
    for ids in windows:
        outputs = _source_run(source, export, pairs, ids, found)
        _export_run(export, [other for _, other in pairs], ids, outputs, found)
    return found


def _source_run(
    source: Any, export: Any, pairs: list[tuple[nn.Module, nn.Module]], ids: Tensor, found: PartErrors
) -> dict[int, Tensor]:
    outputs: dict[int, Tensor] = {}
    handles = []
    for number, (one, other) in enumerate(pairs):
        handles.append(one.register_forward_hook(_layer_hook(number, other, outputs, found), with_kwargs=True))
        experts, twin = experts_of(one), experts_of(other)
        if experts is not None and twin is not None:
            handles.append(experts.register_forward_hook(_experts_hook(number, twin, found), with_kwargs=True))
    heads = head_of(source), head_of(export)
    if heads[0] is not None and heads[1] is not None:
        handles.append(heads[0].register_forward_hook(_head_hook(heads[1], found)))
    try:
        source(input_ids=ids.to(source.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _layer_hook(number: int, twin: nn.Module, outputs: dict[int, Tensor], found: PartErrors) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        reference = first_tensor(output)
        entering = args[0] if args else kwargs["hidden_states"]
        mine = first_tensor(twin.forward(*args, **kwargs))
        # The residual passes through unchanged; what a layer adds is what it computes.
        found.local.setdefault(number, Energy()).add(mine - reference, reference - entering)
        outputs[number] = reference.cpu()

    return hook


def _experts_hook(number: int, twin: nn.Module, found: PartErrors) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        hidden, index, weights = [*args, *(kwargs[name] for name in names[len(args) :])]
        hidden = hidden.reshape(-1, hidden.shape[-1])[:MOST_TOKENS]
        for slot in range(index.shape[-1]):
            chosen = index.reshape(-1, index.shape[-1])[:MOST_TOKENS, slot : slot + 1].contiguous()
            ones = torch.ones_like(weights.reshape(-1, weights.shape[-1])[:MOST_TOKENS, :1])
            # `forward` itself: calling a module that both models share would start this hook again.
            reference, mine = module.forward(hidden, chosen, ones), twin.forward(hidden, chosen, ones)
            for expert in chosen.unique().tolist():
                rows = chosen[:, 0] == expert
                energy = found.experts.setdefault((number, expert), Energy())
                energy.add(mine[rows] - reference[rows], reference[rows])

    return hook


def _head_hook(twin: nn.Module, found: PartErrors) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        hidden = args[0].reshape(-1, args[0].shape[-1])[:HEAD_TOKENS]
        reference = output.reshape(-1, output.shape[-1])[:HEAD_TOKENS].float()
        mine = twin.forward(hidden).float()
        lost, total = (mine - reference).square().sum(0).cpu(), reference.square().sum(0).cpu()
        found.head_lost = lost if found.head_lost is None else found.head_lost + lost
        found.head_total = total if found.head_total is None else found.head_total + total

    return hook


def _export_run(
    export: Any, layers: list[nn.Module], ids: Tensor, outputs: dict[int, Tensor], found: PartErrors
) -> None:
    def hook_of(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            mine = first_tensor(output).cpu()
            found.stream.setdefault(number, Energy()).add(mine - outputs[number], outputs[number])

        return hook

    handles = [layer.register_forward_hook(hook_of(number)) for number, layer in enumerate(layers)]
    try:
        export(input_ids=ids.to(export.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def router_difference(source: nn.Module, export: nn.Module, *, refitted: bool = False) -> str:
    """In words, how a layer's router differs from the source's, "" where it does not: it must be kept bit for bit.

    The weight of a `refitted` one may differ; nothing else of it may.
    """
    name = router_name(source)
    if name is None:
        return ""
    one = source.get_submodule(name)
    try:
        other = export.get_submodule(name)
    except AttributeError:
        return "is missing"
    states = one.state_dict(), other.state_dict()
    for key, value in states[0].items():
        twin = states[1].get(key)
        if twin is None or twin.shape != value.shape:
            return f"{key} is missing or has another shape"
        if refitted and key == "weight":
            continue
        if not torch.equal(value.float().cpu(), twin.float().cpu()):
            rounded = torch.equal(value.to(torch.bfloat16).float().cpu(), twin.float().cpu())
            return f"{key} " + ("was rounded to bfloat16" if rounded else "is not the source's")
    return ""
