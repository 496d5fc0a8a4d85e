"""Compensation of one layer: a fixed vector added to its output, for the error that calibration can predict (step 9).

Dimensions: W windows, T tokens of a window, D hidden.
The vector is the mean, over the windows that are fitted on, of what quantization takes from the layer's own
contribution (output minus input, source minus quantized). Its gain is fitted on held-out windows to what is missing
from the whole quantized stream. Every token counts by the inverse square of its size in the source stream: the next
norm divides by that size, and without it the few tokens of massive activations, whose errors are a thousand times
larger, would decide alone. It is kept only if it lowers the held-out error, weighted by 1% at least and plain at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5_quant.calibrate.stream import relative_weights, windows
from glm5_quant.model.journal import CompensationRecord
from glm5_quant.quant.compensation import GainFit

# Less than this saves nothing that a model notices, while every layer after it is calibrated on another stream.
WORTH_KEEPING = 0.99


@dataclass(frozen=True, kw_only=True)
class Compensation:
    """vector float32 [D], gain above 0, and what they are worth."""

    vector: Tensor
    gain: Tensor
    record: CompensationRecord

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """As the sidecar names them; `prefix` is the decoder layer's path with the sidecar's prefix."""
        return {f"{prefix}.compensation": self.vector, f"{prefix}.compensation_gain": self.gain}

    def apply(self, hidden_WTD: Tensor) -> None:
        """What the runtime does to a layer's output, in place, one window after the other."""
        step_D = self.gain * self.vector
        for (window,) in windows(hidden_WTD):
            window.copy_(window.float() + step_D)


def fit_compensation(
    inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], held_windows: int
) -> Compensation | None:
    """Vector and gain from both streams at a layer's ends, [W, T, D] by name; the last `held_windows` are held out.

    None where nothing is held out, or where it would not lower the error there by 1%.
    """
    source = outputs["source"]
    quantized, before = (part["quantized"][-len(source) :] for part in (outputs, inputs))
    count = len(source) - held_windows
    if held_windows <= 0 or count <= 0:
        return None
    total_D, weights = torch.zeros_like(source[0, 0], dtype=torch.float32), 0.0
    fitted = (stream[:count] for stream in (source, quantized, inputs["source"], before))
    for source_TD, quantized_TD, source_in_TD, in_TD in windows(*fitted):
        after_TD, before_TD = source_TD.float() - quantized_TD.float(), source_in_TD.float() - in_TD.float()
        lost_TD = after_TD - before_TD
        weight_T = _weight(source_TD)
        total_D += weight_T @ lost_TD
        weights += float(weight_T.sum(dtype=torch.float64))
    vector_D = total_D / weights
    held = list(_halves(source[count:], quantized[count:]))
    fit = GainFit()
    for half, source_TD, quantized_TD in held:
        root_T1 = _weight(source_TD).sqrt()[:, None]
        fit.add((source_TD.float() - quantized_TD.float()) * root_T1, root_T1 * vector_D, half)
    gain = torch.tensor(fit.gain(), dtype=torch.float32)
    if gain <= 0:
        return None
    left, plain_left = _error_left([pair for _, *pair in held], gain * vector_D)
    if left > WORTH_KEEPING or plain_left >= 1:
        return None
    return Compensation(vector=vector_D, gain=gain, record=CompensationRecord(gain=float(gain), error_left=left))


def _error_left(pairs: list[list[Tensor]], step_D: Tensor) -> tuple[float, float]:
    """Squared error with the step as a share of that without, weighted and plain.

    Measured as it will be, rounded to the stream's dtype: a step below its resolution may do nothing, or too much.
    """
    before, after = [0.0, 0.0], [0.0, 0.0]
    for source_TD, quantized_TD in pairs:
        stepped_TD = (quantized_TD.float() + step_D).to(quantized_TD.dtype)
        weight_T = _weight(source_TD).double()
        for sums, stream_TD in ((before, quantized_TD), (after, stepped_TD)):
            error_T = (stream_TD.float() - source_TD.float()).square().sum(-1, dtype=torch.float64)
            sums[0] += float(error_T @ weight_T)
            sums[1] += float(error_T.sum())
    weighted, plain = (new / old if old > 0 else 1.0 for new, old in zip(after, before, strict=True))
    return weighted, plain


def _weight(source_TD: Tensor) -> Tensor:
    """1 / |h_t|^2, float32 [T]."""
    return relative_weights(source_TD.float().square().sum(-1))


def _halves(source_WTD: Tensor, quantized_WTD: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Held-out tokens in two halves that check each other: of different windows, or of the only one."""
    count, tokens = source_WTD.shape[:2]
    for w in range(count):
        if count > 1:
            yield int(w >= count // 2), source_WTD[w], quantized_WTD[w]
        else:
            for half, part in enumerate((slice(0, tokens // 2), slice(tokens // 2, tokens))):
                yield half, source_WTD[w, part], quantized_WTD[w, part]
