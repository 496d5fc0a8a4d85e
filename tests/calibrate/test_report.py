"""What the report says: held-out errors beside round-to-nearest's, coverage, starved experts, notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support_calibrate import small
from support_models import rewrite, tiny, tiny_glm

from glm5_quant.calibrate.coverage import Bin, by_expert, histogram, summarize
from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.markdown import render
from glm5_quant.calibrate.report import spans
from glm5_quant.calibrate.solve import LayerResult, solve_group
from glm5_quant.calibrate.starved import starved_experts
from glm5_quant.model.families import Linear
from glm5_quant.model.journal import LayerRecord, ModuleRecord, open_journal
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.grid import Grid, dequantize, minmax_grid, quantize
from glm5_quant.quant.packing import unpack_codes, unpack_zeros
from glm5_quant.quant.statistics import Moments


def test_held_out_errors_are_those_of_outputs_on_held_out_tokens_against_the_source_stream() -> None:
    """Reference: |W^ x~ - W x|^2 / |W x~|^2 token by token, in float64, token weights included."""
    torch.manual_seed(0)
    k, n, tokens, held_from = 64, 48, 600, 450
    source = torch.randn(tokens, k)
    stream = source + 0.3 * torch.randn(tokens, k) @ torch.randn(k, k) / 8
    weight, token_weight = torch.randn(n, k), torch.rand(tokens) + 0.5
    evidence = Evidence.empty(k, tokens=tokens, held_from=held_from, gap=True, device="cpu").of([weight])
    for start in range(0, tokens, 100):
        part = slice(start, start + 100)
        evidence.add(stream[part], source[part], start, token_weight[part])
    linear = Linear("m", 0, "up", None, False, n, k, "m.weight", (None, 0, n), "m", "m")
    result = LayerResult()
    solve_group([linear], [weight], evidence, QuantConfig(), torch.float32, result)
    record = result.modules["m"]
    zero = unpack_zeros(result.tensors["m.weight_zero_point"], n)
    solved = dequantize(
        unpack_codes(result.tensors["m.weight_packed"], k), Grid(scale=result.tensors["m.weight_scale"], zero=zero)
    )
    plain = minmax_grid(weight, scale_dtype=torch.float32)
    x, x_source, w = stream[held_from:].double(), source[held_from:].double(), token_weight[held_from:].double()
    size = float(w @ (x @ weight.double().T).square().sum(1))
    for found, matrix in (
        (record.held_out_error, solved),
        (record.held_out_rtn, dequantize(quantize(weight, plain), plain)),
        (record.held_out_floor, weight),
    ):
        expected = float(w @ (x @ matrix.double().T - x_source @ weight.double().T).square().sum(1)) / size
        assert found == pytest.approx(expected, rel=1e-3)


def test_the_report_shows_held_out_errors_by_role_and_layer(tmp_path: Path) -> None:
    report = small(tiny("llama", tmp_path / "m"), tmp_path / "w", num_samples=64)
    for one in (*report.roles, *report.by_layer):
        assert one.judged > 0
        assert one.held_out is not None
        assert one.held_out_rtn is not None
        assert 0 < one.held_out < one.held_out_rtn
    assert {one.layer for one in report.by_layer} == set(range(report.layers))
    text = (report.journal / "report.md").read_text()
    assert text == render(report)
    assert f"{report.roles[0].held_out:.4f}" in text


def test_tokens_are_sorted_by_expert_and_ids_outside_are_no_expert() -> None:
    chosen = torch.tensor([[2, 0], [-1, 0], [3, 2], [0, 7]])
    scale = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]])
    found = by_expert(chosen, scale, 3)
    assert [index.tolist() for index in found.index] == [[0, 1, 3], [], [0, 2]]
    taken = [scale[[0, 1, 3], [1, 1, 0]], scale[:0, 0], scale[[0, 2], [0, 1]]]
    assert all(map(torch.equal, found.scale, taken))
    assert found.counts == [3, 0, 2]


def test_coverage_sums_up_all_layers() -> None:
    found = summarize([[0, 5], [7, 8]], 7)
    assert (found.layers, found.experts, found.unseen, found.below_target) == (2, 4, 1, 2)
    assert (found.least, found.mean, found.target) == (0, 5.0, 7)
    assert summarize([], 7).line == "no routed experts"


def test_the_histogram_doubles_from_the_target_and_holds_every_expert() -> None:
    counts = [0, 0, 3, 15, 16, 70, 200]
    bins = histogram(counts, 16)
    assert bins == [
        Bin(low=0, high=0, experts=2),
        Bin(low=1, high=1, experts=0),
        Bin(low=2, high=3, experts=1),
        Bin(low=4, high=7, experts=0),
        Bin(low=8, high=15, experts=1),
        Bin(low=16, high=31, experts=1),
        Bin(low=32, high=63, experts=0),
        Bin(low=64, high=127, experts=1),
        Bin(low=128, high=255, experts=1),
    ]
    assert histogram([], 16) == []
    assert histogram([5], 0) == [Bin(low=4, high=7, experts=1)]


def starved(folder: Path) -> Path:
    def banish(bias: torch.Tensor) -> torch.Tensor:
        bias[3] = -1e4
        return bias

    return rewrite(tiny_glm(folder), "model.layers.1.mlp.gate.e_score_correction_bias", banish)


@pytest.mark.parametrize(
    ("options", "kind", "done"),
    [
        ({}, "pooled", "gate and up and down solved on moments of all tokens of the layer"),
        ({"quant": {"pool_kappa": 0.0}}, "nothing", "gate and up and down rounded to nearest on its own grid"),
        ({"all_experts": True}, "all-experts", "every token of the layer"),
    ],
)
def test_an_expert_without_tokens_is_reported_with_what_was_done(
    options: dict[str, Any], kind: str, done: str, tmp_path: Path
) -> None:
    report = small(starved(tmp_path / "m"), tmp_path / "w", **options)
    (one,) = (s for s in report.starved if s.tokens == 0)
    assert (one.layer, one.expert, one.kind) == (1, 3, kind)
    assert done in one.done
    assert done in (report.journal / "report.md").read_text()


def test_experts_below_the_target_are_told_how_far_their_moments_were_shrunk(tmp_path: Path) -> None:
    report = small(tiny_glm(tmp_path / "m"), tmp_path / "w", quant={"pool_kappa": 0.0}, coverage_target=10_000)
    assert len(report.starved) == report.coverage.experts
    first = report.starved[0]
    moved = 128 / (128 + first.effective_tokens)  # r = n / (n + c N_eff), c = 1, n = 128 inputs
    assert first.kind == "shrunk"
    assert f"by {moved:.0%}" in first.done


def test_experts_of_few_tokens_lean_on_their_layer_and_are_reported(tmp_path: Path) -> None:
    """TINY-GLM: 128 inputs of gate and up, 64 of down; 512 tokens reach two of four experts each."""
    model = tiny_glm(tmp_path / "m")
    small(model, tmp_path / "a", quant={"pool_kappa": 0.0})
    report = small(model, tmp_path / "b", quant={"pool_kappa": 0.25}, coverage_target=10_000)
    records = [open_journal(tmp_path / name / "calibration").record(1).modules for name in "ab"]
    leaning = 0
    for name, with_pool in records[1].items():
        if ".experts." not in name:
            continue
        few = with_pool.tokens < 4 * with_pool.k
        added = 0.25 * with_pool.k if few else 0.0
        assert with_pool.effective_tokens == pytest.approx(records[0][name].effective_tokens + added, abs=0.1)
        leaning += few
    assert leaning
    lean = "layer 1: experts that saw fewer than 4 tokens for each input lean on all tokens of their layer"
    assert lean in report.notes
    said = "gate and up and down leaned on all tokens of the layer as on 0.25 an input, moments shrunk to"
    assert any(one.done.startswith(said) for one in report.starved)


def made_up(expert: int, *roles: tuple[str, int, float], tokens: int) -> dict[str, ModuleRecord]:
    """Records of one expert's matrices: role, inputs, effective tokens."""
    plain: dict[str, Any] = {"n": 8, "error": 0.1, "error_rtn": 0.2, "tokens": tokens}
    return {
        f"mlp.experts.{expert}.{role}_proj": ModuleRecord(role=role, k=k, effective_tokens=n, **plain)
        for role, k, n in roles
    }


