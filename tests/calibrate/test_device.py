"""Calibration on another device than the CPU: on a pretend one, where mixing devices raises, to the same errors."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support_calibrate import sample_text, small
from support_models import tiny

from glm5_quant.calibrate import run, settings
from glm5_quant.calibrate.run import StoppedSafely
from glm5_quant.model import causal, placing
from glm5_quant.model.errors import UserError
from glm5_quant.model.journal import open_journal

RUNS: dict[str, dict[str, Any]] = {
    "llama": {"preset": "fast"},
    "qwen3_moe": {
        "quant": {"refit_router": True, "pool_kappa": 1.0, "descent_sweeps": 1},
        "int8": ("attention", "lm_head"),
    },
    "glm4_moe": {
        "quant": {"rotation": "full", "activations": "int4-channel", "descent_sweeps": 1},
        "all_experts": True,
    },
}


def calibrate_there(folder: Path) -> None:
    """All runs on the pretend GPU. In a process of its own: PyTorch counts devices at its first way back."""
    from pretend_gpu import pretend_gpu

    run.run_dtype = lambda *_: torch.float32
    with pretend_gpu() as device:
        placing.DEVICES = (*placing.DEVICES, device)
        for name, options in RUNS.items():
            work, again = folder / f"{name}-there", {"dataset": folder / "sample.txt", "device": device}
            # One of them is stopped after a layer, and gone on with.
            answers = [False, name == "llama"]
            with suppress(StoppedSafely):
                small(folder / name, work, should_stop=partial(next, iter(answers)), **again, **_copy(options))
            small(folder / name, work, **again, **_copy(options))


def _copy(options: dict[str, Any]) -> dict[str, Any]:
    options = {"num_samples": 2, "seqlen": 32} | options
    return {key: dict(value) if isinstance(value, dict) else value for key, value in options.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    sample_text(folder)
    for name, options in RUNS.items():
        tiny(name, folder / name)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(run, "run_dtype", lambda *_: torch.float32)
            patched.setattr(causal, "QUERIES", 1 << 20)  # by parts attention goes on a CPU only
            small(folder / name, folder / f"{name}-here", dataset=folder / "sample.txt", **_copy(options))
    code = f"import pathlib, test_device; test_device.calibrate_there(pathlib.Path({str(folder)!r}))"
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "support")])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_another_device_gives_the_same_codes_but_for_the_order_of_sums(name: str, runs: Path) -> None:
    here, there = (open_journal(runs / f"{name}-{side}" / "calibration") for side in ("here", "there"))
    assert there.complete
    for layer in range(here.manifest.layers):
        assert load_file(here.layer_file(layer)).keys() == load_file(there.layer_file(layer)).keys()
        modules, others = here.record(layer).modules, there.record(layer).modules
        for module, record in modules.items():
            assert others[module].error == pytest.approx(record.error, rel=0.05), module
    one, other = load_file(here.layer_file(0)), load_file(there.layer_file(0))
    for packed in (name for name in one if name.endswith("weight_packed")):
        assert float((one[packed].view(torch.uint8) == other[packed].view(torch.uint8)).float().mean()) > 0.95, packed


@pytest.mark.parametrize(
    ("device", "problem"), [("gpu0", "unknown device"), ("mps", "unknown device"), ("cuda:7", "finds no such device")]
)
def test_a_device_that_is_not_there_is_refused_by_name(device: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"device: .*{problem}.*found {device}"):
        settings.Settings(device=device)
