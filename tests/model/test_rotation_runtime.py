"""Online rotation: codes of W R are computed with rotated inputs, and nobody else computes them at all."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from support_journal import block_hadamard, config_of, dequantized_twin, export_of, make_journal, packed_parts, rtn
from support_models import edit_config, read_tensors, tiny, tiny_q3
from support_paths import shared
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from glm5_quant.model import export, load, verify
from glm5_quant.model.errors import UserError
from glm5_quant.model.modules import PackedLinear
from glm5_quant.model.scheme import InputScheme

IDS = torch.arange(3, 27)[None]
KEY = "quantization_config"
FAMILIES = ["glm_moe_dsa", "glm4_moe", "deepseek_v3", "qwen3_moe", "mixtral", "granitemoe", "llama"]
OTHERS = ("compressed-tensors", "transformers", "vLLM", "SGLang")


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


def own(folder, dtype=torch.float32):
    return load(folder, dtype=dtype, backend="reference")


def plain_logits(folder):
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def relative(left, right):
    return float((left - right).norm() / right.norm())


@pytest.fixture(scope="module")
def q3(tmp_path_factory):
    """(source, its rotated export) of TINY-Q3."""
    root = tmp_path_factory.mktemp("q3")
    source = tiny_q3(root / "source")
    return source, export_of(source, root, rotation="full")


@pytest.fixture
def copy(q3, tmp_path):
    """A rotated export to damage."""
    shutil.copytree(q3[1], tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_rotated_export_gives_the_logits_of_its_weights_rotated_back(model_type, tmp_path):
    source = tiny(model_type, tmp_path / "source")
    out = export_of(source, tmp_path, rotation="full")
    model = own(out)
    want = plain_logits(dequantized_twin(source, out, tmp_path / "twin"))
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=2e-5)
    assert model.glm5_quant.inputs == InputScheme(rotation="full")
    assert model.packed_count == len([n for n in read_tensors(out) if n.endswith("weight_packed")])


def test_channels_of_a_ragged_tail_are_not_rotated(tmp_path):
    source = tiny("qwen3_moe", tmp_path / "source", moe_intermediate_size=44, hidden_size=96, head_dim=20)
    out = export_of(source, tmp_path, rotation="full")
    want = plain_logits(dequantized_twin(source, out, tmp_path / "twin"))
    torch.testing.assert_close(logits(own(out)), want, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_real_small_model_with_ragged_blocks_runs_rotated(tmp_path):
    source = shared("models/stories260k-glm4moe")
    out = export_of(source, tmp_path, rotation="full")
    want = plain_logits(dequantized_twin(source, out, tmp_path / "twin"))
    torch.testing.assert_close(logits(own(out)), want, rtol=1e-3, atol=1e-3)


def test_symmetric_codes_are_rotated_too_and_bf16_models_rotate_in_float32(q3, tmp_path):
    out = export_of(q3[0], tmp_path, rotation="full", symmetric=True)
    want = plain_logits(dequantized_twin(q3[0], out, tmp_path / "twin"))
    torch.testing.assert_close(logits(own(out)), want, rtol=1e-4, atol=2e-5)
    assert relative(logits(own(out, torch.bfloat16)), want) < 0.02


def test_a_packed_head_reads_rotated_inputs_like_every_packed_matrix(q3, tmp_path):
    rotated = read_tensors(q3[0])["lm_head.weight"].double() @ block_hadamard(128)
    parts = packed_parts("lm_head", *rtn(rotated.float()), symmetric=False, scale_dtype=torch.bfloat16)
    model = own(export_of(q3[0], tmp_path, extra=parts, rotation="full"))
    assert isinstance(model.lm_head, PackedLinear)
    assert relative(logits(model), logits(own(q3[1]))) < 0.15


def test_a_shadow_counts_its_columns_in_rotated_inputs(q3, tmp_path):
    name, index = "model.layers.0.self_attn.k_proj", torch.tensor([3, 70])
    residual = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)).half()
    extra = {f"eampq/{name}.shadow_index": index.int(), f"eampq/{name}.shadow_weight": residual}
    base, shadowed = own(q3[1]), own(export_of(q3[0], tmp_path, extra=extra, rotation="full"))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    change = (shadowed.get_submodule(name)(x) - base.get_submodule(name)(x)).double()
    want = (x.double() @ block_hadamard(128))[:, index] @ residual.double().T
    torch.testing.assert_close(change, want, rtol=1e-4, atol=1e-4)


def test_moving_a_rotated_model_keeps_its_rotation(q3):
    model = own(q3[1])
    before = logits(model)
    assert torch.equal(logits(model.to(torch.float64).to(torch.float32)), before)
    assert "rotated=True, activations=none" in repr(model)


def test_config_and_sidecar_both_say_that_inputs_are_rotated(q3):
    settings = config_of(q3[1])[KEY]
    assert settings["format"] == settings["config_groups"]["group_0"]["format"] == "eampq-pack-quantized"
    assert settings["eampq_inputs"] == {"rotation": "full", "activations": "none"}
    sidecar = json.loads((q3[1] / "eampq" / "eampq.json").read_text())
    assert sidecar["inputs"] == {"rotation": "full", "activations": "none"}
    assert sidecar["features"] == ["rotation"]


def test_without_rotation_the_config_is_what_every_reader_knows(q3, tmp_path):
    settings = config_of(export_of(q3[0], tmp_path))[KEY]
    assert settings["format"] == "pack-quantized"
    assert "format" not in settings["config_groups"]["group_0"]
    assert "eampq_inputs" not in settings


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_transformers_and_compressed_tensors_refuse_rotated_codes_by_the_formats_name(model_type, dequantize, tmp_path):
    out = export_of(tiny(model_type, tmp_path / "source"), tmp_path, rotation="full", symmetric=True)
    chosen = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    with pytest.raises(ValueError, match=r"(?s)format.*Input should be.*pack-quantized"):
        AutoModelForCausalLM.from_pretrained(out, **chosen)
    with pytest.raises(ValueError, match="format"):
        QuantizationConfig.model_validate(config_of(out)[KEY])


def test_verify_finds_rotated_weights_as_close_to_the_source_as_plain_ones(q3, tmp_path):
    report = verify(q3[1], q3[0])
    assert report.ok and not report.warnings
    assert report.features == ("rotation",)
    plain = {s.module: s.error for s in verify(export_of(q3[0], tmp_path), q3[0]).samples}
    assert len(report.samples) == len(plain) == 32
    for sample in report.samples:
        assert sample.error == pytest.approx(plain[sample.module], rel=0.15)


def test_verify_says_that_only_our_runtime_loads_rotated_codes(tmp_path):
    source = tiny("llama", tmp_path / "source")
    plain = {v.runtime: v.loads for v in verify(export_of(source, tmp_path / "plain", symmetric=True)).runtimes}
    assert all(plain.values())
    rotated = export_of(source, tmp_path / "rotated", symmetric=True, rotation="full")
    verdicts = {v.runtime: v for v in verify(rotated).runtimes}
    assert verdicts["glm5-quant"].loads
    for name in OTHERS:
        assert not verdicts[name].loads
        assert "inputs of every packed matrix are rotated" in verdicts[name].reason


def test_a_config_made_plain_by_hand_does_not_make_rotated_codes_plain(copy):
    settings = config_of(copy)[KEY]
    renamed = settings | {"format": "pack-quantized"}
    edit_config(copy, **{KEY: renamed})
    with pytest.raises(UserError, match="the format's name and what the codes expect"):
        load(copy)
    del renamed["eampq_inputs"], renamed["config_groups"]["group_0"]["format"]
    edit_config(copy, **{KEY: renamed})
    with pytest.raises(UserError, match=r"config.json says of the inputs .*'none'.* eampq/eampq.json says .*'full'"):
        load(copy)
    assert any("config.json says of the inputs" in problem for problem in verify(copy).problems)


@pytest.mark.parametrize("inputs", [{"rotation": "half"}, {"rotation": "full", "twist": 1}])
def test_inputs_that_this_version_does_not_know_are_refused(copy, inputs):
    edit_config(copy, **{KEY: config_of(copy)[KEY] | {"eampq_inputs": inputs}})
    with pytest.raises(UserError, match=r"quantization that this package does not compute.*|eampq_inputs"):
        load(copy)


@pytest.mark.parametrize("setting", ["rotation", "activations"])
def test_a_journal_with_an_unknown_setting_is_refused_before_anything_is_written(q3, tmp_path, setting):
    settings = {"quant": {"symmetric": False, setting: "sideways"}}
    journal = make_journal(q3[0], tmp_path / "journal", settings=settings)
    with pytest.raises(UserError, match=f"settings.quant.{setting}: unknown setting; found sideways"):
        export(q3[0], journal, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_rotated_weights_off_by_one_block_are_far_off(q3, copy):
    """What verify would say if it forgot the rotation: an error of the size of the weights themselves."""
    file = next(copy.glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    save_file(tensors | {name: tensors[name].roll(8, dims=1).contiguous()}, file, {"format": "pt"})
    assert [s.module for s in verify(copy, q3[0]).samples if s.outlier] == [name.removesuffix(".weight_packed")]
