"""Experts that saw fewer tokens than the coverage target, and what was done for each: nothing is rounded blind.

Dimensions: K inputs of a matrix. All of it is read back from the journal, so that a resumed run reports the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm5_quant.model.journal import LayerRecord, ModuleRecord
from glm5_quant.quant.shrinkage import shrinkage
from glm5_quant.quant.target import few


@dataclass(frozen=True, kw_only=True)
class Starved:
    """One expert below the target. `effective_tokens` is (sum w)^2 / sum w^2 of the tokens its statistics rest on;
    `kind` names what was done in a word (all-experts, pooled, shrunk, grid, nothing), `done` in a sentence."""

    layer: int
    expert: int
    tokens: int
    effective_tokens: float
    kind: str
    done: str


def starved_experts(record: LayerRecord, target: int, settings: Mapping[str, Any]) -> list[Starved]:
    """The starved experts of one layer, by number. `settings`: the manifest's."""
    found = []
    for expert, tokens in enumerate(record.coverage or ()):
        if tokens >= target:
            continue
        matrices = {m.role: m for name, m in record.modules.items() if f".experts.{expert}." in name}
        if not matrices:
            continue
        kind, done = _treatment(tokens, matrices, settings)
        effective = min(m.effective_tokens for m in matrices.values())
        found.append(
            Starved(layer=record.layer, expert=expert, tokens=tokens, effective_tokens=effective, kind=kind, done=done)
        )
    return found


def _treatment(tokens: int, matrices: Mapping[str, ModuleRecord], settings: Mapping[str, Any]) -> tuple[str, str]:
    quant = settings["quant"]
    if settings.get("all_experts"):
        return "all-experts", "solved on every token of the layer"
    if tokens == 0:
        alone = [role for role, m in matrices.items() if m.fallback]
        pooled = [role for role in matrices if role not in alone]
        parts = [f"{' and '.join(pooled)} solved on moments of all tokens of the layer"] if pooled else []
        parts += [f"{' and '.join(alone)} rounded to nearest on its own grid"] if alone else []
        return ("pooled" if pooled else "nothing"), ", ".join(parts)
    if not quant["error_feedback"]:
        return "grid", "grid weighted by what it saw, each weight rounded by itself"
    if not quant["shrink"]:
        return "nothing", "moments taken as they are"
    first = next(m for role, m in matrices.items() if role != "down")
    moved = shrinkage(first.k, first.effective_tokens, quant["shrink_trust"])
    shrunk = f"moments shrunk to their diagonal by {moved:.0%} or more"
    kappa = quant["pool_kappa"]
    leaning = " and ".join(role for role, m in matrices.items() if kappa and few(m.tokens, m.k))
    if leaning:
        return "pooled", f"{leaning} leaned on all tokens of the layer as on {kappa:g} an input, {shrunk}"
    return "shrunk", shrunk
