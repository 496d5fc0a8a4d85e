"""Routing drift: how often the export sends a token to other experts than the source does, and who carries the load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from glm5_quant.eval.model_parts import decoder_layers, experts_of
from glm5_quant.eval.result import LayerTrace, RoutingTrace


class RoutingRecorder:
    """Notes the expert ids that each layer's experts are called with. State: hooks, and ids since the last `take`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seen: dict[int, list[Tensor]] = {}
        self.experts: dict[int, int] = {}
        self.handles = []
        for number, layer in enumerate(decoder_layers(model)):
            experts = experts_of(layer)
            if experts is not None:
                self.experts[number] = int(getattr(experts, "num_experts", 0))
                hook = self._hook(number)
                self.handles.append(experts.register_forward_pre_hook(hook, with_kwargs=True))

    def _hook(self, number: int) -> Any:
        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            self.seen.setdefault(number, []).append(index.reshape(-1, index.shape[-1]).cpu())

        return note

    def take(self) -> dict[int, Tensor]:
        """Expert ids int64 [T, K] by layer since the last call."""
        found = {number: torch.cat(parts) for number, parts in self.seen.items()}
        self.seen = {}
        return found

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


def expert_sets(index_TK: Tensor, experts: int) -> Tensor:
    """bool [T, E]: which experts a token takes; an id equal to E means none."""
    sets = torch.zeros(len(index_TK), experts + 1, dtype=torch.bool)
    sets.scatter_(1, index_TK.long(), True)
    return sets[:, :experts]


class RoutingDrift:
    """Per layer: tokens read, tokens whose expert set changed, and how often each expert was taken by both models."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.changed: dict[int, int] = {}
        self.source_load: dict[int, Tensor] = {}
        self.load: dict[int, Tensor] = {}

    def add(self, source: dict[int, Tensor], export: dict[int, Tensor], experts: dict[int, int], real: Tensor) -> None:
        """Compare one batch; `real` bool [T] leaves padding out."""
        for number in source.keys() & export.keys():
            size = experts[number]
            one = expert_sets(source[number], size)[real]
            other = expert_sets(export[number], size)[real]
            self.tokens[number] = self.tokens.get(number, 0) + len(one)
            self.changed[number] = self.changed.get(number, 0) + int((one != other).any(1).sum())
            zero = torch.zeros(size, dtype=torch.int64)
            self.source_load[number] = self.source_load.get(number, zero) + one.sum(0)
            self.load[number] = self.load.get(number, zero) + other.sum(0)

    def share_changed(self, layer: int) -> float | None:
        """Share of tokens whose set of experts differs, or None for a dense layer."""
        return self.changed[layer] / self.tokens[layer] if self.tokens.get(layer) else None

    def shares(self, layer: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Load of each expert in source and export: share of all choices."""
        if layer not in self.load:
            return (), ()
        found = []
        for counts in (self.source_load[layer], self.load[layer]):
            total = max(1, int(counts.sum()))
            found.append(tuple(round(count / total, 6) for count in counts.tolist()))
        return found[0], found[1]


class RoutingWatch:
    """Watches a source and exports while they read the same batches; `drifts[i]` belongs to export i."""

    def __init__(self, source: Any, exports: Sequence[Any]) -> None:
        self.source = RoutingRecorder(source)
        self.exports = [RoutingRecorder(export) for export in exports]
        self.drifts = [RoutingDrift() for _ in exports]
        self.last: dict[int, Tensor] = {}

    def source_ran(self, newest: int | None = None) -> None:
        """To be called after the source read a batch, or caught up with one: only the `newest` tokens count then."""
        self.last = self._take(self.source)
        if newest is not None:
            self.last = {layer: index[-newest:] for layer, index in self.last.items()}

    def export_ran(self, index: int, mask: Tensor | None) -> None:
        """To be called after export `index` read the same batch; mask int64 [B, T] marks real tokens.

        An index past the watched exports belongs to a model that is read again with another cache, and is passed over.
        """
        if index >= len(self.exports):
            for recorder in (self.source, *self.exports):
                recorder.seen = {}
            return
        found = self._take(self.exports[index])
        if self.last and found:
            tokens = len(next(iter(self.last.values())))
            real = torch.ones(tokens, dtype=torch.bool) if mask is None else mask.reshape(-1).bool()
            self.drifts[index].add(self.last, found, self.source.experts, real)

    def _take(self, recorder: RoutingRecorder) -> dict[int, Tensor]:
        found = recorder.take()
        # One model may be given twice; what its other recorders saw of this run is not theirs.
        for other in (self.source, *self.exports):
            if other.model is recorder.model:
                other.seen = {}
        return found

    def close(self) -> None:
        """Remove all hooks."""
        for recorder in (self.source, *self.exports):
            recorder.close()


@torch.inference_mode()
def routing_trace(model: Any, tokenizer: Any, prompt: str, name: str = "") -> RoutingTrace:
    """Read a prompt and note for each token, by layer, the experts taken with their weights."""
    ids = torch.tensor([tokenizer.encode(prompt)], dtype=torch.int64)
    weights: dict[int, Tensor] = {}
    handles = []
    recorder = RoutingRecorder(model)
    for number, layer in enumerate(decoder_layers(model)):
        experts = experts_of(layer)
        if experts is not None:

            def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int = number) -> None:
                found = kwargs["top_k_weights"] if "top_k_weights" in kwargs else args[2]
                weights[number] = found.reshape(-1, found.shape[-1]).float().cpu()

            handles.append(experts.register_forward_pre_hook(note, with_kwargs=True))
    extra = {"output_routing": True} if getattr(model.config, "model_type", "") == "glm5_ref" else {}
    try:
        output = model(input_ids=ids.to(model.device), use_cache=False, **extra)
    finally:
        recorder.close()
        for handle in handles:
            handle.remove()
    routing = getattr(output, "routing", None) or ()
    return RoutingTrace(
        model=name,
        prompt=prompt,
        tokens=tuple(tokenizer.decode([token]) for token in ids[0].tolist()),
        layers=tuple(_layer_trace(layer, index, weights[layer]) for layer, index in recorder.take().items()),
        mask_density=tuple(_rounded(layer["mask_density"][0]) for layer in routing if "mask_density" in layer),
    )


def _layer_trace(layer: int, index_TK: Tensor, weight_TK: Tensor) -> LayerTrace:
    """Experts of each token, best first."""
    order_TK = weight_TK.argsort(dim=1, descending=True, stable=True)
    experts = index_TK.gather(1, order_TK).tolist()
    return LayerTrace(layer=layer, experts=tuple(map(tuple, experts)), weights=_rounded(weight_TK.gather(1, order_TK)))


def _rounded(values: Tensor) -> tuple[Any, ...]:
    found = (values.float() * 1e6).round().div(1e6)
    return tuple(tuple(row) for row in found.tolist()) if found.ndim == 2 else tuple(found.tolist())
