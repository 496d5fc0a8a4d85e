"""Settings are checked where they are made, and the error names the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from glm5_quant.quant.config import PRESETS, QuantConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", 12),
        ("group_size", 0),
        ("damp", -0.1),
        ("damp", float("nan")),
        ("shrink_trust", 0.0),
        ("pool_kappa", -1.0),
        ("alphas", (0.5, 1.5)),
        ("target_delta", float("inf")),
        ("rotation", "half"),
        ("activations", "int4"),
        ("shadow_budget", 1.5),
        ("shadow_dtype", "int4"),
        ("numeric_weight", -2.0),
        ("routing_exponent", 3),
        ("descent_sweeps", -1),
        ("channel_tokens", 0),
        ("probed_tokens", -1),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} is "):
        QuantConfig(**{field: value})


def test_settings_cannot_be_changed_and_take_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantConfig().damp = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        QuantConfig(64)  # type: ignore[misc]


def test_presets_go_from_one_stream_to_everything() -> None:
    assert list(PRESETS) == ["fast", "default", "high"]
    assert not PRESETS["fast"].alphas
    assert PRESETS["fast"].channel_tokens < PRESETS["default"].channel_tokens
    assert PRESETS["default"] == QuantConfig()
    assert PRESETS["default"].rotation == "none"
    assert PRESETS["high"].rotation == "full"
