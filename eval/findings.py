"""From part errors to findings: which layer, expert, router, head row or cache layer stands out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from glm5_quant.eval.layer_errors import PartErrors
from glm5_quant.eval.result import Finding

BROKEN = 0.5
"""Relative error of a part that no sound INT4 quantization reaches."""
OUTLIER = 5.0
"""Times the median of its peers from which a part stands out, once its error is above SMALL."""
SMALL = 0.05


def stands_out(value: float, peers: Sequence[float]) -> bool:
    """Whether an error is broken by itself or far above its peers."""
    typical = median(peers) if peers else 0.0
    return value > BROKEN or (value > SMALL and value > OUTLIER * typical)


def part_findings(found: PartErrors, tokenizer: Any = None) -> tuple[Finding, ...]:
    """Findings on one export, worst kinds first: routers, experts, layers, head."""
    return (*_routers(found), *_experts(found), *_layers(found), *_head(found, tokenizer))


def _routers(found: PartErrors) -> list[Finding]:
    return [
        Finding(kind="router", where=f"layer {layer}", value=None, message=f"layer {layer}: the router's {words}")
        for layer, words in sorted(found.routers.items())
    ]


def _experts(found: PartErrors) -> list[Finding]:
    errors = {where: energy.relative for where, energy in found.experts.items()}
    peers = list(errors.values())
    return [
        Finding(
            kind="expert",
            where=f"layer {layer} expert {expert}",
            value=error,
            message=f"layer {layer}, expert {expert}: relative error {error:.2g} on the same inputs "
            f"(median over experts {median(peers):.2g}; one that makes up for the stream's errors differs on purpose)",
        )
        for (layer, expert), error in sorted(errors.items())
        if stands_out(error, peers)
    ]


def _layers(found: PartErrors) -> list[Finding]:
    errors = {layer: energy.relative for layer, energy in found.local.items()}
    peers = list(errors.values())
    return [
        Finding(
            kind="layer",
            where=f"layer {layer}",
            value=error,
            message=f"layer {layer}: relative error {error:.2g} of what it adds, on the same inputs "
            f"(median over layers {median(peers):.2g})",
        )
        for layer, error in sorted(errors.items())
        if stands_out(error, peers)
    ]


def _head(found: PartErrors, tokenizer: Any) -> list[Finding]:
    if found.head_lost is None or found.head_total is None:
        return []
    scale = found.head_total.mean().clamp(min=1e-12)
    relative = (found.head_lost / scale).sqrt()
    typical = float(relative.median())
    rows = torch.nonzero(relative > max(OUTLIER * typical, SMALL))[:, 0].tolist()
    if not rows:
        return []
    worst = sorted(rows, key=lambda row: -float(relative[row]))[:8]
    names = ", ".join(repr(tokenizer.decode([row])) if tokenizer is not None else str(row) for row in sorted(worst))
    value = float(relative[worst[0]])
    message = f"head: {len(rows)} rows differ from the source far more than the rest: tokens {names}"
    return [Finding(kind="head", where=f"rows {sorted(worst)}", value=value, message=message)]


def cache_findings(keys: Sequence[float], values: Sequence[float]) -> tuple[Finding, ...]:
    """Layers of a quantized cache whose keys or values lost far more than the others'."""
    found = []
    for name, errors in (("keys", keys), ("values", values)):
        for layer, error in enumerate(errors):
            if stands_out(error, errors):
                message = (
                    f"KV cache, layer {layer}: {name} lost {error:.2g} of themselves (median over layers "
                    f"{median(errors):.2g}): a wrong scale?"
                )
                found.append(Finding(kind="kv_cache", where=f"layer {layer}", value=error, message=message))
    return tuple(found)
