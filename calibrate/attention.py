"""Solve the linears of one layer's attention, group after group, a few windows at a time.

Dimensions: W windows, T tokens of all windows in order, D hidden, K inputs of a group.
The source stream goes through once, and what its linears read is kept. The quantized stream goes through once for every
group, up to the first linear that is not solved yet; and once more to its end, unless the attention returns what its
last linear returns: then only that one is computed, from inputs that were kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from glm5_quant.calibrate.context import Context
from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.probe import Probe, Prober, groups_of
from glm5_quant.calibrate.stream import relative_weights, release_pages, windows
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
    swapped,
)
from glm5_quant.model.families import Linear
from glm5_quant.quant.rows import OutputMoments, RowFeedback

Chunk = tuple[int, int]


@dataclass(kw_only=True)
class Passed:
    """One stream through the attention part: the attention's output, the feed-forward block's input, side values."""

    attention: Tensor
    mlp_in: Tensor
    rest: dict[int, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(kw_only=True)
class AttentionSolver:
    """`linears` are the attention's, by name; `read` gives a source weight [N, K]; `inputs` are both streams at the
    layer's input, [W, T, D] by name, and `side` what the layer before handed over."""

    context: Context
    index: int
    module: nn.Module
    linears: dict[str, Linear]
    inputs: dict[str, Tensor]
    side: dict[str, Tensor | None]
    read: Callable[[Linear], Tensor]
    solve: Callable[..., list[Tensor]]
    evidence: Callable[..., Evidence]

    def run(self, outputs: dict[str, Tensor]) -> dict[str, Passed]:
        """Solve all groups. The attention's outputs go to `outputs`, [W, T, D] by stream."""
        weights = {name: self.read(item) for name, item in self.linears.items()}
        recorder = Recorder(self.context.dtype)
        paths = {item.module: name for name, item in self.linears.items()}
        taps = install(self.module, paths, weights, recorder)
        passed: dict[str, Passed] = {}
        kept: list[Tensor] = []
        if "source" in self.inputs:
            passed["source"] = self._pass("source", outputs["source"], seen=partial(self._record, recorder, kept))
        else:
            recorder.take(self._forward("quantized", self.context.chunks[0])[0])
        rows = self._probe(taps) if self.context.settings.quant.probed_tokens else {}
        passed["quantized"] = self._solve(taps, recorder, kept, rows, outputs["quantized"])
        # Taps and their handler hold each other, and weights: all would stay until the next collection.
        _set_handler(taps, recorder)
        return passed

    @cached_property
    def stream_T(self) -> Tensor | None:
        """What a token's error in the stream weighs before the attention."""
        return stream_weight(self.context, self.inputs["quantized"])

    def _record(self, recorder: Recorder, kept: list[Tensor], tokens: slice, attention: Any) -> None:
        """Move what the source stream's groups read, [T, K] each, to `kept`."""
        for group, x in enumerate(recorder.take(attention)):
            if group == len(kept):
                kept.append(self.context.scratch((self.inputs["source"].shape[:2].numel(), x.shape[-1]), x.dtype))
            kept[group][tokens] = x.flatten(0, -2)

    def _probe(self, taps: dict[str, Tap]) -> dict[str, RowFeedback]:
        """Feedback between the rows of each linear whose outputs do not go to the residual stream as they are."""
        context, quant = self.context, self.context.settings.quant
        moments = {
            name: OutputMoments.empty(*groups_of(item, context.runner.config), device=context.settings.device)
            for name, item in self.linears.items()
            if item.role != "o_proj" and name not in context.eight
        }
        if not moments:
            return {}
        _set_handler(taps, Prober(moments, context.dtype))
        attention = self.module.get_submodule(context.runner.family.attention_path)
        name = "source" if "source" in self.inputs else "quantized"
        first = context.source_first if name == "source" else 0
        weight_WT = None if self.stream_T is None else self.stream_T.view(context.ids_WT.shape)[first:]
        base = (context.settings.seed * 1_000_003 + self.index) * 1_000_003
        last = -(-quant.probed_tokens // context.ids_WT.shape[1])
        for start, stop in context.chunks_of(name):
            chunk = (start, min(stop, last))
            if start < last:
                weight = None if weight_WT is None else weight_WT[slice(*chunk)]
                seeds = [(base + window) % 2**63 for window in range(*chunk)]
                self._forward(name, chunk, Probe(attention, weight, seeds))
        trust = quant.shrink_trust if quant.shrink else None
        return {name: RowFeedback.of(one, quant.damp, trust) for name, one in moments.items()}

    def _solve(
        self,
        taps: dict[str, Tap],
        recorder: Recorder,
        kept: list[Tensor],
        rows: dict[str, RowFeedback],
        attention: Tensor,
    ) -> Passed:
        context, groups = self.context, recorder.groups
        plain_T = writing_T = context.token_weight_T
        if self.stream_T is not None:
            writing_T = self.stream_T if plain_T is None else self.stream_T * plain_T
        solver = Solver(context.dtype)
        _set_handler(taps, solver)
        last_TK: Tensor | None = None
        for group, names in enumerate(groups):
            weights = [taps[name].weight for name in names]
            feedback = [rows[name] for name in names if name in rows]
            pairs = zip(names, weights, strict=True)
            counted = [rows[name].weigh(weight.float()) if name in rows else weight for name, weight in pairs]
            found = self.evidence(weights[0].shape[1], context.ids_WT.numel(), self._writes(names)).of(counted)
            weight_T = writing_T if self._writes(names) else plain_T
            returned = group == len(groups) - 1 and names == [recorder.returned]
            for chunk in context.chunks:
                x_TK, tokens = self._reached(chunk).flatten(0, -2), self._tokens(chunk)
                source_TK = kept[group][self._tokens(context.followed(chunk))] if kept else None
                lack_TD = self._lack_before(chunk) if found.wants_lack else None
                found.add(x_TK, source_TK, tokens.start, None if weight_T is None else weight_T[tokens], lack_TD)
                if returned:
                    if last_TK is None:
                        last_TK = context.scratch((context.ids_WT.numel(), x_TK.shape[1]), x_TK.dtype)
                    last_TK[tokens] = x_TK
            solved = self.solve([self.linears[name] for name in names], weights, found, feedback=feedback)
            solver.solved |= dict(zip(names, solved, strict=True))
        if last_TK is None:
            return self._pass("quantized", attention)
        last, read_TK = taps[names[0]], last_TK

        def stand(tokens: slice) -> nn.Module:
            out = last(read_TK[tokens]).unflatten(0, (-1, context.ids_WT.shape[1]))
            return Replay((out, *recorder.rest) if recorder.rest else out)

        return self._pass("quantized", attention, stand=stand)

    def _pass(
        self,
        name: str,
        attention: Tensor,
        *,
        seen: Callable[[slice, Any], None] = lambda tokens, value: None,
        stand: Callable[[slice], nn.Module] | None = None,
    ) -> Passed:
        """One stream through the attention, or what stands for it at some tokens, up to the feed-forward block. The
        attention's output goes into `attention`; `seen` is shown all that it returns."""
        hidden = self.inputs[name]
        passed = Passed(attention=attention, mlp_in=self.context.scratch(hidden.shape, hidden.dtype))
        for number, chunk in enumerate(self.context.chunks_of(name)):
            tokens, rows = self._tokens(chunk), slice(*chunk)
            value, passed.mlp_in[rows] = self._forward(name, chunk, stand and stand(tokens))
            first, *rest = value if isinstance(value, tuple) else (value,)
            attention[rows], passed.rest[number] = first, tuple(rest)
            seen(tokens, value)
        return passed

    def _reached(self, chunk: Chunk) -> Tensor:
        """What the first linear that is not solved yet reads, in the quantized stream."""
        try:
            self._forward("quantized", chunk)
        except StageReached as stage:
            return stage.x
        raise AssertionError("every linear of the attention is solved")

    def _forward(self, name: str, chunk: Chunk, stand: nn.Module | None = None) -> tuple[Any, Tensor]:
        """One chunk through the attention part: the attention's return value and the feed-forward block's input."""
        release_pages()
        path, hidden = self.context.runner.family.attention_path, self.inputs[name][slice(*chunk)]
        keep, returned, side = Keep(stop=True), list[Any](), rows_of(self.side[name], chunk)
        changes: dict[str, nn.Module] = {self.context.runner.family.block: keep}
        if stand is not None:
            changes[path] = stand
        kwargs = self.context.layer_kwargs(self.index, len(hidden))
        with suppress(BlockReached), swapped(self.module, changes):
            module = self.module.get_submodule(path)
            hook = module.register_forward_hook(lambda _module, _args, output: returned.append(output))
            try:
                self.context.runner.run_layer(self.module, hidden, kwargs, side)
            finally:
                hook.remove()
        return returned[0], keep.calls[0][0]

    def _tokens(self, chunk: Chunk) -> slice:
        seqlen = self.context.ids_WT.shape[1]
        return slice(chunk[0] * seqlen, chunk[1] * seqlen)

    def _writes(self, names: list[str]) -> int:
        """Channels of the residual stream that these linears write to."""
        return next((self.linears[name].n for name in names if self.linears[name].role == "o_proj"), 0)

    def _lack_before(self, chunk: Chunk) -> Tensor:
        """What the quantized stream lacks of the source's before this layer, float32 [a chunk's followed tokens, D]."""
        source = self.inputs["source"][slice(*self.context.followed(chunk))]
        quantized = self.inputs["quantized"][max(chunk[0], self.context.source_first) : chunk[1]]
        return (source.float() - quantized.float()).flatten(0, 1)


def rows_of(side: Tensor | None, chunk: Chunk) -> Tensor | None:
    """Some windows of what the layer before handed over."""
    return None if side is None else side[slice(*chunk)]


def stream_weight(context: Context, hidden_WTD: Tensor, attention_WTD: Tensor | None = None) -> Tensor | None:
    """What a token's error in the residual stream weighs, 1 / |h|^2 with mean 1, float32 [T]; None for ones.

    The next norm divides by |h|, and the first token of a window may be a thousand times as large as all others.
    `attention_WTD` is what the attention added to the layer's input by then.
    """
    if not context.weighs_stream:
        return None
    squares = []
    added = () if attention_WTD is None else (attention_WTD,)
    for hidden_TD, *rest in windows(hidden_WTD, *added):
        now_TD = hidden_TD.float()
        for part_TD in rest:
            now_TD = now_TD + part_TD.float()
        squares.append(now_TD.square().sum(-1))
    weight_T = relative_weights(torch.cat(squares))
    return weight_T / weight_T.mean()


def _set_handler(taps: dict[str, Tap], handler: Handler) -> None:
    for tap in taps.values():
        tap.handler = handler
