"""A loaded export that is copied, moved, refilled or saved: the same model, or a refusal."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support_journal import export_of
from support_models import rewrite, tiny, tiny_glm

from glm5_quant.model import load
from glm5_quant.model.errors import UserError
from glm5_quant.model.modules import EightEmbedding

IDS = torch.arange(3, 27)[None]
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copies")
    return export_of(tiny_glm(root / "source"), root)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits.float()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_has_run_computes_the_same(out: Path, way: Any, dtype: torch.dtype) -> None:
    model = load(out, dtype=dtype)
    before = logits(model)
    assert torch.equal(logits(way(model)), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_dict_that_is_loaded_after_a_pass_counts_at_once(out: Path, dtype: torch.dtype) -> None:
    model, other = (load(out, dtype=dtype, backend="reference") for _ in range(2))
    for value in other.state_dict().values():
        if value.is_floating_point():
            value.mul_(1.1)
    assert not torch.equal(logits(other), logits(model))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))


def test_scales_keep_their_dtype_when_a_model_changes_its_own(tmp_path: Path) -> None:
    """A scale of 1e-9 is 0 in FP16; one in FP16 loses three bits in BF16."""
    source = rewrite(tiny("llama", tmp_path / "s"), "model.layers.0.mlp.up_proj.weight", lambda t: t * 1e-7)
    out = export_of(source, tmp_path)
    up = load(out).half().model.layers[0].mlp.up_proj
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))
    want = load(out, dtype=torch.float32).model.layers[0].mlp.up_proj(x)
    torch.testing.assert_close(up(x.float()), want)
    assert up.weight_scale.dtype == torch.bfloat16
    assert torch.equal(logits(load(out).float()), logits(load(out, dtype=torch.float32)))


def test_an_embedding_of_eight_bits_answers_in_the_models_dtype() -> None:
    codes = torch.randint(0, 256, (9, 64), dtype=torch.uint8)
    table = EightEmbedding(codes, torch.rand(9, 1) + 0.1, group_size=64, dtype=torch.bfloat16)
    ids = torch.tensor([[1, 5]])
    want = (codes[ids[0]].float() - 128) * table.scale[ids[0]]
    assert table(ids).dtype == torch.bfloat16
    torch.testing.assert_close(table.float()(ids)[0], want)
    assert table.half()(ids).dtype == torch.float16


def test_a_loaded_export_refuses_to_be_saved_and_a_source_does_not(out: Path, tmp_path: Path) -> None:
    for model in (load(out), copy.deepcopy(load(out))):
        with pytest.raises(UserError, match=r"a loaded export cannot be saved again.*Copy the folder"):
            model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    load(out.parent / "source").save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "config.json").exists()
