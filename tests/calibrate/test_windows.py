"""How many windows are read where the user does not say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support_calibrate import sample_text, small
from support_models import tiny

from glm5_quant.calibrate import plan
from glm5_quant.calibrate.plan import make_plan, useful_windows
from glm5_quant.calibrate.settings import Settings
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.families import Linear
from glm5_quant.model.journal import open_journal


def linear(k: int, expert: int | None = None) -> Linear:
    return Linear(
        name=f"x{k}",
        layer=0,
        role="down",
        expert=expert,
        shared=False,
        n=64,
        k=k,
        source="x",
        slice=(None, 0, 64),
        group="x",
        module="x",
    )


@pytest.mark.parametrize(
    ("linears", "routed", "changes", "windows"),
    [
        # 20 tokens for each of 1,536 inputs are 60 windows of 512; a sixteenth of 64 is held out.
        ([linear(576), linear(1536)], 1.0, {}, 64),
        ([linear(1536)], 1.0, {"held_out": 0.0}, 60),
        ([linear(1536)], 1.0, {"seqlen": 2048}, 16),
        # 2 Mi values of 128 inputs are 16,384 tokens: of all, or of what an expert sees of them.
        ([linear(128)], 1.0, {}, 35),
        ([linear(128, expert=0)], 0.75, {}, 46),
        ([linear(128, expert=0)], 0.75, {"all_experts": True}, 35),
        # Experts of large models, and matrices of few inputs, want more than is read.
        ([linear(6144, expert=3)], 8 / 256, {}, 128),
        ([linear(64)], 1.0, {}, 69),
        ([linear(64, expert=0)], 0.25, {}, 128),
        ([linear(100_000)], 1.0, {}, 128),
    ],
)
def test_as_many_windows_as_statistics_need(
    linears: list[Linear], routed: float, changes: dict[str, object], windows: int
) -> None:
    assert useful_windows(linears, replace(Settings(), **changes), routed) == windows  # type: ignore[arg-type]


def test_a_number_that_is_given_is_kept_and_either_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("NEEDED_VALUES", 1 << 14), ("SOURCE_TOKENS_PER_CHANNEL", 4)):
        monkeypatch.setattr(plan, name, few)  # else tiny models take 65,536 tokens
    model, text = tiny("llama", tmp_path / "m"), sample_text(tmp_path)
    assert make_plan(open_checkpoint(model), Settings(num_samples=3), tmp_path / "w").windows == 3
    planned = make_plan(open_checkpoint(model), Settings(seqlen=64), tmp_path / "w").windows
    assert 4 < planned < 128
    report = small(model, tmp_path / "w", num_samples=0, dataset=text)
    assert open_journal(report.journal).manifest.settings["num_samples"] == planned
    # The same number in words is the same run.
    again = small(model, tmp_path / "w", num_samples=planned, dataset=text, resume="required")
    assert again.layers_reused == again.layers
