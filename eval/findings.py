"""From part errors to findings: which layer, expert, router, head row or cache layer stands out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from glm5_quant.eval.layer_errors import PartErrors, Place
from glm5_quant.eval.result import Finding

BROKEN = 0.5
"""Relative error of a part that no sound INT4 quantization reaches."""
OUTLIER = 5.0
"""Times the median of its peers from which a part stands out, once its error is above SMALL."""
SMALL = 0.05
HARM = 0.1
"""Share of the stream's squared error from which a suspect does harm. Measured on exports of glm5-tiny and
stories260k-glm4moe by the default preset: experts whose scales are four times too large 0.10 to 0.99, sound suspects
at most 0.04 (0.08 where 12,000 tokens were all the calibration saw)."""


def stands_out(value: float, peers: Sequence[float]) -> bool:
    """Whether an error is broken by itself or far above its peers."""
    typical = median(peers) if peers else 0.0
    return value > BROKEN or (value > SMALL and value > OUTLIER * typical)


def suspects(found: PartErrors) -> dict[Place, str]:
    """Layers and experts whose error on the same inputs stands out, in order, and that error in words.

    Suspects only: a part that makes up for errors of the stream differs from the source's on purpose.
    """
    layers = {layer: energy.relative for layer, energy in found.local.items()}
    experts = {where: energy.relative for where, energy in found.experts.items()}
    named: dict[Place, str] = {}
    for peers, kind in ((experts, "experts"), (layers, "layers")):
        for where, error in sorted(peers.items()):
            if stands_out(error, list(peers.values())):
                typical = median(peers.values())
                place = where if isinstance(where, tuple) else (where, None)
                named[place] = f"relative error {error:.2g} on the same inputs (median over {kind} {typical:.2g})"
    return named


def part_findings(found: PartErrors, shares: Mapping[Place, float], tokenizer: Any = None) -> tuple[Finding, ...]:
    """Findings on one export, worst kinds first: routers, experts, layers, head.

    shares: for every suspect, the share of the stream's squared error that the source's part in its place takes away.
    """
    return (*_routers(found), *_parts(found, shares), *_head(found, tokenizer))


def _routers(found: PartErrors) -> list[Finding]:
    return [
        Finding(kind="router", where=f"layer {layer}", value=None, message=f"layer {layer}: the router's {words}")
        for layer, words in sorted(found.routers.items())
    ]


def _parts(found: PartErrors, shares: Mapping[Place, float]) -> list[Finding]:
    named = []
    for place, words in suspects(found).items():
        if shares[place] <= HARM:
            continue
        layer, expert = place
        energy = found.local[layer] if expert is None else found.experts[layer, expert]
        where = f"layer {layer}" if expert is None else f"layer {layer} expert {expert}"
        words += f"; the source's in its place takes {shares[place]:.0%} of the stream's squared error away"
        kind = "layer" if expert is None else "expert"
        named.append(Finding(kind=kind, where=where, value=energy.relative, message=f"{where}: {words}"))
    return named


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
