"""The result as JSON: strict (no bare NaN or Infinity), UTF-8, with a schema version."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

from glm5_quant.eval.result import EvalResult


def to_json(result: EvalResult) -> str:
    """The whole result; figures that are missing are null."""
    return _writable(json.dumps(to_dict(result), ensure_ascii=False, indent=2, allow_nan=False))


def to_dict(result: EvalResult) -> dict[str, Any]:
    """The whole result but its routing traces as plain dictionaries and lists, with NaN and infinity as None."""
    found: dict[str, Any] = _clean(asdict(replace(result, traces=())))
    del found["traces"]
    found["gates_passed"] = result.gates_passed
    return found


def traces_json(result: EvalResult) -> str:
    """The routing traces by themselves: what `routing_trace.json` holds."""
    traces = _clean([asdict(trace) for trace in result.traces])
    return _writable(json.dumps({"schema_version": result.schema_version, "traces": traces}, ensure_ascii=False))


def _writable(document: str) -> str:
    """Half a character (of a file name that is not UTF-8) as JSON spells it, \\udce8: a file takes it no other way."""
    return document.encode("utf-8", "backslashreplace").decode() + "\n"


def _clean(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
