"""Settings of EAMPQ: one frozen dataclass, checked where it is made, and the three presets built from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Rotation = Literal["none", "folded", "full"]
Activations = Literal["none", "int8", "int4-channel", "int4-block"]


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """What to do to every matrix. Each ingredient has its own switch; a bad value raises ValueError naming the field.

    group_size        columns of one row that share a scale and a zero-point
    symmetric         zero-point fixed at 8 (for readers that know no zero-points)
    weighted_grid     grids minimise the error weighted by diag H; off: unweighted error
    error_feedback    rounding with error feedback (GPTQ, arXiv 2210.17323); off: round to nearest
    damp              share of the typical diagonal of H (damping.py) added to its diagonal
    probed_tokens     what an attention makes queries, keys and values of: errors are also carried from row to row, by
                      what they do to its output (rows.py), which so many tokens tell; 0 = off
    shrink            correlations in H times 1 - r, r = n / (n + c N_eff) or more where the tokens vary much
    shrink_trust      that c (see shrinkage.py)
    pool_kappa        an expert that fewer than 4 tokens for each input reach leans on what all tokens of its layer
                      would give it, as if it had seen so many of them for each input; 0 = off
    alphas            candidate strengths of the target correction toward the source stream; () = off
    relative_stream   tokens weigh 1 / |h|^2 where a matrix writes to the residual stream h: what the next norm sees
    correct_stream    what is written to the residual stream also makes up for what the quantized stream lacks there
    target_delta      share of the same added before the inverse of H in that correction
    rotation          64-point Hadamard on input channels: nowhere, where it folds into weights, or everywhere
    activations       number format of activations at run time
    shadow_budget     bytes of the FP16 residuals, as a share of the FP16 bytes of the experts
    shadow_dtype      format of the residual columns
    channel_tokens    statistics are of so many tokens for each input channel at most, evenly spread over all, or of as
                      many as make 8 Mi values
    numeric_weight    lam of the token weight c^p * (1 + lam * numeric)
    routing_exponent  p of that weight; 2 is what a squared error of the layer's output weighs
    descent_sweeps    sweeps of coordinate descent over the codes after error feedback; fewer of rows longer than 1,536
    refit_scales      before each of those sweeps, a least-squares refit of the scales with codes fixed
    compensation      add gamma * predicted residual to layer outputs
    refit_router      fit routers again to the quantized stream; kept where more of the source's experts are chosen
    """

    group_size: int = 64
    symmetric: bool = False
    weighted_grid: bool = True
    error_feedback: bool = True
    probed_tokens: int = 8192
    damp: float = 0.01
    shrink: bool = True
    shrink_trust: float = 1.0
    pool_kappa: float = 0.5
    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    relative_stream: bool = True
    correct_stream: bool = True
    target_delta: float = 0.2
    rotation: Rotation = "none"
    activations: Activations = "none"
    shadow_budget: float = 0.003
    shadow_dtype: Literal["float16", "int8"] = "float16"
    channel_tokens: int = 40
    numeric_weight: float = 2.0
    routing_exponent: int = 2
    descent_sweeps: int = 3
    refit_scales: bool = True
    compensation: bool = True
    refit_router: bool = False

    def __post_init__(self) -> None:
        _require(self.group_size >= 8 and self.group_size % 8 == 0, "group_size", self.group_size, "a multiple of 8")
        _require(_finite(self.damp, 0.0), "damp", self.damp, "a finite number of at least 0")
        _require(self.probed_tokens >= 0, "probed_tokens", self.probed_tokens, "0 or more")
        _require(_finite(self.shrink_trust, 1e-6), "shrink_trust", self.shrink_trust, "a finite number above 0")
        _require(_finite(self.pool_kappa, 0.0, 16.0), "pool_kappa", self.pool_kappa, "a number from 0 to 16")
        _require(all(_finite(a, 0.0, 1.0) for a in self.alphas), "alphas", self.alphas, "numbers from 0 to 1")
        _require(_finite(self.target_delta, 0.0), "target_delta", self.target_delta, "a finite number of at least 0")
        _require(self.rotation in get_args(Rotation), "rotation", self.rotation, "none, folded or full")
        _require(
            self.activations in get_args(Activations),
            "activations",
            self.activations,
            "none, int8, int4-channel or int4-block",
        )
        _require(_finite(self.shadow_budget, 0.0, 1.0), "shadow_budget", self.shadow_budget, "a share from 0 to 1")
        _require(self.shadow_dtype in ("float16", "int8"), "shadow_dtype", self.shadow_dtype, "float16 or int8")
        _require(self.channel_tokens >= 1, "channel_tokens", self.channel_tokens, "1 or more")
        _require(
            _finite(self.numeric_weight, 0.0, 1e4), "numeric_weight", self.numeric_weight, "a number from 0 to 10,000"
        )
        _require(self.routing_exponent in (0, 1, 2), "routing_exponent", self.routing_exponent, "0, 1 or 2")
        _require(0 <= self.descent_sweeps <= 16, "descent_sweeps", self.descent_sweeps, "0 to 16")


def _finite(value: float, low: float, high: float = math.inf) -> bool:
    return math.isfinite(value) and low <= value <= high


def _require(good: bool, field: str, value: object, expected: str) -> None:
    if not good:
        raise ValueError(f"{field} is {value!r}, expected {expected}")


PRESETS: dict[str, QuantConfig] = {
    # One stream, and a forward pass takes two thirds of its time.
    "fast": QuantConfig(alphas=(), channel_tokens=8, probed_tokens=4096, shadow_budget=0.0, compensation=False),
    "default": QuantConfig(),
    "high": QuantConfig(rotation="full", descent_sweeps=8),
}
