"""Windows chosen by expert coverage: the greedy choice, and that its counts are those the calibration then sees."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_calibrate import small
from support_models import tiny, tiny_glm

from glm5_quant.calibrate import choose
from glm5_quant.calibrate.choose import pick
from glm5_quant.calibrate.settings import Settings
from glm5_quant.model.journal import open_journal


def test_the_choice_takes_what_starved_experts_need_first() -> None:
    counts = torch.tensor([[[9, 1, 0], [9, 1, 0], [8, 0, 2], [1, 9, 0], [10, 0, 0]]], dtype=torch.int32)
    assert pick(counts, 2, 20.0) == [2, 3]
    assert pick(counts, 5, 20.0) == [0, 1, 2, 3, 4]
    assert pick(counts, 1, 20.0) == [2]
    assert pick(counts[:, [0, 1, 3]], 1, 20.0) == [0]  # all are worth the same: the first wins


def test_tokens_beyond_the_goal_are_worth_nothing() -> None:
    counts = torch.tensor([[[500, 0], [4, 4], [0, 3]]], dtype=torch.int32)
    assert pick(counts, 1, 4.0) == [1]


@pytest.mark.parametrize(("target", "chosen"), [(0, [1, 3]), (12, [0, 1])])
def test_the_goal_is_twice_an_even_share_or_the_coverage_target(
    target: int, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 windows of 8 choices to 4 experts: an even share is 4. Goals of 4 and 12 would choose [0, 1], 8 [1, 3]."""
    counts = torch.tensor([[[6, 1, 1, 0], [5, 2, 1, 0], [6, 2, 0, 0], [3, 5, 0, 0]]], dtype=torch.int32)
    monkeypatch.setattr(choose, "count_routes", lambda *_: counts)
    plan: Any = SimpleNamespace(experts=4)
    settings = Settings(num_samples=2, coverage_target=target)
    record = choose._choose(None, plan, None, settings, torch.zeros(4, 8), None)
    after = counts[:, chosen].sum(1).tolist()
    assert (record.candidates, record.chosen, record.before, record.after) == (4, chosen, [[11, 3, 2, 0]], after)


def test_windows_that_no_expert_sees_are_chosen_once_each() -> None:
    assert pick(torch.zeros(1, 3, 2, dtype=torch.int32), 2, 4.0) == [0, 1]


def diverse(folder: Path) -> Path:
    """Texts of different letters one after the other, so that windows differ in who is routed where."""
    path = folder / "diverse.txt"
    parts = [f"{chr(97 + i % 26)}{chr(65 + i * 7 % 26)}{i} " * 24 for i in range(60)]
    path.write_text("".join(parts), encoding="utf-8")
    return path


@pytest.mark.parametrize("model_type", ["glm4_moe", "glm_moe_dsa", "granitemoe"])
def test_counts_of_the_chosen_windows_are_what_the_calibration_sees(model_type: str, tmp_path: Path) -> None:
    model = tiny_glm(tmp_path / "m") if model_type == "glm4_moe" else tiny(model_type, tmp_path / "m")
    options = {"choose_samples": True, "candidates": 5, "dataset": diverse(tmp_path)}
    report = small(model, tmp_path / "w", **options)
    journal = open_journal(report.journal)
    record = json.loads(journal.samples_file.read_text())
    seen = [journal.record(layer).coverage for layer in journal.finished()]
    assert record["after"] == [counts for counts in seen if counts is not None]
    assert len(record["chosen"]) == 8
    assert record["candidates"] == 40
    assert report.samples is not None
    assert report.samples.after.least >= report.samples.before.least
    assert f"out of {record['candidates']}" in (report.journal / "report.md").read_text()
    assert journal.manifest.data.windows == 8
    assert small(model, tmp_path / "w", **options).layers_reused == report.layers


def test_a_stopped_run_goes_on_with_the_windows_it_chose(tmp_path: Path) -> None:
    model = tiny_glm(tmp_path / "m")
    options = {"choose_samples": True, "dataset": diverse(tmp_path)}
    whole = small(model, tmp_path / "a", **options)
    calls = iter([False, True])
    with pytest.raises(Exception, match="1 of 2 layers"):
        small(model, tmp_path / "b", should_stop=lambda: next(calls), **options)
    again = small(model, tmp_path / "b", **options)
    assert again.layers_reused == 1
    for layer in range(2):
        one, two = (open_journal(tmp_path / name / "calibration").layer_file(layer) for name in "ab")
        assert one.read_bytes() == two.read_bytes()
    assert again.samples == whole.samples


def test_a_model_without_experts_takes_the_first_windows(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")
    report = small(model, tmp_path / "w", choose_samples=True)
    assert report.samples is None
    plain = small(model, tmp_path / "p")
    layers = [open_journal(one.journal).layer_file(0).read_bytes() for one in (report, plain)]
    assert layers[0] == layers[1]
