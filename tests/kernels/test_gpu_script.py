"""The script for a lent GPU: what can run here does, so that its minutes there are not spent on typos or lost."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu.py"


@pytest.fixture(scope="module")
def gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_smoke_run_finds_every_kernel_right() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["all_right"] and len(result["checks"]) == 24


@pytest.mark.parametrize(
    ("interpreted", "options", "message"),
    [
        (False, [], "no GPU found"),
        (True, [], "TRITON_INTERPRET=1 is set"),
        (False, ["--smoke"], "--smoke needs TRITON_INTERPRET=1"),
    ],
)
def test_where_nothing_can_be_measured_one_line_says_so(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, interpreted: bool, options: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    with pytest.raises(SystemExit, match=message):
        gpu.main()


def test_a_run_that_is_cut_off_leaves_the_rows_it_had(gpu: Any, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"tokens": 1}
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        gpu.fill({"device": "none"}, "moe", rows(), tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == {"device": "none", "moe": [{"tokens": 1}]}


def test_a_kernel_that_fails_is_named_and_the_others_still_run(gpu: Any) -> None:
    def run(x: torch.Tensor, backend: str) -> torch.Tensor:
        if backend == "triton":
            raise RuntimeError("out of shared memory")
        return x

    row = gpu.compare("linear", torch.float16, torch.ones(1), run)
    assert row == {"name": "linear", "failed": "RuntimeError: out of shared memory", "right": False}


def test_the_first_calls_wait_for_the_tensors_they_read(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 2.0)
    for name, value in {
        "Stream": lambda: SimpleNamespace(wait_stream=order.append),
        "current_stream": lambda: "the stream that made the tensors",
        "stream": contextlib.nullcontext,
        "graph": contextlib.nullcontext,
        "synchronize": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "Event": lambda enable_timing: event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert gpu.replayed_us([lambda: order.append("call")] * 2) == 1000.0
    assert order[:2] == ["the stream that made the tensors", "call"]


def test_no_time_is_begun_after_the_deadline(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DENSE_SHAPES", ((64, 128),))
    monkeypatch.setattr(gpu, "L2_BYTES", 1)
    monkeypatch.setattr(gpu, "matrix", lambda n, k, device, dtype: None)
    monkeypatch.setattr(gpu, "dequantize", lambda packed, dtype: None)
    assert {row["left_out"] for row in gpu.time_dense(1.0, 0.0)} == {"no time left"}
