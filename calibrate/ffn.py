"""Solve one feed-forward network (a dense MLP, a shared expert or one routed expert) over the tokens that reach it.

Dimensions: T tokens, D hidden, I intermediate. Only one network's matrices are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.stream import make_writable, token_parts
from glm5_quant.calibrate.taps import linear
from glm5_quant.model.families import Linear
from glm5_quant.quant.target import few

# Tokens for each input of a down-projection that a pool runs through an expert. Twice as many take 1% off its error.
POOL_TOKENS_PER_CHANNEL = 4
# A lack is told in units of a network's output: a router weight below this counts as this.
LEAST_SCALE = 0.01
Solve = Callable[[list[Linear], list[Tensor], Evidence], list[Tensor]]
# Sees a network's quantized outputs before the router's weights: its down-projection, token indices, outputs, weights.
Watch = Callable[[Linear, Tensor | int, Tensor, Tensor | None], None]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Which tokens a network sees. `index_T` ascending, None for all; `scale_T` multiplies its output (router weight).

    `weight_T` is each token's weight in the statistics. With `all_seen` the statistics are of all tokens (every expert
    sees every token, the output keeps true routing).
    """

    index_T: Tensor | None = None
    scale_T: Tensor | None = None
    weight_T: Tensor | None = None
    all_seen: bool = False

    def reached(self, part: slice) -> tuple[Tensor | slice, Tensor | int, Tensor | None]:
        """Of a part of the tokens seen, those that get an output: which of the part they are, where they stand among
        all tokens, and their scales."""
        if self.index_T is None:
            return slice(None), part.start, _slice(self.scale_T, part)
        if not self.all_seen:
            return slice(None), self.index_T[part], _slice(self.scale_T, part)
        ends = torch.tensor([part.start, part.stop], device=self.index_T.device)
        own = slice(*torch.searchsorted(self.index_T, ends).tolist())
        return self.index_T[own] - part.start, self.index_T[own], _slice(self.scale_T, own)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A gated feed-forward network: linears by role, and a way to read a linear's source weight [N, K]."""

    inputs: list[Linear]
    down: Linear
    read: Callable[[Linear], Tensor]
    activation: Callable[[Tensor], Tensor]

    def hidden(self, x_TD: Tensor, weights_NK: list[Tensor], dtype: torch.dtype) -> Tensor:
        """act(gate x) * (up x), float32 [T, I]; a fused gate-up matrix holds the gate's rows first."""
        outs = [linear(x_TD, weight, None, dtype) for weight in weights_NK]
        gate, up = outs if len(outs) == 2 else outs[0].chunk(2, dim=-1)
        return self.activation(gate) * up


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Inputs and outputs of the feed-forward block in both streams, [all tokens, D].

    Outputs start as zeros and are `added` to, or are set by the one network that writes them: they may then be the
    inputs themselves, whose rows nobody reads once their output is known.
    `source_x` is None when only the quantized stream is followed; it may hold the tokens from `source_from` on only.
    `lack` is what the quantized residual stream lacks of the source's where `out` is added to it, [followed tokens, D]:
    each down-projection makes up for what it can. None where outputs are not added as they are. `weight_T` is what a
    token's error weighs there, for all tokens; None for ones.
    """

    x: Tensor
    out: Tensor
    source_x: Tensor | None = None
    source_out: Tensor | None = None
    added: bool = False
    source_from: int = 0
    lack: Tensor | None = None
    weight_T: Tensor | None = None

    def followed(self, index_T: Tensor) -> Tensor:
        """Where tokens stand in the source stream; those before it are left out."""
        return index_T[index_T >= self.source_from] - self.source_from

    def followed_rows(self, start: int, stop: int) -> slice:
        """The same for tokens that follow one another."""
        return slice(max(start - self.source_from, 0), max(stop - self.source_from, 0))

    def weight_of(self, index: Tensor | int, count: int, weight_T: Tensor | None) -> Tensor | None:
        """Weights of `count` tokens in the statistics of a down-projection: the given ones, and the stream's own."""
        if self.weight_T is None:
            return weight_T
        own_T = self.weight_T[index : index + count] if isinstance(index, int) else self.weight_T[index]
        return own_T if weight_T is None else own_T * weight_T

    def write(self, out: Tensor, index: Tensor | int, y_TD: Tensor, scale_T: Tensor | None) -> None:
        """Add a network's outputs to `out` at some tokens, or set them."""
        y = y_TD if scale_T is None else y_TD * scale_T[:, None]
        if not isinstance(index, int):
            # Where few of the rows between the first and the last are meant, what lies between them stays as it is.
            if out.is_cpu and len(index) and (reach := int(index[-1]) + 1 - int(index[0])) <= 2 * len(index):
                make_writable(out[index[0] :][:reach])
            out.index_add_(0, index, y)
        elif self.added:
            make_writable(out[index : index + len(y)])
            out[index : index + len(y)] += y
        else:
            out[index : index + len(y)] = y

    def lack_of(self, index: Tensor | int, count: int, scale_T: Tensor | None) -> Tensor | None:
        """What is lacking now, of a network's next `count` tokens, in units of its output: float32 [followed, D]."""
        if self.lack is None or self.source_out is None:
            return None
        if isinstance(index, int):
            rows = self.followed_rows(index, index + count)
            lack_TD = self.lack[rows].to(torch.float32, copy=True)
            if self.added:
                lack_TD += self.source_out[rows]
                lack_TD -= self.out[rows.start + self.source_from : rows.stop + self.source_from]
        else:
            followed = self.followed(index)
            lack_TD = self.lack.index_select(0, followed).float()
            lack_TD += self.source_out.index_select(0, followed)
            lack_TD -= self.out.index_select(0, followed + self.source_from)
        if scale_T is None:
            return lack_TD
        return lack_TD / scale_T[len(scale_T) - len(lack_TD) :, None].clamp(min=LEAST_SCALE)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What experts lean on that too few tokens reach (EAMPQ step 2): all tokens of their layer, but for held-out ones.

    `inputs`: moments of the first `tokens` tokens, for gate and up; a down-projection leans on those of what the solved
    gate and up make of such tokens. `kappa`: how many of them count, for each input. `weight_T`: what each of all
    tokens weighs.
    """

    inputs: Evidence
    tokens: int
    kappa: float
    weight_T: Tensor | None = None


def solve_network(
    network: Network,
    tokens: Tokens,
    streams: Streams,
    *,
    solve: Solve,
    evidence: Callable[..., Evidence],
    pool: Pool | None,
    chunk_tokens: int,
    scratch: Callable[[tuple[int, ...], torch.dtype], Tensor],
    dtype: torch.dtype,
    watch: Watch | None = None,
) -> None:
    """Solve gate and up on one set of moments, run them, solve down on what comes out, add the output to `streams`.

    A network that few tokens reach, or none, leans on `pool` where the caller has one. The quantized stream's hidden
    activations wait for the down-projection in a buffer that `scratch` makes.
    """
    source = [network.read(item) for item in network.inputs]
    seen = None if tokens.all_seen else tokens.index_T
    total = streams.x.shape[0] if seen is None else len(seen)

    first = evidence(network.inputs[0].k, total).of(source)
    for part in token_parts(total, chunk_tokens):
        x, source_x, index = _take(streams, seen, part)
        first.add(x, source_x, index, _slice(tokens.weight_T, part))
    if pool is not None and few(total, network.inputs[0].k):
        first.lean_on(pool.inputs, pool.kappa * network.inputs[0].k)
    solved = solve(network.inputs, source, first)
    del first

    kept_TI = scratch((total, network.down.k), streams.x.dtype)
    source_down = network.read(network.down)
    writes = network.down.n if streams.lack is not None and not tokens.all_seen else 0
    second = evidence(network.down.k, total, writes).of([source_down])
    for part in token_parts(total, chunk_tokens):
        x, source_x, index = _take(streams, seen, part)
        hidden = network.hidden(x, solved, dtype)
        source_hidden = None if source_x is None else network.hidden(source_x, source, dtype)
        lack = streams.lack_of(index, len(hidden), _slice(tokens.scale_T, part)) if second.wants_lack else None
        weight = streams.weight_of(index, len(hidden), _slice(tokens.weight_T, part))
        second.add(hidden, source_hidden, index, weight, lack)
        kept_TI[part] = hidden
        own, index, scale = tokens.reached(part)
        if source_hidden is not None and streams.source_out is not None:
            there = streams.followed_rows(index, index).start if isinstance(index, int) else streams.followed(index)
            streams.write(streams.source_out, there, linear(source_hidden[own], source_down, None, dtype), scale)
    if pool is not None and few(total, network.down.k):
        pooled = evidence(network.down.k, POOL_TOKENS_PER_CHANNEL * network.down.k, pooled=True)
        for index in torch.split(spread(streams.x[: pool.tokens], network.down.k), chunk_tokens):
            hidden = network.hidden(streams.x.index_select(0, index), solved, dtype)
            weight = None if pool.weight_T is None else pool.weight_T[index]
            pooled.add(hidden, None, index, streams.weight_of(index, len(index), weight))
        second.lean_on(pooled, pool.kappa * network.down.k)
        del pooled
    solved_down = solve([network.down], [source_down], second)[0]
    del second

    for part in token_parts(total, chunk_tokens):
        own, index, scale = tokens.reached(part)
        out = linear(kept_TI[part][own], solved_down, None, dtype)
        streams.write(streams.out, index, out, scale)
        if watch is not None and len(out):
            watch(network.down, index, out, scale)


def spread(x_TD: Tensor, k: int) -> Tensor:
    """Indices of some of all tokens, evenly spread: enough for moments of k channels to lean on."""
    tokens = len(x_TD)
    return torch.arange(0, tokens, max(1, tokens // (POOL_TOKENS_PER_CHANNEL * k)), device=x_TD.device)


def _slice(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _take(streams: Streams, index_T: Tensor | None, part: slice) -> tuple[Tensor, Tensor | None, Tensor | int]:
    """Rows of both inputs for one part of the tokens, and where they stand among all tokens."""
    if index_T is None:
        source = None
        if streams.source_x is not None:
            source = streams.source_x[streams.followed_rows(part.start, part.stop)]
        return streams.x[part], source, part.start
    index = index_T[part]
    if streams.source_x is None:
        return streams.x.index_select(0, index), None, index
    return streams.x.index_select(0, index), streams.source_x.index_select(0, streams.followed(index)), index
