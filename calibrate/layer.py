"""Solve one decoder layer: attention stage by stage, then its feed-forward networks one at a time, then move both
streams to the next boundary.

Dimensions: W windows, T tokens of all windows in order, D hidden, E experts.
The layer's own transformers code does every forward. Submodules are swapped for the length of a pass: linears by taps
that collect and solve, the feed-forward block by one that remembers its input, experts by our streaming networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.calibrate.ablation import Ablation, sampled_layers
from glm5_quant.calibrate.compensation import fit_compensation
from glm5_quant.calibrate.context import Context
from glm5_quant.calibrate.coverage import Routed, by_expert
from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.ffn import Network, Streams, Tokens, solve_network
from glm5_quant.calibrate.router import refit_layer
from glm5_quant.calibrate.shadows import ShadowFinder
from glm5_quant.calibrate.solve import LayerResult, solve_group
from glm5_quant.calibrate.spill import Spill
from glm5_quant.calibrate.stream import release_pages
from glm5_quant.calibrate.taps import (
    BlockReached,
    Handler,
    Keep,
    Recorder,
    Replay,
    Solver,
    StageReached,
    Tap,
    install,
    slice_norms,
    swapped,
)
from glm5_quant.model.families import Linear, read_linear
from glm5_quant.model.journal import SIDECAR_PREFIX, CompensationRecord, RouterRecord

Side = dict[int, Tensor]
# What goes through a layer without any statistics goes by so many windows at a time.
FEW_WINDOWS = 8


@dataclass(kw_only=True)
class Passed:
    """One stream through the attention part: the attention's output, the feed-forward block's input, side values."""

    attention: Tensor
    mlp_in: Tensor
    rest: dict[int, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(kw_only=True)
class LayerOutcome:
    """A solved layer: what goes to the journal, and the side values of both streams for the next layer.

    `shadows` is what goes to the candidates file.
    """

    result: LayerResult
    shadows: Spill
    compensation: CompensationRecord | None
    coverage: list[int] | None
    side: dict[str, Side]
    notes: list[str] = field(default_factory=list)
    ablation: dict[str, dict[str, float]] = field(default_factory=dict)
    router: RouterRecord | None = None


class LayerSolver:
    """Solves layer `index` and advances `inputs` (by stream name, [W, T, D]) into `outputs`."""

    def __init__(self, context: Context, index: int, inputs: dict[str, Tensor], side: dict[str, Side]) -> None:
        self.context, self.index, self.inputs, self.side = context, index, inputs, side
        self.family = context.runner.family
        self.linears = {item.name: item for item in context.linears.get(index, [])}
        self.result = LayerResult(folder=context.spill_folder)
        self.notes: list[str] = []
        self.router: RouterRecord | None = None
        self.shadows = ShadowFinder(
            config=context.settings.quant,
            names=context.shadowed,
            offers=Spill(folder=context.spill_folder, stem="offered"),
        )
        # What is quantized is read where it is needed, in the source's dtype: half the memory, and no second copy.
        without = {item.module for item in self.linears.values() if item.expert is None}
        self.module = context.runner.load_layer(index, experts=False, without=without)
        slice_norms(self.module)
        self.solve: Callable[..., list[Tensor]] = partial(
            _solve_group,
            config=context.settings.quant,
            scale_dtype=context.scale_dtype,
            result=self.result,
            dtype=context.dtype,
            eight=context.eight,
        )
        if context.shadowed:
            self.solve = partial(self.solve, shadows=self.shadows)
        self.ablation = Ablation(config=context.settings.quant, scale_dtype=context.scale_dtype, names=context.shadowed)
        sampled = index in sampled_layers(context.runner.layer_count)
        self.evidence = partial(context.evidence, hold=sampled)
        if sampled:
            self.solve = partial(self.solve, ablation=self.ablation)

    @torch.no_grad()
    def run(self, outputs: dict[str, Tensor]) -> LayerOutcome:
        passed = self._attention()
        # Its outputs are kept and replayed; its weights are in the way of the experts'.
        setattr(self.module, self.family.attention_path, nn.Identity())
        coverage, replays = self._feed_forward(passed)
        side = {name: self._advance(name, passed[name], replays[name], outputs[name]) for name in self.inputs}
        compensation = self._compensate(outputs)
        shadows = self.shadows.finish(outputs["quantized"])
        return LayerOutcome(
            result=self.result,
            shadows=shadows,
            compensation=compensation,
            coverage=coverage,
            side=side,
            notes=self.notes,
            ablation=self.ablation.errors,
            router=self.router,
        )

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self) -> dict[str, Passed]:
        """Solve the attention's linears; both streams' attention outputs and feed-forward inputs."""
        paths = {item.module: name for name, item in self.linears.items() if self._in_attention(item)}
        recorder = Recorder(self.context.dtype)
        weights = {name: self._read(self.linears[name]) for name in paths.values()}
        taps = install(self.module, paths, weights, recorder)
        single = len(self.context.chunks) == 1
        passed: dict[str, Passed] = {}
        if "source" in self.inputs:
            passed["source"] = self._pass("source", before=lambda chunk: recorder.reset())
        else:
            self._forward("quantized", self.context.chunks[0])
        groups, kept = recorder.groups, recorder.inputs if single and "source" in self.inputs else []
        recorder.reset()
        passed["quantized"] = self._solve_attention(taps, recorder, groups, kept)
        # Taps and their handler hold each other, and weights and moments: all would stay until the next collection.
        _set_handler(taps, recorder)
        return passed

    def _solve_attention(
        self, taps: dict[str, Tap], recorder: Recorder, groups: list[list[str]], kept: list[Tensor]
    ) -> Passed:
        context, single = self.context, len(self.context.chunks) == 1
        evidence: dict[int, Evidence] = {}
        current: dict[str, Any] = {"inputs": kept, "first": 0}
        plain_T = writing_T = context.token_weight_T
        stream_T = self._stream_weight(None)
        if stream_T is not None:
            writing_T = stream_T if plain_T is None else stream_T * plain_T

        def collect(group: int, x: Tensor) -> None:
            # Not before a group is reached: four blocks of H for GLM-5's o_proj are half a gigabyte.
            if group not in evidence:
                names = groups[group]
                empty = self.evidence(x.shape[-1], context.ids_WT.numel(), self._writes(names))
                evidence[group] = empty.of([taps[n].weight for n in names])
            source = current["inputs"][group].flatten(0, -2) if current["inputs"] else None
            weight_T = writing_T if self._writes(groups[group]) else plain_T
            weight = None
            if weight_T is not None:
                weight = weight_T[current["first"] : current["first"] + x.shape[:-1].numel()]
            lack = self._lack_before(current["chunk"]) if evidence[group].wants_lack else None
            evidence[group].add(x.flatten(0, -2), source, current["first"], weight, lack)

        def solve(group: int) -> dict[str, Tensor]:
            names = groups[group]
            solved = self.solve([self.linears[n] for n in names], [taps[n].weight for n in names], evidence.pop(group))
            return dict(zip(names, solved, strict=True))

        solver = Solver({n: g for g, group in enumerate(groups) for n in group}, collect, solve, context.dtype)
        solver.single = single

        def before(chunk: tuple[int, int]) -> None:
            current["first"], current["chunk"] = chunk[0] * context.ids_WT.shape[1], chunk
            solver.last = chunk == context.chunks[-1]
            if not single and "source" in self.inputs and len(solver.solved) < len(taps):
                _set_handler(taps, recorder)
                recorder.reset()
                first = context.source_first
                if chunk[1] > first:
                    self._forward("source", (max(chunk[0] - first, 0), chunk[1] - first))
                current["inputs"] = recorder.inputs
            _set_handler(taps, solver)

        while True:
            try:
                return self._pass("quantized", before=before)
            except StageReached:
                continue

    def _pass(
        self,
        name: str,
        before: Callable[[tuple[int, int]], None],
    ) -> Passed:
        """Run one stream's attention over all chunks. A stage that stops a chunk still lets the others be collected."""
        hidden = self.inputs[name]
        passed = Passed(
            attention=self.context.scratch(hidden.shape, hidden.dtype),
            mlp_in=self.context.scratch(hidden.shape, hidden.dtype),
        )
        stopped = False
        for number, chunk in enumerate(self.context.chunks_of(name)):
            before(chunk)
            try:
                attention, mlp_in = self._forward(name, chunk)
            except StageReached:
                stopped = True
                continue
            first = attention[0] if isinstance(attention, tuple) else attention
            passed.attention[chunk[0] : chunk[1]] = first
            passed.rest[number] = attention[1:] if isinstance(attention, tuple) else ()
            passed.mlp_in[chunk[0] : chunk[1]] = mlp_in
        if stopped:
            raise StageReached
        return passed

    def _forward(self, name: str, chunk: tuple[int, int]) -> tuple[Any, Tensor]:
        """One chunk through the attention part: the attention's return value and the feed-forward block's input."""
        keep, attention = Keep(stop=True), list[Any]()
        module = self.module.get_submodule(self.family.attention_path)
        hook = module.register_forward_hook(lambda _module, _args, output: attention.append(output))
        try:
            with suppress(BlockReached), swapped(self.module, {self.family.block: keep}):
                self._layer(name, chunk)
        finally:
            hook.remove()
        return attention[0], keep.calls[0][0]

    def _layer(self, name: str, chunk: tuple[int, int]) -> tuple[Tensor, Any]:
        release_pages()
        number = self.context.chunks_of(name).index(chunk)
        hidden = self.inputs[name][chunk[0] : chunk[1]]
        kwargs = self.context.layer_kwargs(self.index, chunk[1] - chunk[0])
        return self.context.runner.run_layer(self.module, hidden, kwargs, self.side[name].get(number))

    def _in_attention(self, item: Linear) -> bool:
        return item.module.startswith(self.family.attention_path + ".")

    def _writes(self, names: list[str]) -> int:
        """Channels of the residual stream that these linears write to."""
        return next((self.linears[name].n for name in names if self.linears[name].role == "o_proj"), 0)

    def _stream_weight(self, attention: Tensor | None) -> Tensor | None:
        """What a token's error in the residual stream weighs, 1 / |h|^2 with mean 1, float32 [T]; None for ones.

        The next norm divides by |h|, and the first token of a window may be a thousand times as large as all others.
        `attention` is what the attention added to the layer's input by then.
        """
        if not self.context.weighs_stream:
            return None
        squares = []
        for window, hidden in enumerate(self.inputs["quantized"]):
            now = hidden.float() if attention is None else hidden.float() + attention[window].float()
            squares.append(now.square().sum(-1))
        weight_T = 1.0 / torch.cat(squares).clamp(min=torch.finfo(torch.float32).tiny)
        return weight_T / weight_T.mean()

    def _lack_before(self, chunk: tuple[int, int]) -> Tensor:
        """What the quantized stream lacks of the source's before this layer, float32 [a chunk's followed tokens, D]."""
        first = self.context.source_first
        source = self.inputs["source"][max(chunk[0] - first, 0) : max(chunk[1] - first, 0)]
        quantized = self.inputs["quantized"][max(chunk[0], first) : max(chunk[1], first)]
        return (source.float() - quantized.float()).flatten(0, 1)

    # -- feed-forward ------------------------------------------------------------------------------------------------

    def _feed_forward(self, passed: dict[str, Passed]) -> tuple[list[int] | None, dict[str, dict[str, Tensor]]]:
        """Solve every network of the block; coverage, and by stream what the block's parts return ([T, D] by path)."""
        flat = {name: part.mlp_in.flatten(0, -2) for name, part in passed.items()}
        inner = [item for item in self.linears.values() if not self._in_attention(item)]
        always = [item for item in inner if item.expert is None]
        experts: dict[int, list[Linear]] = {}
        for item in inner:
            if item.expert is not None:
                experts.setdefault(item.expert, []).append(item)
        replays: dict[str, dict[str, Tensor]] = {name: {} for name in flat}
        everyone = Tokens(weight_T=self.context.token_weight_T)
        lack = self._lack_between(passed) if self.context.corrects_stream and "source" in passed else None
        weight_T = self._stream_weight(passed["quantized"].attention)
        if always:
            path = always[0].module.rpartition(".")[0]
            for name, out in self._solve(
                [(self._network(always), everyone)], flat, lack=lack, weight_T=weight_T
            ).items():
                replays[name][path] = out
            if lack is not None and experts:
                first = len(replays["quantized"][path]) - len(lack)
                lack += (replays["source"][path] - replays["quantized"][path][first:]).to(lack.dtype)
        if not experts:
            return None, replays
        chosen_TK, scale_TK = self._route(flat.get("source", flat["quantized"]))
        if self.context.settings.quant.refit_router:
            refit = refit_layer(self.context, self.index, self.module, flat, chosen_TK, lambda x: self._route(x)[0])
            self.router = refit.record
            self.notes += refit.notes
            self.result.tensors |= refit.tensors
        routed = by_expert(chosen_TK, scale_TK, len(experts))
        jobs = ((self._network(experts[e]), self._expert_tokens(routed, e)) for e in sorted(experts))
        lean = self.context.settings.quant.pool_kappa > 0
        pool = self._pool(flat) if lean or min(routed.counts) == 0 else None
        for name, out in self._solve(jobs, flat, pool, lack, weight_T).items():
            replays[name][f"{self.family.block}.{self.family.experts}"] = out
        return routed.counts, replays

    def _lack_between(self, passed: dict[str, Passed]) -> Tensor:
        """What the quantized stream lacks after the attention, [followed tokens, D], in the layers' dtype."""
        first = self.context.source_first
        lack = self.context.scratch(passed["source"].attention.shape, self.context.dtype)
        for window in range(len(lack)):
            source = self.inputs["source"][window].float() + passed["source"].attention[window].float()
            mine = (
                self.inputs["quantized"][first + window].float() + passed["quantized"].attention[first + window].float()
            )
            lack[window] = source - mine
        return lack.flatten(0, 1)

    def _solve(
        self,
        jobs: Iterable[tuple[Network, Tokens]],
        flat: dict[str, Tensor],
        pool: Evidence | None = None,
        lack: Tensor | None = None,
        weight_T: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Solve networks one after the other; the sum of their outputs by stream, [T, D]."""
        outputs = {name: self.context.scratch(x.shape, torch.float32) for name, x in flat.items()}
        streams = Streams(
            x=flat["quantized"],
            out=outputs["quantized"],
            source_x=flat.get("source"),
            source_out=outputs.get("source"),
            source_from=self.context.source_first * self.context.ids_WT.shape[1],
            lack=lack,
            weight_T=weight_T,
        )
        for network, tokens in jobs:
            solve_network(
                network,
                tokens,
                streams,
                solve=self.solve,
                evidence=self.evidence,
                pool=pool,
                chunk_tokens=self.context.chunk_tokens,
                keep_bytes=self.context.keep_bytes,
                dtype=self.context.dtype,
                watch=self.shadows.watch,
                kappa=self.context.settings.quant.pool_kappa,
            )
            self.result.spill()
            self.shadows.offers.spill()
        return outputs

    def _read(self, item: Linear) -> Tensor:
        return read_linear(self.context.checkpoint, item).to(self.context.settings.device)

    def _network(self, items: list[Linear]) -> Network:
        return Network(
            inputs=[item for item in items if item.role != "down"],
            down=next(item for item in items if item.role == "down"),
            read=self._read,
            activation=self.context.activation,
        )

    def _expert_tokens(self, routed: Routed, expert: int) -> Tokens:
        """An expert's tokens, each weighing c^p times its numeric weight in the statistics."""
        index, scale = routed.index[expert], routed.scale[expert]
        exponent, numeric = self.context.settings.quant.routing_exponent, self.context.token_weight_T
        if self.context.settings.all_experts:
            everyone = torch.arange(self.context.ids_WT.numel(), device=index.device)
            return Tokens(index_T=index, scale_T=scale, seen_T=everyone, weight_T=numeric)
        weight = scale.abs().pow(exponent) if exponent else None
        if numeric is not None:
            weight = numeric[index] if weight is None else weight * numeric[index]
        return Tokens(index_T=index, scale_T=scale, weight_T=weight)

    def _pool(self, flat: dict[str, Tensor]) -> Evidence:
        """Moments of all tokens of the layer: what experts without any token of their own are solved on.

        Nothing is held out and no gap is followed, so that solving one expert leaves the pool as it was for the next.
        """
        x_TD = flat["quantized"]
        (tokens, dim), device, sampled = x_TD.shape, self.context.settings.device, self.context.sampled
        pool = Evidence.empty(dim, tokens=tokens, held_from=tokens, gap=False, device=device, sampled=sampled)
        for start in range(0, tokens, self.context.chunk_tokens):
            pool.add(x_TD[start : start + self.context.chunk_tokens], None, start)
        return pool

    def _route(self, mlp_in_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights [T, top_k] by the block's own router; both streams replay the source's."""
        block = self.module.get_submodule(self.family.block)
        keep = Keep()
        changes: dict[str, nn.Module] = {self.family.experts: keep}
        if self.family.shared is not None:
            changes[self.family.shared] = Keep()
        seqlen = self.context.ids_WT.shape[1]
        step = seqlen * min(self.context.chunks[0][1] - self.context.chunks[0][0], FEW_WINDOWS)
        with swapped(block, changes):
            for part in torch.split(mlp_in_TD, step):
                block(part.view(-1, seqlen if len(part) % seqlen == 0 else len(part), part.shape[-1]))
        chosen = torch.cat([call[1] for call in keep.calls])
        return chosen, torch.cat([call[2] for call in keep.calls]).float()

    # -- to the next boundary ----------------------------------------------------------------------------------------

    def _advance(self, name: str, passed: Passed, outputs: dict[str, Tensor], hidden_out: Tensor) -> Side:
        """Run the layer once more with everything solved replayed: residuals, norms and scalings are its own code's."""
        side: Side = {}
        for number, chunk in enumerate(self.context.chunks_of(name)):
            release_pages()
            rest, first_side = passed.rest[number], self.side[name].get(number)
            step = chunk[1] - chunk[0]
            if self.family.side is None and all(value is None for value in rest):
                # Nothing here belongs to a chunk as a whole: a few windows stay in the cache.
                step = min(step, FEW_WINDOWS)
            for start in range(chunk[0], chunk[1], step):
                windows = slice(start, min(start + step, chunk[1]))
                hidden_out[windows], values = self._replayed(name, windows, passed.attention, rest, outputs, first_side)
                if values is not None:
                    side[number] = values
        return side

    def _replayed(
        self,
        name: str,
        windows: slice,
        attention: Tensor,
        rest: tuple[Any, ...],
        outputs: dict[str, Tensor],
        side: Any,
    ) -> tuple[Tensor, Any]:
        """The layer's output for some windows of a stream, and its side value."""
        seqlen = self.context.ids_WT.shape[1]
        tokens = slice(windows.start * seqlen, windows.stop * seqlen)
        changes: dict[str, nn.Module] = {path: Replay(out[tokens]) for path, out in outputs.items()}
        part = attention[windows]
        changes[self.family.attention_path] = Replay((part, *rest) if rest else part)
        # These norms feed what is replayed, and nothing else; an MoE block's router still reads its own.
        idle = ["input_layernorm", *(["post_attention_layernorm"] if self.family.block in outputs else [])]
        changes |= {norm: nn.Identity() for norm in idle if hasattr(self.module, norm)}
        kwargs = self.context.layer_kwargs(self.index, windows.stop - windows.start)
        with swapped(self.module, changes):
            return self.context.runner.run_layer(self.module, self.inputs[name][windows], kwargs, side)

    def _compensate(self, outputs: dict[str, Tensor]) -> CompensationRecord | None:
        """Fit this layer's compensation, and add it to the quantized stream as the runtime will."""
        if not (self.context.settings.quant.compensation and self.context.two_streams):
            return None
        found = fit_compensation(self.inputs, outputs, self.context.held_windows)
        if found is None:
            why = "it would not lower the error of held-out tokens by 1%"
            self.notes.append(f"no compensation: {why if self.context.held_windows else 'no token is held out'}")
            return None
        found.apply(outputs["quantized"])
        self.result.tensors |= found.tensors(f"{SIDECAR_PREFIX}model.layers.{self.index}")
        return found.record


def _solve_group(*args: Any, **options: Any) -> list[Tensor]:
    """Solving is when memory is shortest: what lies in files need not be in memory then."""
    release_pages()
    return solve_group(*args, **options)


def _set_handler(taps: dict[str, Tap], handler: Handler) -> None:
    for tap in taps.values():
        tap.handler = handler
