"""The ablation table: what is measured, on which tokens, and what it costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_calibrate import small
from support_models import tiny, tiny_glm

from glm5_quant.calibrate.ablation import PARTS, PLAIN, ROWS, ROWS_TOO, SHADOWS, Ablation, sampled_layers, worths
from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.model.families import Linear
from glm5_quant.model.journal import open_journal
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.grid import dequantize, minmax_grid, quantize
from glm5_quant.quant.rounding import solve
from glm5_quant.quant.rows import OutputMoments, RowFeedback
from glm5_quant.quant.target import target_direction

# The ablation, the weight, what the corrected one aims at, the quantized and the source stream.
Taken = tuple[Ablation, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def test_a_layer_of_ten_is_looked_at_and_three_at_most() -> None:
    assert sampled_layers(1) == {0}
    assert sampled_layers(4) == {2}
    assert sampled_layers(30) == {5, 15, 25}
    assert sampled_layers(78) == {13, 39, 65}


def heavy(tokens: int, k: int) -> torch.Tensor:
    """Correlated inputs, some channels far larger than others."""
    mix = torch.randn(k, k) / k**0.5 + torch.eye(k)
    return torch.randn(tokens, k) @ mix * torch.logspace(0, 1.5, k)


@pytest.fixture
def taken_apart() -> Taken:
    torch.manual_seed(3)
    k, n, tokens, held_from = 128, ROWS, 2000, 1600
    source = heavy(tokens, k)
    stream = source + 0.1 * source @ torch.randn(k, k) / k**0.5
    weight = torch.randn(n, k)
    evidence = Evidence.empty(k, tokens=tokens, held_from=held_from, gap=True, device="cpu").of([weight])
    evidence.add(stream, source, 0)
    linear = Linear("m", 0, "up", None, False, n, k, "m.weight", (None, 0, n), "m", "m")
    config = QuantConfig(numeric_weight=0.0, shadow_budget=0.02)
    ablation = Ablation(config=config, scale_dtype=torch.bfloat16, names=frozenset({"m"}))
    part = evidence.parts[0]
    assert part.fit.gap_KK is not None
    aim = weight + target_direction(weight, part.fit.hessian_KK, part.fit.gap_KK, config.target_delta)
    ablation.add([linear], [weight], [aim], part)
    return ablation, weight, aim, stream, source


def test_each_step_is_solved_on_fitted_tokens_and_judged_on_the_others(
    taken_apart: Taken,
) -> None:
    """Reference: outputs of held-out tokens in float64, from weights solved on the first 1,600 tokens alone."""
    ablation, weight, aim, stream, source = taken_apart
    found = ablation.errors["m"]
    x, wanted = stream[1600:].double(), source[1600:].double() @ weight.double().T
    size = float((x @ weight.double().T).square().sum())

    def error(matrix: torch.Tensor) -> float:
        return float((x @ matrix.double().T - wanted).square().sum()) / size

    plain = minmax_grid(weight)
    assert found[PLAIN] == pytest.approx(error(dequantize(quantize(weight, plain), plain)), rel=1e-3)
    fitted = stream[:1600].T @ stream[:1600] / 1600
    solved = solve(weight, fitted, QuantConfig(shrink=False, descent_sweeps=0), n_eff=1600)
    assert found["error feedback"] == pytest.approx(error(dequantize(solved.codes, solved.grid)), rel=0.02)
    solved = solve(aim, fitted, QuantConfig(descent_sweeps=0), n_eff=1600)
    assert found["target correction"] == pytest.approx(error(dequantize(solved.codes, solved.grid)), rel=0.02)


def test_the_steps_are_those_of_the_method_in_order_and_help(
    taken_apart: Taken,
) -> None:
    found = taken_apart[0].errors["m"]
    assert list(found) == [part for part in PARTS if part in found]
    assert set(PARTS) - set(found) == {"rotation", ROWS_TOO}
    assert found["error feedback"] < found["weighted grid"] < found[PLAIN]
    assert found[SHADOWS] < found["descent and refit"] < found["target correction"]


def test_feedback_between_rows_is_judged_by_what_it_counts() -> None:
    """Two heads of 80 outputs: one of them is sampled, and errors are tr(M E H E^T) against the source stream's."""
    torch.manual_seed(5)
    k, tokens, held_from = 64, 1500, 1200
    stream = heavy(tokens, k)
    weight, gradient = torch.randn(160, k), torch.randn(2000, 160) @ torch.block_diag(*torch.randn(2, 80, 80))
    moments = OutputMoments.empty(2, 80)
    moments.add(gradient)
    feedback = RowFeedback.of(moments, 0.01, 1.0)
    evidence = Evidence.empty(k, tokens=tokens, held_from=held_from, gap=True, device="cpu").of(
        [feedback.weigh(weight)]
    )
    evidence.add(stream, stream, 0)
    linear = Linear("m", 0, "q_proj", None, False, 160, k, "m.weight", (None, 0, 160), "m", "m")
    ablation = Ablation(config=QuantConfig(numeric_weight=0.0), scale_dtype=torch.bfloat16)
    ablation.add([linear], [weight], [weight], evidence.parts[0], [feedback])
    found = ablation.errors["m"]
    plain = minmax_grid(weight)
    error = feedback.weigh(dequantize(quantize(weight, plain), plain) - weight)[:80] @ stream[held_from:].T
    size = feedback.weigh(weight)[:80] @ stream[held_from:].T
    assert found[PLAIN] == pytest.approx(float(error.square().sum() / size.square().sum()), rel=1e-3)
    assert found[ROWS_TOO] < 0.8 * found["shrinkage"]
    assert found["descent and refit"] <= 1.02 * found[ROWS_TOO]


