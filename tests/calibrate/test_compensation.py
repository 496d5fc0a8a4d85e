"""Compensation of layers: found where there is something to find, never worse on held-out tokens, same at run time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support_calibrate import small
from support_models import tiny
from torch import Tensor

from glm5_quant.calibrate.compensation import fit_compensation
from glm5_quant.model import export, load
from glm5_quant.model.journal import open_journal

Ends = dict[str, Tensor]


def streams(bias: float, noise: float, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Ends, Ends, Tensor]:
    """Both streams at a layer's ends, 8 windows of 16 tokens of 12 channels, and the bias quantization has there."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size = draw(8, 16, 1).exp()
    vector = bias * draw(12)
    source_in = draw(8, 16, 12) * size
    quantized_in = source_in + 0.05 * draw(8, 16, 12)
    source_out = source_in + draw(8, 16, 12)
    quantized_out = source_out + (quantized_in - source_in) - vector + noise * draw(8, 16, 12)
    inputs = {"source": source_in.to(dtype), "quantized": quantized_in.to(dtype)}
    return inputs, {"source": source_out.to(dtype), "quantized": quantized_out.to(dtype)}, vector


def held_error(outputs: Ends, weighted: bool) -> float:
    source, quantized = (outputs[name][6:].double() for name in ("source", "quantized"))
    weight = 1 / source.square().sum(-1) if weighted else 1.0
    return float(((quantized - source).square().sum(-1) * weight).sum())


def test_a_constant_error_is_found_and_taken_away() -> None:
    inputs, outputs, vector = streams(bias=0.5, noise=0.05)
    found = fit_compensation(inputs, outputs, held_windows=2)
    assert found is not None
    assert float((found.vector - vector).norm() / vector.norm()) < 0.05
    assert 0.9 < float(found.gain) <= 1.0
    before = held_error(outputs, weighted=True)
    found.apply(outputs["quantized"])
    assert held_error(outputs, weighted=True) / before == pytest.approx(found.record.error_left, rel=1e-4)
    assert found.record.error_left < 0.1


def test_the_gain_is_that_of_held_out_tokens() -> None:
    """Half of the bias is seen there: the gain halves too."""
    inputs, outputs, vector = streams(bias=0.5, noise=0.02)
    outputs["quantized"][6:] += 0.5 * vector
    found = fit_compensation(inputs, outputs, held_windows=2)
    assert found is not None
    assert float(found.gain) == pytest.approx(0.5, abs=0.06)


def test_what_was_lost_before_the_layer_is_not_its_own() -> None:
    inputs, outputs, vector = streams(bias=0.5, noise=0.02)
    for ends in (inputs, outputs):
        ends["quantized"] -= 0.5 * vector
    found = fit_compensation(inputs, outputs, held_windows=2)
    assert found is not None
    assert float((found.vector - vector).norm() / vector.norm()) < 0.05
    assert float(found.gain) == 1.0  # of the vector, half as much again is missing


def test_the_gain_weighs_tokens_by_the_inverse_square_of_their_size() -> None:
    inputs, outputs, vector = streams(bias=0.5, noise=0.02)
    source, quantized = outputs["source"], outputs["quantized"]
    size = source.norm(dim=-1)
    quantized[6:] += 0.6 * vector * (size[6:] > size.median())[..., None]
    found = fit_compensation(inputs, outputs, held_windows=2)
    assert found is not None
    lost = ((source - quantized)[6:].double() @ found.vector.double()) / found.vector.double().square().sum()
    weight = 1 / size[6:].double().square()
    assert float(found.gain) == pytest.approx(float((weight * lost).sum() / weight.sum()), abs=1e-3)
    assert float(found.gain) - float(lost.mean()) > 0.05


def test_the_halves_of_a_lone_held_out_window_check_each_other() -> None:
    for half in (slice(0, 8), slice(8, 16)):
        inputs, outputs, vector = streams(bias=0.5, noise=0.02)
        assert fit_compensation(inputs, outputs, held_windows=1) is not None
        outputs["quantized"][7, half] += 1.5 * vector
        assert fit_compensation(inputs, outputs, held_windows=1) is None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bias=st.floats(0, 0.3),
    noise=st.floats(0, 0.3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    held=st.integers(0, 8),
)
def test_held_out_error_never_rises(seed: int, bias: float, noise: float, dtype: torch.dtype, held: int) -> None:
    inputs, outputs, _ = streams(bias, noise, seed, dtype)
    found = fit_compensation(inputs, outputs, held)
    if found is None:
        return
    assert 0 < held < 8
    before = {name: tensor.clone() for name, tensor in outputs.items()}
    found.apply(outputs["quantized"])
    for weighted in (True, False):
        source, old, new = (
            t[8 - held :].double() for t in (outputs["source"], before["quantized"], outputs["quantized"])
        )
        weight = 1 / source.square().sum(-1) if weighted else torch.tensor(1.0)
        errors = [float(((stream - source).square().sum(-1) * weight).sum()) for stream in (old, new)]
        assert errors[1] < errors[0]


def test_an_error_that_differs_between_held_out_windows_is_left_alone() -> None:
    inputs, outputs, vector = streams(bias=0.5, noise=0.02)
    outputs["quantized"][7:] += 1.5 * vector
    assert fit_compensation(inputs, outputs, held_windows=2) is None


def test_nothing_held_out_means_no_compensation() -> None:
    inputs, outputs, _ = streams(bias=0.5, noise=0.02)
    assert fit_compensation(inputs, outputs, held_windows=0) is None


def test_the_only_held_out_window_is_judged_half_against_half() -> None:
    inputs, outputs, vector = streams(bias=0.5, noise=0.02)
    assert fit_compensation(inputs, outputs, held_windows=1) is not None
    outputs["quantized"][7, 8:] += 1.5 * vector
    assert fit_compensation(inputs, outputs, held_windows=1) is None


def test_calibration_stores_it_reports_it_and_the_runtime_adds_it(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")
    # Only what no other part takes away is left to compensate: here all that do are off.
    off = {"shadow_budget": 0.0, "alphas": (0.0,), "error_feedback": False, "correct_stream": False}
    report = small(model, tmp_path / "w", num_samples=24, quant=off)
    journal = open_journal(tmp_path / "w" / "calibration")
    records = {layer: journal.record(layer).compensation for layer in journal.finished()}
    kept = {layer: record.gain for layer, record in records.items() if record is not None}
    assert report.compensation == kept
    assert kept
    export(model, journal.folder, tmp_path / "export")
    loaded = load(tmp_path / "export", dtype=torch.float32)
    assert loaded.glm5_quant.compensated_layers == tuple(kept)
    for layer, gain in kept.items():
        assert 0 < gain <= 1
        name = f"eampq/model.layers.{layer}.compensation"
        tensors = load_file(journal.layer_file(layer))
        assert tensors[name].shape == (128,)
        assert float(tensors[f"{name}_gain"]) == pytest.approx(gain)
        assert torch.equal(loaded.model.layers[layer].compensation.vector, tensors[name])


@pytest.mark.parametrize("quant", [{"compensation": False}, {"alphas": ()}])
def test_it_is_off_by_its_switch_and_where_no_second_stream_shows_the_error(
    quant: dict[str, object], tmp_path: Path
) -> None:
    report = small(tiny("llama", tmp_path / "m"), tmp_path / "w", quant=quant)
    assert report.compensation == {}
