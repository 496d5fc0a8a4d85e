"""Fixed FP8 scales of a KV cache, by layer, as a calibrated checkpoint or a serving engine brings them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded

Scales = dict[int, tuple[float, float]]
FORM = '{"0": [key scale, value scale], "1": ...}, one line for each decoder layer'


def read_kv_scales(file: str | Path) -> Scales:
    """Scales (key, value) by layer from a JSON file of FORM; UserError names what does not fit."""
    path = expanded(file)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the scales cannot be read: {error}", file=path, expected=FORM) from None
    if not isinstance(found, dict) or not found:
        raise UserError("no scales by layer", file=path, expected=FORM)
    return {_layer(path, name): _pair(path, name, pair) for name, pair in found.items()}


def _layer(path: Path, name: str) -> int:
    if not name.isdecimal():
        raise UserError("not the number of a layer", file=path, found=name, expected=FORM)
    return int(name)


def _pair(path: Path, name: str, pair: Any) -> tuple[float, float]:
    fine = isinstance(pair, list) and len(pair) == 2
    if not fine or not all(isinstance(value, int | float) and math.isfinite(value) and value > 0 for value in pair):
        raise UserError("not two scales above 0", file=path, item=f"layer {name}", found=pair, expected=FORM)
    return float(pair[0]), float(pair[1])


def check_layers(scales: Scales, layers: int, file: str | Path) -> None:
    """UserError where a layer of the model has no scales."""
    missing = [layer for layer in range(layers) if layer not in scales]
    if missing:
        raise UserError("a layer has no scales", file=Path(file), item=f"layer {missing[0]}", expected=FORM)


def uncalibrated(scales: Mapping[int, tuple[float, float]], file: str | Path) -> str:
    """A warning where every scale is exactly 1.0, which is what a checkpoint has that nobody calibrated; else ""."""
    if any(value != 1.0 for pair in scales.values() for value in pair):
        return ""
    return f"{file}: every scale is exactly 1.0, as where nobody calibrated them: the cache may lose more than it need"
