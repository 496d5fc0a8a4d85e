"""`--preset`: a name, or a TOML file that starts from a named preset and changes single settings.

    base = "default"              # fast, default or high; default where it is left out
    routing_exponent = 2          # any field of quant/config.py
    alphas = [0.0, 0.5]
    coverage_target = 256         # and of calibrate/settings.py those that have no option of their own
    int8 = ["attention"]          # among them which parts are stored in 8 bits or kept

Values are checked against the type of their field, so that `true` is no number and `"2"` no exponent. Options of the
command line win over the file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from glm5_quant.calibrate.settings import Settings, quant_config
from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded
from glm5_quant.quant.config import PRESETS, QuantConfig

SETTINGS_FIELDS = ("coverage_target", "held_out", "choose_samples", "candidates", "keep", "int8")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What a preset stands for: settings of every matrix, and those of `Settings` that it changes."""

    quant: QuantConfig
    settings: dict[str, Any] = field(default_factory=dict)


def make_settings(preset: str, quant: Mapping[str, Any] | None = None, **options: Any) -> Settings:
    """`Settings` of a preset (a name, or the path of a TOML file), with what the user set otherwise.

    Args:
        quant: changes to its `QuantConfig`; None means "as the preset has it".
        options: fields of `Settings`.

    Raises:
        UserError: no such preset or file, a field it does not have, or a value that is refused.
    """
    found = read_preset(preset)
    changes = {name: value for name, value in (quant or {}).items() if value is not None}
    try:
        config = replace(found.quant, **changes)
    except ValueError as error:
        raise UserError(str(error)) from None
    return Settings(quant=config, **(found.settings | options))


def read_preset(preset: str) -> Preset:
    """The preset of this name, or of this TOML file."""
    if preset in PRESETS:
        return Preset(quant=PRESETS[preset])
    path = expanded(preset)
    if not path.is_file():
        expected = f"{', '.join(PRESETS)} or the path of a .toml file"
        raise UserError("unknown preset", item="--preset", found=preset, expected=expected)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"not a TOML file: {error}", file=path) from None
    return _of_values(values, path)


def _of_values(values: dict[str, Any], file: Path) -> Preset:
    base = values.pop("base", "default")
    if not isinstance(base, str) or base not in PRESETS:
        raise UserError("unknown preset", file=file, item="base", found=repr(base), expected=", ".join(PRESETS))
    of_quant, of_settings = get_type_hints(QuantConfig), get_type_hints(Settings)
    known = {name: of_quant[name] for name in of_quant} | {name: of_settings[name] for name in SETTINGS_FIELDS}
    checked = {name: _checked(name, value, known, file) for name, value in values.items()}
    quant = {name: value for name, value in checked.items() if name in of_quant}
    settings = {name: value for name, value in checked.items() if name not in of_quant}
    try:
        config = replace(quant_config(base), **quant)
        Settings(quant=config, **settings)
    except UserError as error:
        raise UserError(error.problem, file=file, item=error.item, found=error.found, expected=error.expected) from None
    except ValueError as error:
        name, _, rest = str(error).partition(" is ")
        found, _, expected = rest.partition(", expected ")
        raise UserError("setting out of range", file=file, item=name, found=found, expected=expected) from None
    return Preset(quant=config, settings=settings)


def _checked(name: str, value: Any, known: Mapping[str, Any], file: Path) -> Any:
    """The value with its field's type; a list stands for a tuple.

    Raises UserError for an unknown field or another type.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        expected = f"{near[0]}?" if near else f"base, {', '.join(sorted(known))}"
        raise UserError("no such setting", file=file, item=name, found=repr(value), expected=expected)
    kind = known[name]
    try:
        return TypeAdapter(kind).validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
    except ValidationError as error:
        wanted = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise UserError("setting of the wrong kind", file=file, item=name, found=repr(value), expected=wanted) from None
