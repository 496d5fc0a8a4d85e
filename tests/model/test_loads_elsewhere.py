"""Our base files in other people's readers: plain transformers with compressed-tensors, and that library's unpacking.

Sources are float32 here, so that scales are float32 and both sides compute from the same numbers: then logits must
agree to float noise. With bfloat16 scales transformers rounds each weight to bfloat16 once more than we do.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from support_journal import export_of
from support_models import read_tensors, tiny, tiny_glm, tiny_q3
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from glm5_quant.model import load, verify
from glm5_quant.model.exported import open_exported

IDS = torch.arange(3, 27)[None]


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


def elsewhere(folder, dtype=torch.float32, **settings):
    """The folder in plain transformers; nothing may be missing, unexpected or of another shape."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **settings)
    assert not any(info.values()), info
    return model.eval()


def says_transformers_loads(folder):
    (verdict,) = (v for v in verify(folder).runtimes if v.runtime == "transformers")
    return verdict.loads


@pytest.mark.parametrize("model_type", ["glm4_moe", "glm_moe_dsa", "qwen3_moe"])
def test_symmetric_moe_exports_load_in_plain_transformers_with_our_logits(model_type, tmp_path):
    source = tiny(model_type, tmp_path / "source", dtype=torch.float32)
    out = export_of(source, tmp_path, symmetric=True)
    assert says_transformers_loads(out)
    ours, theirs = logits(load(out)), logits(elsewhere(out))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=2e-5)


def test_bf16_exports_agree_to_bf16_noise(tmp_path):
    source = tiny_q3(tmp_path / "source", tie_word_embeddings=True)
    out = export_of(source, tmp_path, symmetric=True)
    ours, theirs = logits(load(out, dtype=torch.float32)), logits(elsewhere(out))
    assert (theirs - ours).norm() / ours.norm() < 2**-8


def test_an_export_with_mtp_tensors_loads_in_plain_transformers(tmp_path):
    out = export_of(tiny_glm(tmp_path / "source"), tmp_path, symmetric=True)
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert (logits(model.eval()) - logits(load(out, dtype=torch.float32))).abs().max() < 0.02


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_asymmetric_dense_exports_load_when_dequantized(model_type, tmp_path):
    source = tiny(model_type, tmp_path / "source", dtype=torch.float32)
    out = export_of(source, tmp_path)
    assert says_transformers_loads(out)
    theirs = elsewhere(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    torch.testing.assert_close(logits(theirs), logits(load(out)), rtol=1e-4, atol=2e-5)


def test_asymmetric_experts_do_not_load_in_plain_transformers_as_verify_says(tmp_path):
    out = export_of(tiny_q3(tmp_path / "source"), tmp_path)
    assert not says_transformers_loads(out)
    with pytest.raises(RuntimeError, match="conversion"):
        elsewhere(out, quantization_config=CompressedTensorsConfig(dequantize=True))


def test_ragged_inputs_do_not_load_in_plain_transformers_as_verify_says(tmp_path):
    out = export_of(tiny("llama", tmp_path / "source", intermediate_size=96), tmp_path, symmetric=True)
    assert not says_transformers_loads(out)
    with pytest.raises(ValueError, match="column shape must be"):
        logits(elsewhere(out))


def test_compressed_tensors_reads_every_code_and_zero_point_and_writes_the_same_words(tmp_path):
    source = tiny("llama", tmp_path / "source", intermediate_size=96, head_dim=20)
    out = export_of(source, tmp_path)
    exported, tensors = open_exported(out), read_tensors(out)
    for name, (n, k) in exported.shapes.items():
        codes, grid = exported.read(name)
        words = tensors[f"{name}.weight_packed"]
        signed = unpack_from_int32(words, 4, torch.Size((n, k)))
        assert torch.equal(signed.int() + 8, codes.int())
        assert torch.equal(pack_to_int32(signed, 4), words)
        zeros = tensors[f"{name}.weight_zero_point"]
        signed = unpack_from_int32(zeros, 4, torch.Size((n, grid.scale.shape[1])), packed_dim=0)
        assert torch.equal(signed.int() + 8, grid.zero.int())
        # A last word that is not full holds 0 in unused nibbles, which is what the library writes as well.
        assert torch.equal(pack_to_int32(signed, 4, packed_dim=0), zeros)
