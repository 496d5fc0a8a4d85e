"""What is written to the residual stream makes up for what the quantized stream lacks of the source's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glm5_quant.calibrate.ffn import LEAST_SCALE, Streams
from glm5_quant.calibrate.run import calibrate
from glm5_quant.calibrate.settings import Settings
from glm5_quant.cli.defaults import calibration_data, packaged_model
from glm5_quant.quant.config import PRESETS


@pytest.mark.parametrize("scaled", [False, True])
def test_a_lack_is_that_of_the_followed_tokens_now_in_units_of_the_networks_output(scaled: bool) -> None:
    streams = Streams(
        x=torch.zeros(8, 2),
        out=torch.randn(8, 2),
        source_x=torch.zeros(5, 2),
        source_out=torch.randn(5, 2),
        source_from=3,
        added=True,
        lack=torch.randn(5, 2),
    )
    assert streams.lack is not None and streams.source_out is not None
    scale = torch.tensor([0.5, 0.25, 0.0]) if scaled else None
    wanted = (streams.lack + streams.source_out - streams.out[3:])[[1, 4]]
    if scaled:
        wanted = wanted / torch.tensor([0.25, LEAST_SCALE])[:, None]
    found = streams.lack_of(torch.tensor([2, 4, 7]), 3, scale)
    assert found is not None
    torch.testing.assert_close(found, wanted)
    if not scaled:
        block = streams.lack_of(2, 4, None)
        assert block is not None
        torch.testing.assert_close(block, (streams.lack + streams.source_out - streams.out[3:])[:3])


def test_without_a_second_stream_nothing_is_known_to_lack() -> None:
    assert Streams(x=torch.zeros(4, 2), out=torch.zeros(4, 2)).lack_of(0, 4, None) is None


@pytest.mark.slow
def test_the_quantized_stream_ends_nearer_to_the_sources(tmp_path: Path) -> None:
    model = packaged_model()
    data = calibration_data(None, str(model), str(tmp_path))
    assert data is not None
    errors = []
    for correct in (False, True):
        quant = replace(PRESETS["default"], correct_stream=correct, compensation=False, shadow_budget=0.0)
        settings = Settings(quant=quant, num_samples=24, seqlen=256)
        report = calibrate(model, data, work_dir=tmp_path / str(correct), settings=settings)
        assert report.stream_error is not None
        errors.append(report.stream_error)
    assert errors[1] < 0.97 * errors[0]
