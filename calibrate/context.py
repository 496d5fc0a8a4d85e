"""What every layer of a calibration needs, owned by the run.

Dimensions: W windows, T tokens of all windows in order, K input channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.settings import Settings
from glm5_quant.calibrate.stream import scratch
from glm5_quant.model.checkpoint import Checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import Linear
from glm5_quant.model.layers import LayerRunner
from glm5_quant.quant.target import few


@dataclass(kw_only=True)
class Context:
    """What every layer needs, owned by the run.

    `chunks` are ranges of windows that go through a layer together; the source stream follows the windows from
    `source_first` on; `token_weight_T` is each token's numeric weight or
    None; `dtype` is the one layers run in and hidden states are kept in (statistics and sums are float32).
    """

    checkpoint: Checkpoint
    runner: LayerRunner
    settings: Settings
    linears: dict[int, list[Linear]]
    eight: frozenset[str]
    ids_WT: Tensor
    chunks: list[tuple[int, int]]
    scale_dtype: torch.dtype
    dtype: torch.dtype
    chunk_tokens: int
    scratch_folder: Path
    activation: Callable[[Tensor], Tensor]
    source_first: int = 0
    shadowed: frozenset[str] = frozenset()
    spill_folder: Path | None = None
    token_weight_T: Tensor | None = None
    kwargs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def scratch(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer of zeros for all tokens: a file, or memory of another device than the CPU."""
        if self.settings.device != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.settings.device)
        return scratch(self.scratch_folder, shape, dtype)

    def chunks_of(self, name: str) -> list[tuple[int, int]]:
        """The chunks as ranges of a stream's own windows."""
        first = self.source_first if name == "source" else 0
        return [(max(start - first, 0), stop - first) for start, stop in self.chunks if stop > first]

    def followed(self, windows: tuple[int, int]) -> tuple[int, int]:
        """The part of a range of windows that the source stream follows, as a range of its own windows."""
        return max(windows[0] - self.source_first, 0), max(windows[1] - self.source_first, 0)

    @property
    def held_windows(self) -> int:
        return self.settings.held_windows(len(self.ids_WT))

    @property
    def held_from(self) -> int:
        """First held-out token's index."""
        windows, seqlen = self.ids_WT.shape
        return (windows - self.held_windows) * seqlen

    @property
    def two_streams(self) -> bool:
        return bool(self.settings.quant.alphas)

    def evidence(self, k: int, tokens: int, writes: int = 0, *, hold: bool = False, pooled: bool = False) -> Evidence:
        """Moments of k channels for so many tokens; without the gap, and nothing held out, where they are too few.

        `writes`: how many channels of the residual stream the group writes to, to make up for what they lack.
        With `hold`, tokens are held out where only one stream is followed, for the ablation: they join in the end.
        `pooled`: moments that others lean on have neither.
        """
        gap = self.two_streams and not few(tokens, k) and not pooled
        hold = hold and not self.two_streams and not pooled
        return Evidence.empty(
            k,
            tokens=tokens,
            held_from=self.held_from if gap or hold else self.ids_WT.numel(),
            gap=gap,
            device=self.settings.device,
            # Products of float16 would overflow at 65,504.
            product_dtype=torch.float32 if self.dtype == torch.float16 else self.dtype,
            sampled=self.sampled,
            writes=writes if self.corrects_stream else 0,
            channel_tokens=self.settings.quant.channel_tokens,
        )

    @property
    def corrects_stream(self) -> bool:
        """Whether what the layer writes to the stream is to make up for what the quantized stream lacks."""
        return self.two_streams and self.settings.quant.correct_stream and self.runner.family.adds_plainly

    @property
    def weighs_stream(self) -> bool:
        """Whether errors that a layer writes to the stream weigh relative to it."""
        return self.settings.quant.relative_stream and self.runner.family.adds_plainly

    @property
    def sampled(self) -> bool:
        """Whether inputs are kept beside their moments: for the channel scales of activations."""
        return self.settings.quant.activations == "int4-channel"

    def _moved(self, value: Any) -> Any:
        return value.to(self.settings.device) if isinstance(value, Tensor) else value

    def layer_kwargs(self, layer: int, windows: int) -> dict[str, Any]:
        """What the model's own forward hands to this layer for a batch of so many windows: masks, rotary angles."""
        if windows not in self.kwargs:
            self.kwargs[windows] = tree_map(self._moved, self.runner.kwargs_for(self.ids_WT[:windows]))
        return self.kwargs[windows][layer]


def activation(config: Any, file: Path | None = None) -> Callable[[Tensor], Tensor]:
    """The function between gate and up, by the name the config gives it.

    Raises:
        UserError: it has another name than any that `transformers` knows.
    """
    from transformers.activations import ACT2FN

    name = str(getattr(config, "hidden_act", "silu"))
    if name not in ACT2FN:
        raise UserError("unknown activation", file=file, item="hidden_act", found=name)
    found: Callable[[Tensor], Tensor] = ACT2FN[name]
    return found
