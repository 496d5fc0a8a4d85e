"""Presets by name and by TOML file: what a file changes, and what it is refused for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support_calibrate import sample_text
from support_models import byte_tokenizer, tiny_q3

from glm5_quant.calibrate.presets import make_settings, read_preset
from glm5_quant.calibrate.run import calibrate
from glm5_quant.calibrate.settings import Settings
from glm5_quant.model.errors import UserError
from glm5_quant.model.journal import open_journal
from glm5_quant.quant.config import PRESETS


def preset_file(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_name_is_the_preset_of_that_name(name: str) -> None:
    assert make_settings(name) == Settings(quant=PRESETS[name])


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    text = 'base = "high"\nrouting_exponent = 2\nalphas = [0.0, 0.5]\ndamp = 1\nheld_out = 0.25\ncoverage_target = 7\n'
    settings = make_settings(preset_file(tmp_path, text))
    assert settings.quant == replace(PRESETS["high"], routing_exponent=2, alphas=(0.0, 0.5), damp=1.0)
    assert (settings.held_out, settings.coverage_target) == (0.25, 7)
    assert make_settings(preset_file(tmp_path, "")) == Settings()


def test_an_option_of_the_command_wins_over_the_file(tmp_path: Path) -> None:
    file = preset_file(tmp_path, "shadow_budget = 0.01\nsymmetric = true\n")
    assert make_settings(file, {"shadow_budget": 0.5, "symmetric": None}).quant.shadow_budget == 0.5
    assert make_settings(file, {"shadow_budget": None}).quant.symmetric


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("routing_exponents = 1", r"routing_exponents: no such setting; found 1; expected routing_exponent\?"),
        ("zzz = 1", r"zzz: no such setting; found 1; expected base, activations, "),
        ("num_samples = 4", r"num_samples: no such setting"),
        ("routing_exponent = 3", r"routing_exponent: setting out of range; found 3; expected 0, 1 or 2"),
        ('damp = "little"', r"damp: setting of the wrong kind; found 'little'; expected a valid number"),
        ("descent_sweeps = true", r"descent_sweeps: setting of the wrong kind; found True; expected a valid integer"),
        ("alphas = [0.5, 2.0]", r"alphas: setting out of range; found \(0\.5, 2\.0\); expected numbers from 0 to 1"),
        ('rotation = "half"', r"rotation: setting of the wrong kind; found 'half'; expected 'none', 'folded' or"),
        ("held_out = 0.9", r"held_out: setting out of range; found 0\.9; expected 0 to 0\.5"),
        ('base = "best"', r"base: unknown preset; found 'best'; expected fast, default, high"),
        ("damp = ", r"not a TOML file"),
    ],
)
def test_a_bad_file_is_refused_naming_file_field_found_and_expected(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"mine\.toml: {message}"):
        read_preset(preset_file(tmp_path, text))


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"--preset: unknown preset; found none\.toml"):
        read_preset("none.toml")


def test_the_manifest_records_the_settings_that_came_of_it(tmp_path: Path) -> None:
    model = byte_tokenizer(tiny_q3(tmp_path / "m"))
    file = preset_file(tmp_path, 'base = "fast"\nrouting_exponent = 0\ncoverage_target = 33\n')
    settings = make_settings(file, num_samples=8, seqlen=32)
    calibrate(model, sample_text(tmp_path), work_dir=tmp_path / "w", settings=settings)
    recorded = open_journal(tmp_path / "w" / "calibration").manifest.settings
    assert recorded == settings.deciding()
    assert recorded["coverage_target"] == 33
    assert recorded["quant"]["routing_exponent"] == 0
    assert recorded["quant"]["channel_tokens"] == 8
