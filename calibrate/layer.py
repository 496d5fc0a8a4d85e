"""Solve one decoder layer: attention stage by stage, then its feed-forward networks one at a time, then move both
streams to the next boundary.

Dimensions: W windows, T tokens of all windows in order, D hidden, E experts.
The layer's own transformers code does every forward. Submodules are swapped for the length of a pass: linears by taps
that collect and solve, the feed-forward block by one that remembers its input, experts by our streaming networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.calibrate.ablation import Ablation, sampled_layers
from glm5_quant.calibrate.attention import AttentionSolver, Passed, rows_of, stream_weight
from glm5_quant.calibrate.compensation import fit_compensation
from glm5_quant.calibrate.context import Context
from glm5_quant.calibrate.coverage import Routed, by_expert
from glm5_quant.calibrate.evidence import overflown
from glm5_quant.calibrate.ffn import Network, Pool, Streams, Tokens, solve_network
from glm5_quant.calibrate.memory import trim_freed_memory
from glm5_quant.calibrate.router import refit_layer
from glm5_quant.calibrate.shadows import ShadowFinder
from glm5_quant.calibrate.solve import LayerResult, solve_group
from glm5_quant.calibrate.spill import Spill
from glm5_quant.calibrate.stream import release_pages, token_parts, windows
from glm5_quant.calibrate.taps import Keep, Replay, slice_norms, swapped
from glm5_quant.model.families import Linear, read_linear
from glm5_quant.model.journal import SIDECAR_PREFIX, CompensationRecord, RouterRecord
from glm5_quant.quant.target import few


@dataclass(kw_only=True)
class LayerOutcome:
    """A solved layer: what goes to the journal, and the side values of both streams for the next layer.

    `shadows` is what goes to the candidates file.
    """

    result: LayerResult
    shadows: Spill
    compensation: CompensationRecord | None
    coverage: list[int] | None
    side: dict[str, Tensor | None]
    notes: list[str] = field(default_factory=list)
    ablation: dict[str, dict[str, float]] = field(default_factory=dict)
    router: RouterRecord | None = None


class LayerSolver:
    """Solves layer `index` and advances `inputs` (by stream name, [W, T, D]) into `outputs`."""

    def __init__(self, context: Context, index: int, inputs: dict[str, Tensor], side: dict[str, Tensor | None]) -> None:
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
        _move(self.module, context.settings.device)
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
        passed = AttentionSolver(
            context=self.context,
            index=self.index,
            module=self.module,
            linears={name: item for name, item in self.linears.items() if self._in_attention(item)},
            inputs=self.inputs,
            side=self.side,
            read=self._read,
            solve=self.solve,
            evidence=self.evidence,
        ).run(outputs)
        # Its outputs are kept and replayed; its weights are in the way of the experts'.
        setattr(self.module, self.family.attention_path, nn.Identity())
        trim_freed_memory()
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

    def _in_attention(self, item: Linear) -> bool:
        return item.module.startswith(self.family.attention_path + ".")

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
        weight_T = stream_weight(self.context, self.inputs["quantized"], passed["quantized"].attention)
        if always:
            path = always[0].module.rpartition(".")[0]
            # Nobody else reads what a dense block reads: its output takes that place.
            outs = {name: self.context.scratch(x.shape, x.dtype) for name, x in flat.items()} if experts else flat
            self._solve([(self._network(always), everyone)], flat, outs, lack=lack, weight_T=weight_T)
            for name, out in outs.items():
                replays[name][path] = out
            if lack is not None and experts:
                sides = (lack, outs["source"], outs["quantized"][-len(lack) :])
                shape = (-1, self.context.ids_WT.shape[1], lack.shape[-1])
                for part, source, quantized in windows(*(side.view(shape) for side in sides)):
                    part += source - quantized
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
        widest = max(item.k for items in experts.values() for item in items)
        pool = self._pool(flat["quantized"], routed.counts, widest)
        sums = {name: self.context.scratch(x.shape, torch.float32) for name, x in flat.items()}
        self._solve(jobs, flat, sums, pool, lack, weight_T, added=True)
        for name, out in sums.items():
            replays[name][f"{self.family.block}.{self.family.experts}"] = out
        return routed.counts, replays

    def _lack_between(self, passed: dict[str, Passed]) -> Tensor:
        """What the quantized stream lacks after the attention, [followed tokens, D], in the layers' dtype."""
        first = self.context.source_first
        lack = self.context.scratch(passed["source"].attention.shape, self.context.dtype)
        source, behind = passed["source"].attention, passed["quantized"].attention[first:]
        sides = (self.inputs["source"], source, self.inputs["quantized"][first:], behind)
        for lack_TD, *(before, added, before_quantized, added_quantized) in windows(lack, *sides):
            lack_TD.copy_((before.float() + added.float()) - (before_quantized.float() + added_quantized.float()))
        return lack.flatten(0, 1)

    def _solve(
        self,
        jobs: Iterable[tuple[Network, Tokens]],
        flat: dict[str, Tensor],
        outputs: dict[str, Tensor],
        pool: Pool | None = None,
        lack: Tensor | None = None,
        weight_T: Tensor | None = None,
        *,
        added: bool = False,
    ) -> None:
        """Solve networks one after the other. The output of a single one goes to `outputs`, by stream, [T, D]; those of
        several are `added` there."""
        streams = Streams(
            x=flat["quantized"],
            out=outputs["quantized"],
            source_x=flat.get("source"),
            source_out=outputs.get("source"),
            added=added,
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
                scratch=self.context.scratch,
                dtype=self.context.dtype,
                watch=self.shadows.watch,
            )
            self.result.spill()
            self.shadows.offers.spill()
            trim_freed_memory()

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
            return Tokens(index_T=index, scale_T=scale, all_seen=True, weight_T=numeric)
        weight = scale.abs().pow(exponent) if exponent else None
        if numeric is not None:
            weight = numeric[index] if weight is None else weight * numeric[index]
        return Tokens(index_T=index, scale_T=scale, weight_T=weight)

    def _pool(self, x_TD: Tensor, counts: list[int], k: int) -> Pool | None:
        """What experts lean on that few tokens reach; None where there are none such, of k inputs at most."""
        kappa = self.context.settings.quant.pool_kappa
        if not kappa or self.context.settings.all_experts or not few(min(counts), k):
            return None
        tokens, weight_T = self.context.held_from, self.context.token_weight_T
        inputs = self.context.evidence(x_TD.shape[1], tokens, pooled=True)
        for part in token_parts(tokens, self.context.chunk_tokens):
            inputs.add(x_TD[part], None, part.start, None if weight_T is None else weight_T[part])
        self.notes.append("experts that saw fewer than 4 tokens for each input lean on all tokens of their layer")
        return Pool(inputs=inputs, tokens=tokens, kappa=kappa, weight_T=weight_T)

    def _route(self, mlp_in_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights [T, top_k] by the block's own router; both streams replay the source's."""
        block = self.module.get_submodule(self.family.block)
        keep = Keep()
        changes: dict[str, nn.Module] = {self.family.experts: keep}
        if self.family.shared is not None:
            changes[self.family.shared] = Keep()
        seqlen = self.context.ids_WT.shape[1]
        step = seqlen * (self.context.chunks[0][1] - self.context.chunks[0][0])
        with swapped(block, changes):
            for part in torch.split(mlp_in_TD, step):
                block(part.view(-1, seqlen if len(part) % seqlen == 0 else len(part), part.shape[-1]))
        chosen = torch.cat([call[1] for call in keep.calls])
        return chosen, torch.cat([call[2] for call in keep.calls]).float()

    # -- to the next boundary ----------------------------------------------------------------------------------------

    def _advance(self, name: str, passed: Passed, outputs: dict[str, Tensor], hidden_out: Tensor) -> Tensor | None:
        """Run the layer once more with everything solved replayed: residuals, norms and scalings are its own code's."""
        side: Tensor | None = None
        for number, chunk in enumerate(self.context.chunks_of(name)):
            release_pages()
            rows, rest, before = slice(*chunk), passed.rest[number], rows_of(self.side[name], chunk)
            hidden_out[rows], value = self._replayed(name, rows, passed.attention, rest, outputs, before)
            if not bool(torch.isfinite(hidden_out[rows]).all()):
                problem = f"outputs hold NaN or infinite values in the {name} stream"
                raise overflown(problem, f"layer {self.index}", self.context.dtype)
            if value is not None:
                side = self.context.scratch((len(hidden_out), *value.shape[1:]), value.dtype) if side is None else side
                side[rows] = value
        return side

    def _replayed(
        self,
        name: str,
        rows: slice,
        attention: Tensor,
        rest: tuple[Any, ...],
        outputs: dict[str, Tensor],
        side: Any,
    ) -> tuple[Tensor, Any]:
        """The layer's output for some windows of a stream, and its side value."""
        seqlen = self.context.ids_WT.shape[1]
        tokens = slice(rows.start * seqlen, rows.stop * seqlen)
        changes: dict[str, nn.Module] = {path: Replay(out[tokens]) for path, out in outputs.items()}
        part = attention[rows]
        changes[self.family.attention_path] = Replay((part, *rest) if rest else part)
        # These norms feed what is replayed, and nothing else; an MoE block's router still reads its own.
        idle = ["input_layernorm", *(["post_attention_layernorm"] if self.family.block in outputs else [])]
        changes |= {norm: nn.Identity() for norm in idle if hasattr(self.module, norm)}
        kwargs = self.context.layer_kwargs(self.index, rows.stop - rows.start)
        with swapped(self.module, changes):
            return self.context.runner.run_layer(self.module, self.inputs[name][rows], kwargs, side)

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


def _move(module: nn.Module, device: str) -> None:
    """Parameters and buffers to where the layer runs; those that stay empty are replaced later."""
    if device == "cpu":
        return
    for part in module.modules():
        stores: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for store in stores:
            for name, value in store.items():
                if value is not None and not value.is_meta:
                    moved = value.detach().to(device)
                    store[name] = nn.Parameter(moved, requires_grad=False) if store is part._parameters else moved


def _solve_group(*args: Any, **options: Any) -> list[Tensor]:
    """Solving is when memory is shortest: what lies in files need not be in memory then."""
    release_pages()
    return solve_group(*args, **options)
