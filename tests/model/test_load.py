"""Load: a folder as a runnable model whose logits are those of the codes, scales and shadows it holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_journal import config_of, dequantized_twin, export_of, packed_parts, rtn
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
)
from support_paths import shared
from transformers import AutoModelForCausalLM

from glm5_quant.model import load
from glm5_quant.model.errors import UserError
from glm5_quant.model.modules import PackedExperts, PackedLinear

IDS = torch.arange(3, 27)[None]


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


def plain_logits(folder, dtype=torch.float32):
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())


@pytest.fixture(scope="module")
def q3(tmp_path_factory):
    """(source, its export) of TINY-Q3."""
    root = tmp_path_factory.mktemp("q3")
    source = tiny_q3(root / "source")
    return source, export_of(source, root)


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_an_export_gives_the_logits_of_its_dequantized_weights(model_type, tmp_path):
    source = tiny(model_type, tmp_path / "source")
    out = export_of(source, tmp_path)
    model = load(out, dtype=torch.float32)
    want = plain_logits(dequantized_twin(source, out, tmp_path / "twin"))
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=2e-5)
    assert model.packed_count == len([n for n in read_tensors(out) if n.endswith("weight_packed")])
    assert not [n for n, t in model.state_dict().items() if t.is_meta]
    assert any(isinstance(m, PackedLinear) for m in model.modules())
    assert any(isinstance(m, PackedExperts) for m in model.modules()) == (model_type in MOE_TYPES)


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "granitemoe", "qwen3"])
def test_a_source_folder_gives_the_logits_transformers_gives(model_type, tmp_path):
    source = tiny(model_type, tmp_path / "source")
    model = load(source, dtype=torch.float32)
    torch.testing.assert_close(logits(model), plain_logits(source), rtol=1e-5, atol=1e-5)
    assert model.packed_count == 0
    assert model.glm5_quant.symmetric is None


def test_symmetric_codes_have_their_zero_at_eight(q3, tmp_path):
    out = export_of(q3[0], tmp_path, symmetric=True)
    model = load(out, dtype=torch.float32)
    want = plain_logits(dequantized_twin(q3[0], out, tmp_path / "twin"))
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=2e-5)
    assert model.glm5_quant.symmetric is True


def test_ragged_inputs_and_odd_rows_load(tmp_path):
    source = tiny("qwen3_moe", tmp_path / "source", moe_intermediate_size=44, hidden_size=96, head_dim=20)
    out = export_of(source, tmp_path)
    want = plain_logits(dequantized_twin(source, out, tmp_path / "twin"))
    torch.testing.assert_close(logits(load(out, dtype=torch.float32)), want, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_real_small_model_with_ragged_blocks_loads(tmp_path):
    source = shared("models/stories260k-glm4moe")
    out = export_of(source, tmp_path)
    want = plain_logits(dequantized_twin(source, out, tmp_path / "twin"))
    torch.testing.assert_close(logits(load(out, dtype=torch.float32)), want, rtol=1e-3, atol=1e-3)


def test_fp8_sources_are_widened_once(tmp_path):
    source = tiny_ds8(tmp_path / "source")
    out = export_of(source, tmp_path)
    twin = dequantized_twin(source, out, tmp_path / "twin")
    torch.testing.assert_close(logits(load(out, dtype=torch.float32)), plain_logits(twin), rtol=1e-4, atol=2e-5)
    assert load(source).dtype == torch.bfloat16


def test_fused_stacks_load_like_their_twins(q3, tmp_path):
    fused = stack_experts(tiny("qwen3_moe", tmp_path / "source"))
    assert torch.equal(logits(load(export_of(fused, tmp_path))), logits(load(q3[1])))


def test_o11_the_correction_bias_stays_f32_in_a_bf16_model(tmp_path):
    source = tiny_glm(tmp_path / "source")
    values = torch.linspace(6.817, 7.063, 4)
    rewrite(source, "model.layers.1.mlp.gate.e_score_correction_bias", lambda tensor: values)
    model = load(export_of(source, tmp_path))
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert model.dtype == torch.bfloat16
    assert bias.dtype == torch.float32
    assert torch.equal(bias, values)


def test_a_tied_head_shares_the_embedding(tmp_path):
    source = tiny_q3(tmp_path / "source", tie_word_embeddings=True)
    model = load(export_of(source, tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_packed_head_runs_on_codes(q3, tmp_path):
    codes, grid = rtn(read_tensors(q3[0])["lm_head.weight"].float())
    parts = packed_parts("lm_head", codes, grid, symmetric=False, scale_dtype=torch.bfloat16)
    model = load(export_of(q3[0], tmp_path, extra=parts), dtype=torch.float32)
    assert isinstance(model.lm_head, PackedLinear)
    base = load(q3[1], dtype=torch.float32)
    base.lm_head = model.lm_head
    assert torch.equal(logits(model), logits(base))


def test_generate_and_the_cache_work_and_follow_the_folders_end_tokens(q3, tmp_path):
    shutil.copytree(q3[1], tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "pad_token_id": 2}))
    model = load(tmp_path / "copy", dtype=torch.float32)
    assert model.generation_config.eos_token_id == [1, 2]
    ids = model.generate(IDS, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    step = IDS
    for _ in range(5):  # the same greedily, without a cache
        scores = model(step).logits[:, -1].clone()
        scores[:, [1, 2]] = -torch.inf
        step = torch.cat([step, scores.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(ids, step)


def test_a_faulty_generation_config_is_named(q3, tmp_path):
    shutil.copytree(q3[1], tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config.json: not usable"):
        load(tmp_path / "copy")


def test_moving_a_model_moves_what_it_computes_with(q3):
    model = load(q3[1], dtype=torch.float32)
    before = logits(model)
    assert torch.equal(logits(model.to(torch.float64).to(torch.float32)), before)
    assert "bits=4" in repr(model)
    model.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), before)


def test_an_unknown_backend_is_refused(q3):
    with pytest.raises(ValueError, match="backend must be one of"):
        logits(load(q3[1], backend="abacus"))
    assert torch.isfinite(logits(load(q3[1], backend="reference"))).all()


def test_o24_a_folder_whose_config_and_tensors_disagree_is_refused(q3, tmp_path):
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    shutil.copytree(q3[0], dense)
    shutil.copytree(q3[1], packed)
    edit_config(dense, quantization_config=config_of(q3[1])["quantization_config"])
    edit_config(packed, quantization_config=...)
    with pytest.raises(UserError, match=r"found 0 packed matrices"):
        load(dense)
    with pytest.raises(UserError, match=r"found 32 packed matrices"):
        load(packed)


def damaged(q3, folder, edit):
    shutil.copytree(q3[1], folder)
    file = next(folder.glob("*.safetensors"))
    tensors = edit(load_file(file))
    save_file(tensors, file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(tensors, file.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def without(*endings):
    return lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(endings)}


@pytest.mark.parametrize(("edit", "message"), [
    (without("layers.0.self_attn.q_proj.weight_scale"), "q_proj: weight_scale is missing"),
    (without("model.norm.weight"), "model.norm.weight"),
    (lambda t: t | {"model.layers.0.self_attn.q_proj.weight": torch.ones(1)}, "stored twice, packed and plain"),
    (lambda t: {n: v * torch.nan if n.endswith("k_proj.weight_scale") else v for n, v in t.items()}, "is not finite"),
])  # fmt: skip
def test_o36_damaged_exports_are_refused_by_name(q3, tmp_path, edit, message):
    with pytest.raises(UserError, match=message):
        load(damaged(q3, tmp_path / "copy", edit))


def test_experts_of_a_layer_are_packed_all_or_none(q3, tmp_path):
    some = export_of(q3[0], tmp_path / "a", only=lambda linear: linear.expert != 3 or linear.layer == 0)
    with pytest.raises(UserError, match="9 of 12 matrices of a layer's experts are packed"):
        load(some)
    none = export_of(q3[0], tmp_path / "b", only=lambda linear: linear.expert is None)
    want = plain_logits(dequantized_twin(q3[0], none, tmp_path / "twin"))
    torch.testing.assert_close(logits(load(none, dtype=torch.float32)), want, rtol=1e-4, atol=2e-5)


def test_blocks_of_another_size_and_unplaced_matrices_are_refused(q3, tmp_path):
    shutil.copytree(q3[1], tmp_path / "copy")
    settings = config_of(q3[1])["quantization_config"]
    settings["config_groups"]["group_0"]["weights"]["group_size"] = 32
    edit_config(tmp_path / "copy", quantization_config=settings)
    with pytest.raises(UserError, match=r"weight_scale is BF16 \[128, 1\], expected BF16 \[128, 2\]"):
        load(tmp_path / "copy")
    tiny_blocks = export_of(
        tiny("llama", tmp_path / "llama", hidden_size=32, intermediate_size=32, head_dim=8), tmp_path
    )
    settings["config_groups"]["group_0"]["weights"]["group_size"] = 128  # still one block a row: only kernels refuse
    edit_config(tiny_blocks, quantization_config=settings)
    with pytest.raises(UserError, match="blocks our kernels do not compute; found 128"):
        load(tiny_blocks)


def test_an_unknown_activation_is_named(q3, tmp_path):
    shutil.copytree(q3[1], tmp_path / "copy")
    edit_config(tmp_path / "copy", hidden_act="mish")
    with pytest.raises(UserError, match="unknown activation; found mish"):
        load(tmp_path / "copy")


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_shadows_add_their_columns_for_routed_tokens_only(q3, tmp_path, kind):
    """Two matrices of one expert, one of another and one linear: y += residual @ x[S], exactly."""
    generator = torch.Generator().manual_seed(3)
    base = export_of(q3[0], tmp_path / "base")
    twin = dequantized_twin(q3[0], base, tmp_path / "twin")
    tensors, extra = load_file(twin / "model.safetensors"), {}
    names = ["self_attn.k_proj", "mlp.experts.1.gate_proj", "mlp.experts.1.up_proj", "mlp.experts.3.down_proj"]
    for count, short in enumerate(names, start=1):
        name = f"model.layers.0.{short}"
        weight = tensors[f"{name}.weight"]
        index = torch.randperm(weight.shape[1], generator=generator)[:count].sort().values
        residual = torch.randn(weight.shape[0], count, generator=generator) * 0.05
        stored, scale = residual.half(), torch.ones(count)
        if kind == "int8":
            scale = residual.abs().amax(0) / 127
            stored = (residual / scale).round().to(torch.int8)
            extra[f"eampq/{name}.shadow_scale"] = scale
        extra |= {f"eampq/{name}.shadow_index": index.int(), f"eampq/{name}.shadow_weight": stored}
        weight[:, index] += stored.float() * scale
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    model = load(export_of(q3[0], tmp_path / "shadowed", extra=extra), dtype=torch.float32)
    torch.testing.assert_close(logits(model), plain_logits(twin), rtol=1e-4, atol=2e-5)
    assert model.glm5_quant.shadow_count == 4
    assert not torch.allclose(logits(model), logits(load(base, dtype=torch.float32)), atol=1e-3)


def test_compensation_is_added_to_the_layers_output_times_its_gain(tmp_path):
    source = tiny("glm_moe_dsa", tmp_path / "source")  # layers that return a tuple
    vector = torch.linspace(-0.1, 0.1, 128)
    layer = "eampq/model.layers.1"
    extra = {f"{layer}.compensation": vector, f"{layer}.compensation_gain": torch.tensor(0.3)}
    model = load(export_of(source, tmp_path, extra=extra), dtype=torch.float32)
    assert model.glm5_quant.compensated_layers == (1,)
    seen = {}
    model.model.layers[2].register_forward_pre_hook(lambda m, args: seen.update(after=args[0]))
    logits(model)
    with_it = seen["after"]
    model.model.layers[1].compensation.gain.zero_()
    logits(model)
    torch.testing.assert_close(with_it - seen["after"], (0.3 * vector).expand_as(with_it), rtol=0, atol=1e-6)


def test_compensation_works_on_layers_that_return_a_tensor(q3, tmp_path):
    layer = "eampq/model.layers.1"
    extra = {f"{layer}.compensation": torch.ones(128), f"{layer}.compensation_gain": torch.tensor(0.0)}
    model = load(export_of(q3[0], tmp_path, extra=extra), dtype=torch.float32)
    assert torch.equal(logits(model), logits(load(q3[1], dtype=torch.float32)))
    model.model.layers[1].compensation.gain.fill_(0.5)
    assert not torch.equal(logits(model), logits(load(q3[1], dtype=torch.float32)))


def test_packed_weights_are_held_once_at_under_five_bits_a_weight(tmp_path):
    source = tiny("llama", tmp_path / "source", intermediate_size=256)
    model = load(export_of(source, tmp_path))
    held = sum(b.nbytes for m in model.modules() if isinstance(m, PackedLinear | PackedExperts) for b in m.buffers())
    weights = sum(t.numel() for n, t in read_tensors(source).items() if "_proj" in n)
    assert held == model.glm5_quant.packed_bytes
    assert 8 * held / weights == 4 + (16 + 8) / 64  # codes; a bf16 scale and a byte of zero-point for each 64


def test_importing_the_package_loads_no_torch_and_unknown_names_are_refused():
    code = "import sys, glm5_quant.model as m; assert 'torch' not in sys.modules; m.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has no attribute 'nothing'" in done.stderr
