"""Outlier channels are put into glm5-tiny without changing what it computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from glm5_quant.model.glm5.configuration import Glm5RefConfig
from glm5_quant.model.glm5.modeling import Glm5RefForCausalLM

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "ship_tiny.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ship_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spreading_channels_changes_no_bit_of_the_logits(script: ModuleType, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = Glm5RefConfig(vocab_size=128, gqa_group_size=[4, 2, 1], dsa_min_context=8, initializer_range=0.1)
    model = Glm5RefForCausalLM(config).to(dtype).eval()
    ids = torch.randint(128, (2, 40))
    before = model(input_ids=ids).logits
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    script.spread_channels(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    changed = {name.split(".", 3)[-1] for name, p in model.named_parameters() if not torch.equal(p, weights[name])}
    assert {"mlp.experts.down_proj", "self_attn.o_proj.weight", "self_attn.q_proj.weight"} <= changed


def test_a_block_of_sixty_four_gets_six_outlier_channels_of_sixteen_or_thirty_two(script: ModuleType) -> None:
    scale = script.factors(192, torch.Generator().manual_seed(1))
    assert set(scale.tolist()) == {1.0, 16.0, 32.0}
    assert [(block != 1).sum().item() for block in scale.split(64)] == [6, 6, 6]