def test_starved_experts_are_those_below_the_target_with_what_their_own_matrices_were_solved_on() -> None:
    """Down has 64 inputs and gate 128: below 256 and 512 tokens they lean on the layer."""
    modules = made_up(0, ("down", 64, 90.0), ("gate", 128, 72.0), tokens=40)
    modules |= made_up(1, ("down", 64, 300.0), ("gate", 128, 384.0), tokens=300)
    modules |= made_up(2, ("down", 64, 500.0), ("gate", 128, 512.0), tokens=512)
    modules |= made_up(3, ("down", 64, 900.0), ("gate", 128, 900.0), tokens=600)
    # Expert 4 is not quantized, expert 3 just meets the target.
    record = LayerRecord(layer=7, file_sha256="", modules=modules, coverage=[40, 300, 512, 600, 0])
    quant = {"error_feedback": True, "shrink": True, "shrink_trust": 1.0, "pool_kappa": 0.25}
    found = starved_experts(record, 600, {"quant": quant})
    leaned, shrunk = "leaned on all tokens of the layer as on 0.25 an input", "moments shrunk to their diagonal by"
    assert [(one.layer, one.expert, one.tokens, one.effective_tokens, one.kind, one.done) for one in found] == [
        (7, 0, 40, 72.0, "pooled", f"down and gate {leaned}, {shrunk} 64% or more"),  # 128 / (128 + 72)
        (7, 1, 300, 300.0, "pooled", f"gate {leaned}, {shrunk} 25% or more"),
        (7, 2, 512, 500.0, "shrunk", f"{shrunk} 20% or more"),
    ]
    for change, kind in (({"error_feedback": False}, "grid"), ({"shrink": False}, "nothing"), ({}, "all-experts")):
        settings = {"quant": quant | change, "all_experts": not change}
        assert [one.kind for one in starved_experts(record, 600, settings)] == [kind] * 3


def test_leaning_on_a_pool_is_the_weighted_mean_of_both() -> None:
    torch.manual_seed(1)
    thin, pool = Moments.empty(8), Moments.empty(8)
    x, weight = torch.randn(5, 8), torch.rand(5)
    thin.add(x, weight)
    pool.add(torch.randn(100, 8))
    n, mine = thin.n_eff, thin.hessian_KK.clone()
    thin.lean_on(pool, 20.0)
    assert torch.allclose(thin.hessian_KK, (n * mine + 20 * pool.hessian_KK) / (n + 20), atol=1e-5)
    assert thin.n_eff == pytest.approx(n + 20)


def test_layers_with_the_same_note_are_told_together(tmp_path: Path) -> None:
    assert spans([3]) == "layer 3"
    assert spans([0, 1, 2, 5, 7, 8]) == "layers 0 to 2, 5, 7 to 8"
    report = small(tiny("llama", tmp_path / "m"), tmp_path / "w", held_out=0.0)
    assert report.notes == [f"{spans(range(report.layers))}: no compensation: no token is held out"]
    manifest = json.loads((report.journal / "manifest.json").read_text())
    assert manifest["settings"]["held_out"] == 0.0
