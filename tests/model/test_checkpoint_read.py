"""Tensors come off the disk bit for bit, one at a time, and a value that is no number stops the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support_models import edit_config, read_tensors, rewrite, stack_experts, tiny_glm, tiny_q3, write_tensors

from glm5_quant.model import checkpoint as module
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_q3(tmp_path_factory.mktemp("q3"))


@pytest.fixture
def q3(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "q3")


def put(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_tensor_equals_what_safetensors_reads(good: Path) -> None:
    checkpoint = open_checkpoint(good)
    for name, tensor in read_tensors(good).items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def test_scalars_empty_tensors_and_whole_numbers_read_as_they_are(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "no_columns": torch.empty(3, 0),
        "ints": torch.tensor([[1, -(2**62)]]),
        "flags": torch.tensor([True, False]),
        "half": torch.tensor([1.5, -2], dtype=torch.float16),
    }
    checkpoint = open_checkpoint(put(tmp_path / "m", tensors))
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor) and checkpoint.read(name).dtype == tensor.dtype
    assert checkpoint.read("ints", torch.float32).dtype == torch.int64


def test_rows_and_slices_of_a_stack_equal_the_whole(q3: Path) -> None:
    whole = read_tensors(stack_experts(q3))["model.layers.1.mlp.experts.gate_up_proj"]
    checkpoint = open_checkpoint(q3)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(checkpoint.read_slice(name, 2), whole[2])
    assert torch.equal(checkpoint.read_slice(name, 3, 64, 128), whole[3, 64:128])
    assert torch.equal(checkpoint.read_slice(name, 0, 5, 9, torch.float32), whole[0, 5:9].float())
    head = read_tensors(q3)["lm_head.weight"]
    assert torch.equal(checkpoint.read_slice("lm_head.weight", None, 250), head[250:])
    assert torch.equal(checkpoint.read_rows("lm_head.weight", [3, 4, 5, 9, 2]), head[[3, 4, 5, 9, 2]])


def test_a_read_touches_only_the_bytes_it_is_asked_for(q3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack_experts(q3)
    checkpoint = open_checkpoint(q3)
    read: list[int] = []
    original = module.Checkpoint._raw

    def counting(self: Any, info: Any, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        result = original(self, info, offset, shape)
        read.append(result.nbytes)
        return result

    monkeypatch.setattr(module.Checkpoint, "_raw", counting)
    checkpoint.read_slice("model.layers.0.mlp.experts.down_proj", 1)
    checkpoint.read_rows("model.embed_tokens.weight", [7])
    assert read == [128 * 64 * 2, 128 * 2]


def test_bf16_is_never_narrowed_to_fp16(q3: Path) -> None:
    tiny_weights = torch.full((64, 128), 1e-8, dtype=torch.bfloat16)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    rewrite(q3, name, lambda old: tiny_weights)
    edit_config(q3, dtype="float16")
    checkpoint = open_checkpoint(q3)
    assert checkpoint.dtype == torch.bfloat16  # the config's word would have turned these weights into 0
    assert torch.equal(checkpoint.read(name, checkpoint.dtype), tiny_weights)
    assert torch.equal(checkpoint.read(name, torch.float32), tiny_weights.float())
    with pytest.raises(ValueError, match="never narrowed to FP16"):
        checkpoint.read(name, torch.float16)


def test_fp16_sources_stay_fp16(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(put(tmp_path / "m", {"a": torch.ones(2, dtype=torch.float16)}))
    assert checkpoint.dtype == torch.float16 and checkpoint.read("a", torch.float16).dtype == torch.float16


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_of_the_model_is_the_configs_word(tmp_path: Path, key: str) -> None:
    folder = put(tmp_path / "m", {"a": torch.ones(2)})
    assert open_checkpoint(folder).dtype == torch.float32
    assert open_checkpoint(edit_config(folder, **{key: "bfloat16"})).dtype == torch.bfloat16
    assert open_checkpoint(edit_config(folder, **{key: ..., "text_config": {key: "bfloat16"}})).dtype == torch.bfloat16
    assert open_checkpoint(edit_config(folder, **{key: ["odd"], "text_config": 3})).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "index", "value", "shown"),
    [
        ("model.layers.0.mlp.experts.1.up_proj.weight", (3, 70), float("nan"), "nan at [3, 70]"),
        ("model.layers.1.self_attn.o_proj.weight", (0, 1), float("inf"), "inf at [0, 1]"),
        ("model.norm.weight", (127,), float("-inf"), "-inf at [127]"),
    ],
)
def test_a_value_that_is_no_number_names_file_tensor_and_first_index(
    q3: Path, name: str, index: tuple[int, ...], value: float, shown: str
) -> None:
    def damage(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    checkpoint = open_checkpoint(rewrite(q3, name, damage))
    with pytest.raises(UserError) as caught:
        checkpoint.read(name, torch.float32)
    assert shown in str(caught.value) and name in str(caught.value)
    assert str(checkpoint.tensors[name].file) in str(caught.value)


def test_the_index_of_a_bad_value_in_a_stack_counts_from_the_start_of_the_stack(q3: Path) -> None:
    def damage(tensor: torch.Tensor) -> torch.Tensor:
        tensor[2, 70, 5] = torch.nan
        return tensor

    name = "model.layers.0.mlp.experts.gate_up_proj"
    checkpoint = open_checkpoint(rewrite(stack_experts(q3), name, damage))
    for read in (lambda: checkpoint.read(name), lambda: checkpoint.read_slice(name, 2, 64, 128)):
        with pytest.raises(UserError, match=r"nan at \[2, 70, 5\]"):
            read()
    checkpoint.read_slice(name, 2, 0, 64)  # the gate rows are fine


def test_a_bad_scalar_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nan at \[\]"):
        open_checkpoint(put(tmp_path / "m", {"a": torch.tensor(torch.nan)})).read("a")


def test_the_correction_bias_stays_f32_bit_for_bit(tmp_path: Path) -> None:
    bias = torch.linspace(6.817, 7.063, 4)
    folder = rewrite(tiny_glm(tmp_path), "model.layers.1.mlp.gate.e_score_correction_bias", lambda old: bias)
    found = open_checkpoint(folder).read("model.layers.1.mlp.gate.e_score_correction_bias")
    assert found.dtype == torch.float32 and torch.equal(found, bias)


def test_an_unknown_name_is_refused(good: Path) -> None:
    with pytest.raises(UserError, match="ghost: no such tensor"):
        open_checkpoint(good).read("ghost")


def test_a_file_that_shrinks_after_opening_is_named(q3: Path) -> None:
    checkpoint = open_checkpoint(q3)
    last = max(checkpoint.tensors.values(), key=lambda info: (info.file, info.offset))
    with last.file.open("r+b") as stream:
        stream.truncate(last.offset + 1)
    with pytest.raises(UserError, match="became shorter"):
        checkpoint.read(last.name)


def test_only_a_few_files_are_held_open(tmp_path: Path, good: Path) -> None:
    tensors = read_tensors(good)
    shutil.copy(good / "config.json", tmp_path)
    write_tensors(tmp_path, tensors, shards=20)
    checkpoint = open_checkpoint(tmp_path)
    for _ in range(2):
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor)
    assert len(checkpoint._handles) == module.OPEN_FILES
    checkpoint.close()
    assert not checkpoint._handles


def test_values_smaller_than_a_byte_are_copied_nowhere_but_refused(tmp_path: Path) -> None:
    folder = put(tmp_path / "m", {"a": torch.zeros(2, dtype=torch.uint8)})
    content = (folder / "model.safetensors").read_bytes().replace(b'"U8"', b'"F4"').replace(b"[2]", b"[4]")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="this dtype cannot be read; found F4"):
        open_checkpoint(folder).read("a")