def test_the_table_is_the_mean_over_matrices_of_shares_of_round_to_nearest() -> None:
    table = worths(
        [{PLAIN: 4.0, "weighted grid": 2.0, "error feedback": 1.0}, {PLAIN: 1.0, "error feedback": 0.75}, {PLAIN: 0.0}]
    )
    assert [(w.part, w.matrices) for w in table] == [(PLAIN, 2), ("weighted grid", 1), ("error feedback", 2)]
    assert [w.of_rtn for w in table] == [1.0, 0.5, 0.5]  # the second row is of the first matrix alone
    assert [w.gain for w in table] == [0.0, 0.5, 0.25]
    assert [w.gain_error for w in table] == [0.0, 0.0, 0.0]


def test_a_resumed_run_reports_the_same_table_and_rotation_is_in_it(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")
    report = small(model, tmp_path / "w", preset="high", num_samples=64)
    parts = {worth.part for worth in report.ablation}
    assert parts == set(PARTS)
    again = small(model, tmp_path / "w", preset="high", num_samples=64)
    assert again.layers_reused == again.layers
    assert again.ablation == report.ablation
    assert "of round-to-nearest" in (report.journal / "report.md").read_text()


def test_one_expert_of_a_layer_is_looked_at_and_taking_apart_changes_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_glm(tmp_path / "m")
    report = small(model, tmp_path / "a", num_samples=64)
    journal = open_journal(report.journal)
    names = {name for layer in journal.finished() for name in journal.record(layer).ablation}
    experts = {name.split(".experts.")[1].split(".")[0] for name in names if ".experts." in name}
    assert len(experts) == 1
    monkeypatch.setattr("glm5_quant.calibrate.layer.sampled_layers", lambda layers: frozenset())
    small(model, tmp_path / "b", num_samples=64)
    for layer in journal.finished():
        other = open_journal(tmp_path / "b" / "calibration")
        assert journal.layer_file(layer).read_bytes() == other.layer_file(layer).read_bytes()


def test_a_preset_of_one_stream_has_a_table_too_and_is_solved_as_well_as_without_it(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")
    report = small(model, tmp_path / "a", preset="fast", num_samples=32)
    assert [worth.part for worth in report.ablation] == [
        PLAIN,
        "weighted grid",
        "error feedback",
        "shrinkage",
        ROWS_TOO,
        "descent and refit",
    ]
    assert report.ablation[1].gain > 0
    bare = small(model, tmp_path / "b", preset="fast", num_samples=32, held_out=0.0)
    assert bare.ablation == []
    for layer in range(report.layers):
        one, two = (open_journal(r.journal).record(layer).modules for r in (report, bare))
        for name in one:
            assert one[name].error == pytest.approx(two[name].error, rel=0.06), name
