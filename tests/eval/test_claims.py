"""The figures of the claims, against sums made by hand."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from glm5_quant.eval.tally import COLUMN, FIELDS
from glm5_quant.model.sidecar import FOLDER

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "claims.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("claims", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def part(tokens: float, source: float, mine: float, flips: float = 0.0, lost: float = 0.0, right: float = 0.0) -> Any:
    """Sums of one dialogue: NLL a token of source and export, and counted tokens."""
    row = np.zeros(len(FIELDS))
    values = (tokens, tokens * source, tokens * mine, 0.0, flips, right, 0.0, lost)
    row[: len(values)] = values
    return row


def test_growth_and_number_errors_of_two_exports_are_compared_pair_by_pair(script: ModuleType) -> None:
    # Two dialogues alike: every draw gives the same figures, so intervals are points and values can be told by hand.
    plain = [part(10, 1.0, 1.1), part(10, 1.2, 1.6), part(100, 1, 1.3), part(20, 1, 1, flips=8, lost=4, right=20)]
    ours = [part(10, 1.0, 1.0), part(10, 1.2, 1.25), part(100, 1, 1.1), part(20, 1, 1, flips=2, lost=3, right=20)]
    sums = np.stack([np.stack([plain, ours])] * 2)
    found = script.drift_figures(sums, ("plain", "eampq"), draws=50)
    assert found["source"]["growth"].value == pytest.approx(math.exp(0.2) - 1)
    assert found["source"]["numeric top-1 right"].value == 1
    assert found["plain"]["growth"].value == pytest.approx(math.exp(0.5) - 1)
    assert found["plain"]["growth beyond source"].value == pytest.approx(math.exp(0.3) - 1)
    assert found["eampq"]["growth beyond source"].value == pytest.approx(math.exp(0.05) - 1)
    assert found["eampq"]["numeric top-1 differs"].value == pytest.approx(0.1)
    pair = found["eampq against plain"]
    assert pair["growth, difference"].value == pytest.approx(math.exp(0.25) - math.exp(0.5))
    assert pair["numeric top-1 differs, change"].value == pytest.approx(-0.75)
    assert pair["numeric right only in source, change"].value == pytest.approx(-0.25)
    assert pair["numeric top-1 differs, change"].low == pytest.approx(-0.75)


def test_intervals_come_from_the_same_draws_of_dialogues_for_both_exports(script: ModuleType) -> None:
    # Errors differ tenfold between dialogues, but one export always makes half of the other's: the change is certain.
    sums = np.zeros((4, 2, 4, len(FIELDS)))
    sums[..., COLUMN["tokens"]] = 100
    sums[:, 0, :, COLUMN["flips"]] = np.array([2, 4, 8, 20])[:, None]
    sums[:, 1, :, COLUMN["flips"]] = np.array([1, 2, 4, 10])[:, None]
    found = script.drift_figures(sums, ("plain", "eampq"), draws=200)
    assert found["plain"]["numeric top-1 differs"].low < found["plain"]["numeric top-1 differs"].high
    change = found["eampq against plain"]["numeric top-1 differs, change"]
    assert (change.value, change.low, change.high) == pytest.approx((-0.5, -0.5, -0.5))


def test_sums_are_read_from_the_json_of_an_evaluation(script: ModuleType) -> None:
    rows = {name: [[place, 0.0], [place, 1.0]] for place, name in enumerate(("first", "last", "whole", "numeric"))}
    exports = [{"name": f"{name}/export", "dialogue": {"sums": rows}} for name in ("a", "b")]
    sums = script.read_sums({"exports": exports}, ("b", "a"))
    assert sums.shape == (2, 2, 4, 2)
    assert sums[1, 0, 3].tolist() == [3.0, 1.0]


@pytest.mark.slow
def test_compensation_and_shadows_are_taken_from_a_copy_and_from_nothing_else(
    script: ModuleType, tmp_path: Path
) -> None:
    from support_models import byte_tokenizer, tiny_glm

    from glm5_quant.calibrate import Settings, calibrate
    from glm5_quant.model import export, load
    from glm5_quant.quant.config import QuantConfig

    model = byte_tokenizer(tiny_glm(tmp_path / "source"))
    text = tmp_path / "text.txt"
    text.write_text("The limit of account 17 is 4,250.50 EUR, not more than 12.5% above last year.\n" * 40)
    settings = Settings(quant=QuantConfig(shadow_budget=0.05), num_samples=8, seqlen=32)
    calibrate(model, text, work_dir=tmp_path / "w", settings=settings)
    whole = tmp_path / "w" / "export"
    export(model, tmp_path / "w" / "calibration", whole)
    before = {path.name: path.read_bytes() for path in (whole / FOLDER).iterdir()}
    assert load(whole).glm5_quant.shadow_count > 0
    base = script.without(whole, tmp_path / "base", {"shadows", "compensation"})
    assert load(base).glm5_quant.shadow_count == 0
    assert load(base).glm5_quant.compensated_layers == ()
    assert {path.name: path.read_bytes() for path in (whole / FOLDER).iterdir()} == before
    held = script.memory(whole)
    assert 0 < held["shadows_of_fp16"] <= 0.05
    assert script.memory(base)["shadows_bytes"] == 0
