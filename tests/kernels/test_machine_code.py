"""Kernels compile ahead of time for GPUs that are not here, and Hopper's machine code keeps what the study promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
SUPPORT = Path(__file__).resolve().parents[1] / "support"
HOPPER = ("linear fp16 8", "linear bf16 16", "linear bf16 64", "gate_up bf16 8", "down fp16 64", "int8 bf16 64")
PER_WEIGHT = {
    "linear fp16 8": 2.2,
    "linear bf16 16": 2.8,
    "linear bf16 64": 4.6,
    "gate_up bf16 8": 2.2,
    "down fp16 64": 4.6,
}


def compile_for(backend: str, arch: str, *names: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "compile_kernels.py"), backend, arch, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def hopper() -> dict[str, Any]:
    return compile_for("cuda", "90", *HOPPER)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOPPER)
def test_no_kernel_uses_the_stack_or_converts_integers_in_its_main_loop(hopper: dict[str, Any], name: str) -> None:
    assert hopper[name]["stack_bytes"] == 0 and hopper[name]["local"] == 0
    assert not [code for code in hopper[name]["opcodes"] if code.startswith("I2F")]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOPPER)
def test_weights_are_read_sixteen_bytes_at_a_time(hopper: dict[str, Any], name: str) -> None:
    wide = sum(n for code, n in hopper[name]["opcodes"].items() if code.startswith("LDGSTS") and code.endswith(".128"))
    assert wide >= 4
    bytes_read = [code for code in hopper[name]["opcodes"] if code.startswith("LDG.E.U8")]
    assert sum(hopper[name]["opcodes"][code] for code in bytes_read) <= 4  # zero-points only


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), PER_WEIGHT.items())
def test_instructions_per_weight_stay_within_the_budget(hopper: dict[str, Any], name: str, most: float) -> None:
    assert 1.0 < hopper[name]["per_weight"] <= most


@pytest.mark.slow
def test_tokens_are_rounded_by_the_same_operations_as_in_pytorch() -> None:
    names = ("quantize bf16 8", "quantize bf16 8 block")
    for name, found in compile_for("cuda", "90", *names).items():
        assert set(found["ptx"]) == {"div.rn.f32"}, name  # a fused or an approximate one can turn a tie the other way


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "arch", "names"),
    [
        ("cuda", "80", ("linear bf16 8 ragged shadow", "gate_up fp16 64")),
        ("hip", "gfx942", ("linear fp16 16 ragged shadow", "int8 bf16 64")),
    ],
)
def test_other_gpus_get_a_binary(backend: str, arch: str, names: tuple[str, ...]) -> None:
    for name, result in compile_for(backend, arch, *names).items():
        assert result["binary_bytes"] > 1000, name
