"""FP8 weights meet the right block scale, whatever its name, dtype and place; without one the run stops at opening."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support_models import edit_config, read_tensors, rewrite, tiny_ds8, to_fp8, write_tensors

from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import family_of, linears, read_linear

NAME = "model.layers.0.mlp.down_proj.weight"


def put(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text("{}")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128], **settings})


def slow_reference(weight: torch.Tensor, scale: torch.Tensor, block_n: int = 128, block_k: int = 128) -> torch.Tensor:
    """One block at a time, in float64."""
    out = torch.empty(weight.shape, dtype=torch.float64)
    for i in range(math.ceil(weight.shape[0] / block_n)):
        for j in range(math.ceil(weight.shape[1] / block_k)):
            rows, cols = slice(i * block_n, (i + 1) * block_n), slice(j * block_k, (j + 1) * block_k)
            out[rows, cols] = weight[rows, cols].to(torch.float64) * scale[i, j].to(torch.float64)
    return out


def random_fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)


def random_scale(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(6)) * 0.1 + 0.01


@pytest.mark.parametrize("shape", [(576, 256), (192, 320), (1, 1), (128, 128), (129, 127)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_widening_equals_a_slow_per_block_reference_last_partial_block_included(
    tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = random_fp8(*shape, dtype=dtype)
    scale = random_scale(math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    checkpoint = open_checkpoint(put(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}))
    expected = slow_reference(weight, scale)
    found = checkpoint.read("a.weight", torch.float32)
    assert torch.equal(found, expected.float())
    assert checkpoint.read("a.weight").dtype == torch.bfloat16  # FP8 models run in bfloat16
    rows = checkpoint.read_slice("a.weight", None, 0, (shape[0] + 1) // 2, torch.float32)
    assert torch.equal(rows, expected.float()[: (shape[0] + 1) // 2])


def test_each_block_of_a_constant_comes_back_as_its_constant(tmp_path: Path) -> None:
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0], [64.0, 128.0], [0.5, 0.25]])
    tensors = {"a.weight": torch.ones(576, 256).to(torch.float8_e4m3fn), "a.weight_scale_inv": scale}
    found = open_checkpoint(put(tmp_path, tensors)).read("a.weight", torch.float32)
    assert torch.equal(found, scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:576])


@pytest.mark.parametrize("name", ["experts.gate_up_proj_scale_inv", "experts.gate_up_proj.weight_scale_inv"])
def test_a_stack_of_experts_has_its_own_scales_for_each_expert(tmp_path: Path, name: str) -> None:
    weight, scale = random_fp8(4, 192, 320), random_scale(4, 2, 3)
    checkpoint = open_checkpoint(put(tmp_path, {"experts.gate_up_proj": weight, name: scale}))
    expected = torch.stack([slow_reference(w, s) for w, s in zip(weight, scale, strict=True)]).float()
    assert torch.equal(checkpoint.read("experts.gate_up_proj", torch.float32), expected)
    assert torch.equal(checkpoint.read("experts.gate_up_proj"), expected.bfloat16())
    assert torch.equal(checkpoint.read_slice("experts.gate_up_proj", 3, dtype=torch.float32), expected[3])
    # the up rows start inside a block of 128
    assert torch.equal(checkpoint.read_slice("experts.gate_up_proj", 2, 96, 192, torch.float32), expected[2, 96:])


@pytest.mark.parametrize("ending", [".weight_scale_inv", ".weight_scale", ".scale", ".scale_inv"])
def test_scales_are_found_under_every_known_name_and_leave_the_list(tmp_path: Path, ending: str) -> None:
    weight, scale = random_fp8(130, 130), random_scale(2, 2)
    tensors = {"a.weight": weight, "a" + ending: scale, "a.input_scale": torch.tensor(1.0), "b.scale": torch.ones(3)}
    checkpoint = open_checkpoint(put(tmp_path, tensors))
    assert torch.equal(checkpoint.read("a.weight", torch.float32), slow_reference(weight, scale).float())
    assert list(checkpoint.tensors) == ["a.weight", "b.scale"]  # b.scale belongs to no FP8 weight: an ordinary tensor
    assert checkpoint.dropped.keys() == {"a" + ending, "a.input_scale"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_every_dtype_are_decoded_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    weight, scale = random_fp8(192, 320), (2.0 ** torch.arange(-3, 3)).reshape(2, 3).to(dtype)
    checkpoint = open_checkpoint(put(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}))
    assert torch.equal(checkpoint.read("a.weight", torch.float32), slow_reference(weight, scale.float()).float())


def without_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NAME + "_scale_inv"]


def with_two_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME.removesuffix(".weight") + ".scale"] = tensors[NAME + "_scale_inv"].clone()


def with_wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME + "_scale_inv"] = torch.ones(1, 2)


def with_scalar_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME + "_scale_inv"] = torch.tensor(1.0)


def with_whole_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME + "_scale_inv"] = torch.ones(2, 2, dtype=torch.int32)


def with_flat_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME] = tensors[NAME].flatten()


@pytest.mark.parametrize(
    "damage",
    [without_scale, with_two_scales, with_wrong_shape, with_scalar_scale, with_whole_numbers, with_flat_weight],
)
def test_a_scale_that_is_missing_doubled_or_does_not_fit_names_the_weight_at_opening(
    tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    tensors = read_tensors(tiny_ds8(tmp_path))
    damage(tensors)
    write_tensors(tmp_path, tensors)
    with pytest.raises(UserError) as caught:
        open_checkpoint(tmp_path)
    assert NAME in str(caught.value) and "model.safetensors" in str(caught.value)


def test_a_scale_that_is_no_number_names_the_scale(tmp_path: Path) -> None:
    folder = rewrite(
        tiny_ds8(tmp_path), NAME + "_scale_inv", lambda old: old.index_fill(1, torch.tensor([1]), torch.inf)
    )
    with pytest.raises(UserError, match=r"down_proj.weight_scale_inv: a weight is not finite; found inf at \[0, 1\]"):
        open_checkpoint(folder).read(NAME)


def test_an_fp8_value_that_is_no_number_names_the_weight(tmp_path: Path) -> None:
    def damage(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8)[7, 9] = 0x7F  # NaN in E4M3
        return tensor

    with pytest.raises(UserError, match=r"down_proj.weight: a weight is not finite; found nan at \[7, 9\]"):
        open_checkpoint(rewrite(tiny_ds8(tmp_path), NAME, damage)).read(NAME)


@pytest.mark.parametrize("place", ["quantization_config", "text_config"])
def test_the_block_size_comes_from_the_config_also_from_a_nested_text_model(tmp_path: Path, place: str) -> None:
    weight = random_fp8(100, 100)
    scale = random_scale(4, 2)
    put(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale})
    settings = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    if place == "text_config":
        edit_config(tmp_path, quantization_config=..., text_config={"quantization_config": settings})
    else:
        edit_config(tmp_path, quantization_config=settings)
    found = open_checkpoint(tmp_path).read("a.weight", torch.float32)
    assert torch.equal(found, slow_reference(weight, scale, 32, 64).float())


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"weight_block_size": None}, ()),
        ({"weight_block_size": None}, (1,)),
        ({"config_groups": {"g": {"weights": {"strategy": "tensor"}}}}, (1, 1)),
        ({"config_groups": {"g": {"weights": {"strategy": "channel"}}}}, (100, 1)),
        ({"config_groups": {"g": {"weights": {"strategy": "block", "block_structure": [32, 64]}}}}, (4, 2)),
    ],
)
def test_scales_for_a_tensor_a_channel_or_a_block_follow_the_configs_strategy(
    tmp_path: Path, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    weight, scale = random_fp8(100, 100), random_scale(*shape)
    folder = put(tmp_path, {"a.weight": weight, "a.weight_scale": scale}, **settings)
    block_n = 1 if shape == (100, 1) else 32 if shape == (4, 2) else 100
    grid = scale.reshape(shape if len(shape) == 2 else (1, 1))
    expected = slow_reference(weight, grid, block_n, 64 if shape == (4, 2) else 100)
    assert torch.equal(open_checkpoint(folder).read("a.weight", torch.float32), expected.float())


@pytest.mark.parametrize("size", [[128], [0, 128], "128", [128, True], 128])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, size: Any) -> None:
    folder = put(tmp_path, {"a": torch.ones(1)}, weight_block_size=size)
    with pytest.raises(UserError, match="weight_block_size: bad block size"):
        open_checkpoint(folder)


def test_every_linear_of_an_fp8_model_is_near_the_weight_it_was_made_from(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_ds8(tmp_path))
    assert not [name for name in checkpoint.tensors if "scale_inv" in name]
    found = linears(checkpoint, family_of(checkpoint.config))
    stored = read_tensors(tmp_path)
    assert len(found) == 26
    for linear in found:
        weight = read_linear(checkpoint, linear, torch.float32)
        expected = slow_reference(stored[linear.source], stored[linear.source + "_scale_inv"])
        assert torch.equal(weight, expected.float())
        assert 0.015 < weight.std() < 0.025  # normal(0, 0.02) went in; raw FP8 would be thousands of times larger


def test_the_fixtures_own_conversion_loses_no_more_than_fp8_does() -> None:
    weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(0))
    codes, scale = to_fp8(weight)
    assert ((slow_reference(codes, scale) - weight).abs() <= weight.abs() / 16 + 1e-3).all()
