"""A model run layer by layer from disk gives the logits of the whole transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import (
    ALL_TYPES,
    MOE_TYPES,
    edit_config,
    read_tensors,
    rewrite,
    stack_experts,
    tiny,
    tiny_ds8,
    tiny_glm,
    tiny_q3,
    write_tensors,
)
from torch import Tensor, nn

from glm5_quant.model import checkpoint as checkpoint_module
from glm5_quant.model import layers as layers_module
from glm5_quant.model.build import build_empty, fill, fp32_patterns
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import FAMILIES, family_of
from glm5_quant.model.layers import LayerRunner

LARGE = 0.2  # weights this large make attention and routing sharp, so that a wrong mask or a lost side value shows


def runner_of(folder: Path, dtype: torch.dtype = torch.float32) -> LayerRunner:
    checkpoint = open_checkpoint(folder)
    return LayerRunner(checkpoint, family_of(checkpoint.config), dtype)


def run(runner: LayerRunner, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    hidden, side = runner.embed(ids), None
    for index, kwargs in enumerate(runner.kwargs_for(ids, mask)):
        hidden, side = runner.run_layer(runner.load_layer(index), hidden, kwargs, side)
    return runner.logits(hidden)


def windows(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(0, 245, (batch, length), generator=torch.Generator().manual_seed(3))


def whole_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own loading of the folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def reference(folder: Path, ids: Tensor, mask: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    result: Tensor = whole_model(folder, dtype)(ids, attention_mask=mask, use_cache=False).logits
    return result


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_logits_layer_by_layer_equal_those_of_the_whole_model(tmp_path: Path, model_type: str) -> None:
    folder = tiny(model_type, tmp_path, scale=LARGE)
    expected = reference(folder, windows())
    assert expected.std() > 0.1
    assert relative(run(runner_of(folder), windows()), expected) <= 1e-5


@pytest.mark.parametrize("model_type", [name for name in ALL_TYPES if FAMILIES[name].adds_plainly])
def test_what_attention_and_mlp_return_is_added_to_the_stream_as_it_is(tmp_path: Path, model_type: str) -> None:
    runner, ids = runner_of(tiny(model_type, tmp_path, scale=LARGE)), windows()
    hidden, side = runner.embed(ids), None
    for index, kwargs in enumerate(runner.kwargs_for(ids)):
        layer, outputs = runner.load_layer(index), list[Tensor]()
        for path in (runner.family.attention_path, runner.family.block):
            layer.get_submodule(path).register_forward_hook(
                lambda _module, _args, out, into=outputs: into.append(out[0] if isinstance(out, tuple) else out)
            )
        after, side = runner.run_layer(layer, hidden, kwargs, side)
        torch.testing.assert_close(after, hidden + outputs[0] + outputs[1])
        hidden = after


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_in_bfloat16_every_parameter_has_the_dtype_and_value_transformers_gives_it(
    tmp_path: Path, model_type: str
) -> None:
    folder = tiny(model_type, tmp_path, scale=LARGE)
    expected = whole_model(folder, torch.bfloat16).state_dict()
    runner = runner_of(folder, torch.bfloat16)
    seen = 0
    for index in range(runner.layer_count):
        for name, tensor in runner.load_layer(index).state_dict().items():
            other = expected[f"model.layers.{index}.{name}"]
            assert tensor.dtype == other.dtype and torch.equal(tensor, other), name
            seen += 1
    assert seen == len(expected) - 3  # embedding, norm, head
    assert torch.equal(run(runner, windows()), reference(folder, windows(), dtype=torch.bfloat16))


def test_the_correction_bias_stays_f32_bit_for_bit_in_a_bfloat16_model(tmp_path: Path) -> None:
    bias = torch.linspace(6.817, 7.063, 16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    rewrite(tiny_glm(tmp_path, n_routed_experts=16), name, lambda old: bias)
    found = runner_of(tmp_path, torch.bfloat16).load_layer(1).mlp.gate.e_score_correction_bias
    assert found.dtype == torch.float32 and torch.equal(found, bias)


def test_shared_indexers_get_the_choice_of_the_layer_before(tmp_path: Path) -> None:
    runner = runner_of(tiny("glm_moe_dsa", tmp_path, scale=LARGE))
    ids = windows()
    hidden, kwargs = runner.embed(ids), runner.kwargs_for(ids)
    _, side = runner.run_layer(runner.load_layer(0), hidden, kwargs[0])
    assert side.shape == (2, 24, 6)
    layer = runner.load_layer(1)
    assert layer.self_attn.indexer is None
    right = runner.run_layer(layer, hidden, kwargs[1], side)[0]
    wrong = runner.run_layer(layer, hidden, kwargs[1], torch.zeros_like(side))[0]
    assert not torch.allclose(right, wrong, atol=1e-3)
    with pytest.raises(ValueError, match="top-k indices"):
        runner.run_layer(layer, hidden, kwargs[1], None)


def test_families_without_side_values_return_none(tmp_path: Path) -> None:
    runner = runner_of(tiny("llama", tmp_path))
    ids = windows()
    assert runner.run_layer(runner.load_layer(0), runner.embed(ids), runner.kwargs_for(ids)[0])[1] is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", ["glm4_moe", "glm_moe_dsa", "llama"])
def test_padding_is_masked_as_the_whole_model_masks_it(tmp_path: Path, model_type: str, side: str) -> None:
    folder = tiny(model_type, tmp_path, scale=LARGE)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :9] = 0
    mask = mask if side == "left" else mask.flip(1)
    found, expected = run(runner_of(folder), windows(), mask), reference(folder, windows(), mask)
    assert relative(found[mask.bool()], expected[mask.bool()]) <= 1e-5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 123.0},
        {"rope_theta": 123.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_rope_settings_of_every_spelling_take_effect(tmp_path: Path, model_type: str, rope: dict[str, Any]) -> None:
    folder = tiny(model_type, tmp_path, scale=LARGE)
    plain = run(runner_of(folder), windows())
    edit_config(folder, rope_parameters=..., rope_theta=..., rope_scaling=...)
    edit_config(folder, **rope)
    found = run(runner_of(folder), windows())
    assert relative(found, reference(folder, windows())) <= 1e-5
    assert relative(found, plain) > 1e-3


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = tiny_q3(tmp_path, tie_word_embeddings=True, scale=LARGE)
    assert "lm_head.weight" not in read_tensors(folder)
    assert relative(run(runner_of(folder), windows()), reference(folder, windows())) <= 1e-5


def test_an_untied_model_without_a_head_is_refused_not_guessed(tmp_path: Path) -> None:
    runner = runner_of(rewrite(tiny_q3(tmp_path), "lm_head.weight", lambda old: None))
    with pytest.raises(UserError, match=r"lm_head.weight: 1 tensors are not in the checkpoint"):
        runner.logits(runner.embed(windows()))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_renamed_prefixes_give_the_same_logits(tmp_path: Path, prefix: str) -> None:
    expected = run(runner_of(tiny_q3(tmp_path)), windows())
    tensors = read_tensors(tmp_path)
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    if prefix.startswith("language_model."):
        renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
    write_tensors(tmp_path, renamed, shards=2)
    assert torch.equal(run(runner_of(tmp_path), windows()), expected)


def test_fused_experts_give_the_same_logits_bit_for_bit(tmp_path: Path) -> None:
    expected = run(runner_of(tiny("mixtral", tmp_path, scale=LARGE)), windows())
    assert torch.equal(run(runner_of(stack_experts(tmp_path)), windows()), expected)


def test_an_fp8_model_runs_on_its_widened_weights(tmp_path: Path) -> None:
    found = run(runner_of(tiny_ds8(tmp_path / "fp8")), windows())
    plain = run(
        runner_of(tiny("deepseek_v3", tmp_path / "bf16", hidden_size=256, moe_intermediate_size=192)), windows()
    )
    assert 0 < relative(found, plain) < 0.1


def test_without_experts_their_stacks_stay_empty_and_can_be_replaced(tmp_path: Path) -> None:
    runner = runner_of(tiny_glm(tmp_path, scale=LARGE))
    ids = windows()
    hidden, kwargs = runner.embed(ids), runner.kwargs_for(ids)[1]
    whole, bare = runner.load_layer(1), runner.load_layer(1, experts=False)
    empty = [name for name, tensor in bare.state_dict().items() if tensor.is_meta]
    assert empty == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    block = getattr(bare, runner.family.block)
    calls: list[tuple[Any, ...]] = []

    class Streaming(nn.Module):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            calls.append((hidden_states.shape, top_k_index.shape, top_k_weights.shape))
            result: Tensor = whole.mlp.experts(hidden_states, top_k_index, top_k_weights)
            return result

    setattr(block, runner.family.experts, Streaming())
    assert torch.equal(runner.run_layer(bare, hidden, kwargs)[0], runner.run_layer(whole, hidden, kwargs)[0])
    assert calls == [((48, 128), (48, 2), (48, 2))]


def test_run_time_paths_lead_to_the_modules_their_linears_name(tmp_path: Path) -> None:
    for model_type in ALL_TYPES:
        runner = runner_of(tiny(model_type, tmp_path / model_type))
        for index, linears in enumerate(runner.linears):
            layer = runner.load_layer(index, experts=False)
            for linear in linears:
                module = layer.get_submodule(linear.module)
                if linear.expert is None:
                    assert tuple(module.weight.shape) == (linear.n, linear.k), linear.name
                else:
                    assert {"gate_up_proj", "down_proj"} == set(dict(module.named_parameters()))


def test_the_experts_of_a_layer_come_by_number_and_role(tmp_path: Path) -> None:
    runner = runner_of(tiny_glm(tmp_path))
    assert runner.experts(0) == []
    assert [sorted(roles) for roles in runner.experts(1)] == [["down", "gate", "up"]] * 4
    assert runner.experts(1)[2]["up"].name == "model.layers.1.mlp.experts.2.up_proj"


def test_loading_a_layer_reads_that_layers_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(tiny("qwen3_moe", tmp_path, num_hidden_layers=4))
    read: list[str] = []
    original = checkpoint_module.Checkpoint._raw

    def noting(self: Any, info: Any, offset: int, shape: tuple[int, ...]) -> Tensor:
        read.append(info.name)
        return original(self, info, offset, shape)

    monkeypatch.setattr(checkpoint_module.Checkpoint, "_raw", noting)
    runner.kwargs_for(windows())
    assert read == []
    runner.load_layer(2, experts=False)
    assert read and all(name.startswith("model.layers.2.") and ".experts." not in name for name in read)
    read.clear()
    runner.load_layer(2)
    assert {name for name in read if ".experts." in name} == {
        f"model.layers.2.mlp.experts.{e}.{part}_proj.weight" for e in range(4) for part in ("gate", "up", "down")
    }
    assert all(tensor.is_meta for tensor in runner.model.state_dict().values())  # the runner itself holds nothing


def test_changing_a_loaded_layer_leaves_the_next_load_untouched(tmp_path: Path) -> None:
    runner = runner_of(tiny("llama", tmp_path))
    layer = runner.load_layer(0)
    layer.self_attn.q_proj.weight.zero_()
    layer.mlp = nn.Identity()
    assert runner.load_layer(0).self_attn.q_proj.weight.abs().sum() > 0
    assert not isinstance(runner.load_layer(0).mlp, nn.Identity)


def test_kwargs_depend_on_the_shape_alone(tmp_path: Path) -> None:
    runner = runner_of(tiny("glm_moe_dsa", tmp_path))
    first, second = runner.kwargs_for(windows()), runner.kwargs_for(torch.zeros_like(windows()))
    assert first[0].keys() == second[0].keys() and "prev_topk_indices" not in first[1]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a["attention_mask"], b["attention_mask"])
        assert all(map(torch.equal, a["position_embeddings"], b["position_embeddings"]))


def test_a_recorder_shows_the_attributes_of_the_layer_it_stands_for(tmp_path: Path) -> None:
    runner = runner_of(tiny("qwen3", tmp_path))
    recorder = runner._recorders()[1]
    assert recorder.self_attn is runner.base.layers[1].self_attn
    assert not hasattr(recorder, "no_such_thing")


def test_a_large_embedding_is_read_row_by_row_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("granitemoe", tmp_path)  # scales its embeddings
    expected = runner_of(folder).embed(windows())
    monkeypatch.setattr(layers_module, "SMALL_TABLE_BYTES", 0)
    assert torch.equal(runner_of(folder).embed(windows()), expected)
    table = read_tensors(folder)["model.embed_tokens.weight"].float()
    assert torch.equal(expected, table[windows()] * 2.0)


@pytest.mark.parametrize("bad", [256, -1])
def test_a_token_id_outside_the_embedding_is_a_message(tmp_path: Path, bad: int) -> None:
    ids = windows()
    ids[0, 3] = bad
    with pytest.raises(UserError, match=r"a token id is outside the embedding.*expected 0 to 255"):
        runner_of(tiny("llama", tmp_path)).embed(ids)


def test_a_checkpoint_without_an_embedding_is_refused(tmp_path: Path) -> None:
    rewrite(tiny("llama", tmp_path), "model.embed_tokens.weight", lambda old: None)
    with pytest.raises(UserError, match="no embedding"):
        runner_of(tmp_path).embed(windows())


def test_the_head_can_be_released_and_comes_back(tmp_path: Path) -> None:
    runner = runner_of(tiny("llama", tmp_path))
    hidden = runner.embed(windows())
    before = runner.logits(hidden)
    runner.release_head()
    assert runner.model.lm_head.weight.is_meta and runner.base.norm.weight.is_meta
    assert torch.equal(runner.logits(hidden), before)


def test_a_tensor_of_another_shape_than_the_models_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    runner = runner_of(rewrite(tiny("llama", tmp_path), name, lambda old: old[:64]))
    with pytest.raises(UserError, match=rf"{name}: a tensor does not fit the model.*found \[64\]; expected \[128\]"):
        runner.load_layer(1)


def test_missing_tensors_of_a_layer_are_counted(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    runner = runner_of(rewrite(tiny("qwen3", tmp_path), name, lambda old: None))
    with pytest.raises(UserError, match=f"{name}: 1 tensors are not in the checkpoint"):
        runner.load_layer(1)


@pytest.mark.parametrize("model_type", ["glm4_moe", "mixtral", "glm5_ref"])
def test_fill_makes_a_whole_model_equal_to_transformers_own_loading(tmp_path: Path, model_type: str) -> None:
    folder = tiny(model_type, tmp_path)
    checkpoint = open_checkpoint(folder)
    model = build_empty(checkpoint, torch.bfloat16)
    keep = fp32_patterns(model, torch.bfloat16)
    fill(model, "", checkpoint, family_of(checkpoint.config), torch.bfloat16, keep_fp32=keep)
    expected = whole_model(folder, torch.bfloat16).state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_fill_ties_head_and_embedding_to_one_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama", tmp_path, tie_word_embeddings=True))
    model = build_empty(checkpoint, torch.float32)
    fill(model, "", checkpoint, family_of(checkpoint.config), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_fp16_model_keeps_in_f32_what_its_class_names(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("glm_moe_dsa", tmp_path, dtype=torch.float16))
    assert checkpoint.dtype == torch.float16
    found = LayerRunner(checkpoint, family_of(checkpoint.config), torch.float16).load_layer(2).state_dict()
    wide = sorted(name for name, tensor in found.items() if tensor.dtype == torch.float32)
    assert wide == ["mlp.gate.e_score_correction_bias", "mlp.gate.weight", "self_attn.indexer.weights_proj.weight"]


@pytest.mark.parametrize("settings", [{"output_router_logits": True}, {"return_dict": False}])
def test_a_config_that_asks_for_other_outputs_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Training leaves `output_router_logits` behind, which wants a loss of what recorders do not hand out."""
    folder, ids = tiny("qwen3_moe", tmp_path), torch.arange(24)[None]

    def run() -> Tensor:
        runner = runner_of(folder)
        hidden = runner.embed(ids)
        for layer, kwargs in enumerate(runner.kwargs_for(ids)):
            hidden, _ = runner.run_layer(runner.load_layer(layer), hidden, kwargs)
        return runner.logits(hidden)

    want = run()
    edit_config(folder, **settings)
    assert torch.equal(run(), want)
