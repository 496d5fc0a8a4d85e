"""Stop a layer at its linears: see what they read, and go on with what was made of them.

A transformers layer runs from its first line to its last. To solve `q_proj` before `o_proj` sees its tokens, every
linear to be quantized is replaced by a `Tap`. A forward is broken off at the first one that is not solved yet
(`StageReached`, which holds its input), and goes through those that are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SLICE_VALUES = 1 << 20


class StageReached(Exception):
    """An unsolved linear was reached with this input: the rest of the forward is not wanted."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


class Tap(nn.Module):
    """A linear whose call is handed to `handler(tap, x_BTK) -> y_BTN`. Weight in the source's dtype, bias float32."""

    def __init__(self, name: str, weight_NK: Tensor, bias_N: Tensor | None, handler: Handler) -> None:
        super().__init__()
        self.name, self.handler = name, handler
        self.weight, self.bias = weight_NK, bias_N
        self.in_features, self.out_features = weight_NK.shape[1], weight_NK.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.handler(self, x)

    def apply_weight(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x @ weight.T + bias, the product in `dtype`, the result in x's."""
        return linear(x, self.weight, self.bias, dtype)


class Handler(Protocol):
    def __call__(self, tap: Tap, x: Tensor) -> Tensor: ...


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype == x.dtype:
        return F.linear(x, weight_NK.to(x.dtype), bias_N)
    out = F.linear(x.to(dtype), weight_NK.to(dtype)).to(x.dtype)
    return out if bias_N is None else out + bias_N


def install(root: nn.Module, names: dict[str, str], weights: dict[str, Tensor], handler: Handler) -> dict[str, Tap]:
    """Replace the linears of `root` at the given paths; the result is by name.

    `names` maps a path to the checkpoint's module name, `weights` that name to the source weight [N, K].
    """
    taps = {}
    for path, name in names.items():
        parent_path, _, leaf = path.rpartition(".")
        parent = root.get_submodule(parent_path)
        old = getattr(parent, leaf)
        bias = None if old.bias is None else old.bias.detach()
        taps[name] = Tap(name, weights[name], bias, handler)
        setattr(parent, leaf, taps[name])
    return taps


class Recorder:
    """Handler of the source stream: computes, and keeps each distinct input with the names of its readers.

    `returned` names the linear whose output the attention returns as it is, if there is one, and `rest` is what it
    returns beside it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.groups: list[list[str]] = []
        self.inputs: list[Tensor] = []
        self.returned: str | None = None
        self.rest: tuple[object, ...] = ()
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, tap: Tap, x: Tensor) -> Tensor:
        group = next((i for i, seen in enumerate(self.inputs) if _same(x, seen)), len(self.inputs))
        if group == len(self.inputs):
            self.inputs.append(x)
        if group == len(self.groups):
            self.groups.append([])
        if tap.name not in self.groups[group]:
            self.groups[group].append(tap.name)
        out = tap.apply_weight(x, self.dtype)
        self._last = tap.name, out
        return out

    def take(self, value: object) -> list[Tensor]:
        """The inputs of one forward, for the next to start anew; `value` is what the attention returned."""
        first, *rest = value if isinstance(value, tuple) else (value,)
        name, out = self._last or (None, None)
        self.returned = name if first is out and all(one is None for one in rest) else None
        self.rest = tuple(rest)
        inputs, self.inputs, self._last = self.inputs, [], None
        return inputs


class Solver:
    """Handler of the quantized stream: computes at linears whose `solved` weight it has, by name, and breaks the
    forward off at the first other one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.solved: dict[str, Tensor] = {}

    def __call__(self, tap: Tap, x: Tensor) -> Tensor:
        if tap.name not in self.solved:
            raise StageReached(x)
        return linear(x, self.solved[tap.name], tap.bias, self.dtype)


class BlockReached(Exception):
    """Thrown by a `Keep` that stops: what the layer does after it is of no interest."""


class Keep(nn.Module):
    """Stands in for a submodule: remembers what it was called with and returns zeros like its first input.

    With `stop` it breaks the forward off instead, whatever the submodule would have returned (glm5_ref's feed-forward
    block returns its routing too).
    """

    def __init__(self, *, stop: bool = False) -> None:
        super().__init__()
        self.stop = stop
        self.calls: list[tuple[Tensor, ...]] = []

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        values = (*args, *kwargs.values())
        self.calls.append(values)
        if self.stop:
            raise BlockReached
        return torch.zeros_like(values[0])


class Replay(nn.Module):
    """Stands in for a submodule: returns a stored output, whatever it is called with.

    The stored tensor is given the shape of the first input, since MoE blocks call experts with tokens flattened.
    """

    def __init__(self, output: Tensor | tuple[object, ...]) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor | tuple[object, ...]:
        if isinstance(self.output, tuple):
            return self.output
        first = args[0] if args else next(iter(kwargs.values()))
        return self.output.view(*first.shape[:-1], self.output.shape[-1]).to(first.dtype)


class Sliced(nn.Module):
    """Stands in for a norm: calls it on a few rows at a time, since what it takes on the way, in float32, is several
    times the stream, and goes through memory instead of the cache (a fifth of the time on 64 windows of 512)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        step = max(SLICE_VALUES // max(x[:1].numel(), 1), 1)
        if len(x) <= step:
            return self.norm(x)  # type: ignore[no-any-return]
        out = torch.empty(0)
        for start in range(0, len(x), step):
            part = self.norm(x[start : start + step])
            out = part.new_empty(len(x), *part.shape[1:]) if start == 0 else out
            out[start : start + step] = part
        return out


def slice_norms(root: nn.Module) -> None:
    """Put every norm of a layer behind `Sliced`. Norms are known by their class's name, as in all of transformers."""
    found = [(path, module) for path, module in root.named_modules() if type(module).__name__.endswith("Norm")]
    for path, module in found:
        parent, _, leaf = path.rpartition(".")
        setattr(root.get_submodule(parent), leaf, Sliced(module))


@contextmanager
def swapped(root: nn.Module, changes: dict[str, nn.Module]) -> Iterator[None]:
    """Put other modules at the given paths for the length of a block."""
    saved: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for path, module in changes.items():
            parent_path, _, leaf = path.rpartition(".")
            parent = root.get_submodule(parent_path)
            saved.append((parent, leaf, getattr(parent, leaf)))
            setattr(parent, leaf, module)
        yield
    finally:
        for parent, leaf, module in reversed(saved):
            setattr(parent, leaf, module)


def _same(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())
