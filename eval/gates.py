"""Conditions on a result: `--gate "kl<0.05,numeric<0.5%"`. A figure that is missing or not finite never passes."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.result import ExportResult, GateResult
from glm5_quant.eval.statistics import Estimate
from glm5_quant.model.errors import UserError

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
PATTERN = re.compile(r"\s*([a-z_]+)\s*(<=|>=|<|>)\s*([0-9.eE+-]+)\s*(%?)\s*")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One parsed condition."""

    text: str
    quantity: str
    sign: str
    limit: float


def parse_gates(text: str) -> tuple[Gate, ...]:
    """Gates of a comma-separated list. Raises UserError naming the part that cannot be read."""
    gates = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = PATTERN.fullmatch(part)
        limit = _number(match[3], match[4]) if match else None
        if match is None or limit is None or match[1] not in QUANTITIES:
            raise UserError(
                "cannot read this gate",
                item="--gate",
                found=part,
                expected="NAME<LIMIT or NAME>LIMIT with NAME one of " + ", ".join(QUANTITIES),
            )
        gates.append(Gate(text=part, quantity=match[1], sign=match[2], limit=limit))
    if text.strip() and not gates:
        raise UserError("no gate in it", item="--gate", found=text)
    return tuple(gates)


def _number(text: str, percent: str) -> float | None:
    try:
        value = float(text) / (100 if percent else 1)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _slice_figure(name: str, figure: str) -> Callable[[ExportResult], Estimate | None]:
    """A figure of a slice of the text; of the dialogues' answers where the text has no such token."""

    def read(export: ExportResult) -> Estimate | None:
        parts = [*export.slices, *(export.dialogue.slices if export.dialogue else ())]
        return next((getattr(part, figure) for part in parts if part.name == name), None)

    return read


def _added(estimate: Estimate | None) -> Estimate | None:
    if estimate is None or estimate.value is None:
        return None
    return Estimate(value=estimate.value - 1.0)


def _growth(export: ExportResult) -> Estimate | None:
    return export.dialogue.relative_growth if export.dialogue else None


QUANTITIES: dict[str, Callable[[ExportResult], Estimate | None]] = {
    "kl": _slice_figure("all", "kl"),
    "numeric_kl": _slice_figure("numeric", "kl"),
    "numeric": _slice_figure("numeric", "flips"),
    "critical": _slice_figure("critical", "flips"),
    "flips": _slice_figure("all", "flips"),
    "perplexity": lambda export: _added(_slice_figure("all", "perplexity_ratio")(export)),
    "growth": _growth,
}


NEEDS = {"growth": "long_dialogue", "critical": "critical_words"}
"""Settings without which a quantity is not measured at all."""


def check_measured(gates: Sequence[Gate], config: EvalConfig) -> None:
    """UserError for a gate that could not but fail, since what it asks for will not be measured."""
    for gate in gates:
        needed = NEEDS.get(gate.quantity, "")
        if needed and not getattr(config, needed):
            option = f"--{needed.replace('_', '-')}"
            raise UserError(
                "this will not be measured", item="--gate", found=gate.text, hint=f"Give {option} too, or no such gate."
            )


def decide(gates: Sequence[Gate], exports: Sequence[ExportResult], *, sound: bool = True) -> tuple[GateResult, ...]:
    """Every gate on every export. Where the source itself is not `sound` none passes."""
    return tuple(_decide(gate, export, sound) for export in exports for gate in gates)


def _decide(gate: Gate, export: ExportResult, sound: bool) -> GateResult:
    if not sound or export.status != "ok":
        return GateResult(gate=gate.text, export=export.name, value=None, passed=False, reason="the result is invalid")
    found = QUANTITIES[gate.quantity](export)
    value = None if found is None else found.value
    if value is None or not math.isfinite(value):
        return GateResult(gate=gate.text, export=export.name, value=None, passed=False, reason="not measured")
    passed = OPERATORS[gate.sign](value, gate.limit)
    return GateResult(gate=gate.text, export=export.name, value=value, passed=passed)
