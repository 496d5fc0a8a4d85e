"""The training script of glm5-tiny: deterministic by seed, resumable, and its parts against naive versions."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from glm5_quant.model import tiny

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "train_tiny.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny"] = module
    spec.loader.exec_module(module)
    return module


SMALL = {
    "hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "gqa_group_size": [4, 2, 1],
}


def prepare(folder: Path) -> None:
    """The packaged tokenizer, so that it is not trained again for every run."""
    shutil.copytree(
        tiny.folder(), folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "config*")
    )


def train(script: ModuleType, folder: Path, steps: list[int], phases: str, seed: int = 3) -> dict[str, torch.Tensor]:
    """Train to each number of steps in turn, each time as a fresh process would: resume, go on, save."""
    prepare(folder)
    for number, stop in enumerate(steps):
        args = ["--output", str(folder), "--phases", phases, "--decay-steps", "1", "--log-every", "1000"]
        args = script.parser().parse_args([*args, "--eval-every", "1000", "--save-every", str(stop)])
        run = script.Run(folder, seed, SMALL)
        if number:
            run.load()
        plan = script.parse_phases(phases)
        for _ in range(run.step, stop):
            run.one_step(plan[0], script.lr_scale(run.step, 1000, args.decay_steps))
        run.save()
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_training_is_deterministic_by_seed_and_a_resumed_run_equals_an_unbroken_one(
    script: ModuleType, tmp_path: Path
) -> None:
    first = train(script, tmp_path / "a", [12], "64x2x20")
    assert same(first, train(script, tmp_path / "b", [5, 12], "64x2x20"))
    assert not same(first, train(script, tmp_path / "c", [12], "64x2x20", seed=4))


@pytest.mark.slow
def test_two_hundred_steps_are_deterministic_by_seed(script: ModuleType, tmp_path: Path) -> None:
    first = train(script, tmp_path / "a", [200], "32x2x200")
    assert same(first, train(script, tmp_path / "b", [200], "32x2x200"))


def test_twenty_steps_lower_the_loss(script: ModuleType, tmp_path: Path) -> None:
    prepare(tmp_path)
    run = script.Run(tmp_path, 0, SMALL)
    phase = script.parse_phases("64x4x20")[0]
    losses = [run.one_step(phase, 1.0)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0] - 1


def test_orthogonalize_brings_every_singular_value_near_one(script: ModuleType) -> None:
    torch.manual_seed(0)
    for shape in ((64, 64), (128, 32), (3, 32, 96)):
        update = script.orthogonalize(torch.randn(shape) * 5).float()
        values = torch.linalg.svdvals(update)
        assert values.max() < 1.35
        assert values.median() > 0.6


def test_the_assistant_mask_marks_answers_and_the_token_that_ends_them(script: ModuleType) -> None:
    u, a = 90, 91
    ids = torch.tensor([[1, 2, u, 5, 5, a, 7, 8, u, 5, a, 7]])
    expected = [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1]
    assert script.assistant_mask(ids, u, a)[0].int().tolist() == expected


def test_phases_are_read_as_written(script: ModuleType) -> None:
    first, second = script.parse_phases("256x16x800,4096x1x20@DSA")
    assert (first.length, first.batch, first.steps, first.sparse) == (256, 16, 800, False)
    assert (second.length, second.batch, second.steps, second.sparse) == (4096, 1, 20, True)


def test_the_learning_rate_warms_up_holds_and_falls_to_zero(script: ModuleType) -> None:
    scale = [script.lr_scale(step, 1000, 100) for step in range(1001)]
    assert scale[0] == 1 / 50
    assert scale[49] == scale[500] == scale[900] == 1.0
    assert scale[950] == 0.5
    assert scale[1000] == 0.0
