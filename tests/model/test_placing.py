"""Models larger than one device: parts on disk compute the same, and what goes where follows from sizes.

There is no second device here, so what is shown is the map and the way to and from disk; the same hooks bring inputs to
other GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_journal import export_of
from support_models import tiny, tiny_glm, tiny_q3

from glm5_quant.model import load
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.modules import PackedLinear
from glm5_quant.model.placing import auto_map

IDS = torch.arange(3, 27)[None]


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("make", [tiny_q3, tiny_glm])
@pytest.mark.parametrize("exported", [True, False])
def test_layers_on_disk_give_the_same_bits_and_take_no_memory(make, exported, tmp_path):
    folder = make(tmp_path / "source")
    folder = export_of(folder, tmp_path) if exported else folder
    whole = logits(load(folder))
    device_map = {"": "cpu", "model.layers.1": "disk"}
    model = load(folder, device_map=device_map, offload=tmp_path / "offload")
    for _ in range(2):
        assert torch.equal(logits(model), whole)
    layer = model.model.layers[1]
    assert {value.device.type for value in layer.state_dict().values()} == {"meta"}
    assert {value.device.type for value in model.model.layers[0].state_dict().values()} == {"cpu"}
    assert not any(module._cache for module in layer.modules() if isinstance(module, PackedLinear))


def test_generation_goes_through_layers_on_disk(tmp_path):
    out = export_of(tiny_q3(tmp_path / "source"), tmp_path)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = load(out).generate(IDS, **settings)
    device_map = {"": "cpu", "model.layers.0": "disk", "lm_head": "disk"}
    model = load(out, device_map=device_map, offload=tmp_path / "offload")
    assert torch.equal(model.generate(IDS, **settings), want)


def test_an_automatic_map_of_a_model_that_fits_is_the_cpu(tmp_path):
    out = export_of(tiny_q3(tmp_path / "source"), tmp_path)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which comes first")
    model = load(out, device_map="auto")
    assert torch.equal(logits(model), logits(load(out)))
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}


def test_layers_fill_devices_in_order_by_their_size_on_disk(tmp_path):
    out = export_of(tiny("qwen3_moe", tmp_path / "source", num_hidden_layers=4), tmp_path)
    checkpoint, model = open_checkpoint(out), load(out)
    sizes = [0, 0, 0, 0]
    for name, info in checkpoint.tensors.items():
        if name.startswith("model.layers."):
            sizes[int(name.split(".")[2])] += info.nbytes
    rest = sum(info.nbytes for info in checkpoint.tensors.values()) - sum(sizes)
    found = auto_map(model, checkpoint, {0: rest + sizes[0], 1: sizes[1] + sizes[2] - 1, "cpu": sizes[2]})
    assert [found[f"model.layers.{i}"] for i in range(4)] == [0, 1, "cpu", "disk"]
    assert found["lm_head"] == found["model.embed_tokens"] == found["model.norm"] == 0


def test_a_map_with_a_hole_and_a_disk_without_a_folder_are_refused(tmp_path):
    folder = Path(tiny_q3(tmp_path / "source"))
    with pytest.raises(UserError, match="no place for a part of the model"):
        load(folder, device_map={"model.layers.0": "cpu"})
    with pytest.raises(UserError, match="no folder was named"):
        load(folder, device_map={"": "disk"})


@pytest.mark.parametrize("name", ["model.layers.1.mlp", "model.layers.7", "model.layer", "head"])
def test_a_name_that_is_no_part_of_the_model_is_refused(tmp_path, name):
    folder = Path(tiny_q3(tmp_path / "source"))
    with pytest.raises(UserError, match=rf"{name}: the device map names what is not placed.*model.norm.*lm_head"):
        load(folder, device_map={"": "cpu", name: "cpu"})
    load(folder, device_map={"model": "cpu", "lm_head": "cpu", "model.layers": "cpu", "model.layers.1": "cpu"})
