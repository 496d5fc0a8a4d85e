"""Export: journal and source become one exact folder, and everything that is not quantized stays as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support_journal import config_of, content, export_of, make_journal, packed_parts, rtn
from support_models import (
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

from glm5_quant.model import export
from glm5_quant.model.scheme import untied_config
from glm5_quant.quant.grid import dequantize, minmax_grid, quantize
from glm5_quant.quant.packing import unpack_codes, unpack_zeros

PARTS = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape")


@pytest.fixture(scope="module")
def q3(tmp_path_factory):
    """(source, finished journal) of TINY-Q3."""
    root = tmp_path_factory.mktemp("q3")
    source = tiny_q3(root / "source")
    return source, make_journal(source, root / "journal")


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """(source, finished journal) of TINY-GLM."""
    root = tmp_path_factory.mktemp("glm")
    source = tiny_glm(root / "source")
    return source, make_journal(source, root / "journal")


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())


def matrix(tensors, name, k):
    """One matrix of an export, from its stored parts alone."""
    codes = unpack_codes(tensors[f"{name}.weight_packed"], k)
    scale = tensors[f"{name}.weight_scale"].float()
    zero = unpack_zeros(tensors[f"{name}.weight_zero_point"], codes.shape[0])
    blocks = torch.arange(k) // 64
    return (codes.float() - zero.float()[:, blocks]) * scale[:, blocks]


def unpacked_2d(tensors):
    """Modules of 2-D weights that are stored as they are."""
    return {n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.ndim == 2}


def test_every_matrix_comes_back_as_round_to_nearest_left_it(q3, tmp_path):
    source, journal = q3
    export(source, journal, tmp_path / "out")
    before, after = read_tensors(source), read_tensors(tmp_path / "out")
    name = "model.layers.1.mlp.experts.2.down_proj"
    weight = before[f"{name}.weight"].float()
    grid = minmax_grid(weight)
    assert torch.equal(matrix(after, name, 64), dequantize(quantize(weight, grid), grid))
    assert after[f"{name}.weight_packed"].dtype == torch.int32
    assert after[f"{name}.weight_packed"].shape == (128, 8)
    assert after[f"{name}.weight_scale"].dtype == torch.bfloat16
    assert after[f"{name}.weight_zero_point"].shape == (16, 1)
    assert after[f"{name}.weight_shape"].tolist() == [128, 64]


def test_o21_names_are_the_source_names_plus_our_endings_and_nothing_is_there_twice(q3, tmp_path):
    source, journal = q3
    report = export(source, journal, tmp_path / "out")
    before, after = read_tensors(source), read_tensors(tmp_path / "out")
    plain = {n for n in after if not n.endswith(PARTS)}
    packed = {n.removesuffix(".weight_packed") for n in after if n.endswith(".weight_packed")}
    assert plain | {f"{m}.weight" for m in packed} == before.keys()
    assert not plain & {f"{m}.weight" for m in packed}
    assert all(torch.equal(after[n], before[n]) and after[n].dtype == before[n].dtype for n in plain)
    quantized = sum(before[f"{m}.weight"].numel() for m in packed)
    assert report.packed_linears == len(packed) == 32
    assert 4.25 < report.bits_per_weight < 4.4
    assert report.bits_per_weight * quantized / 8 == sum(t.nbytes for n, t in after.items() if n.endswith(PARTS))


def test_o21_a_prefix_in_the_source_names_is_kept(tmp_path):
    source = tiny_q3(tmp_path / "source")
    renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in read_tensors(source).items()}
    write_tensors(source, renamed)
    after = read_tensors(export_of(source, tmp_path))
    assert {n.removesuffix("_packed") for n in after if not n.endswith(PARTS[1:])} == renamed.keys()


def test_o19_total_size_is_the_sum_of_tensor_bytes_and_the_index_names_every_tensor(q3, tmp_path):
    source, journal = q3
    report = export(source, journal, tmp_path / "out", max_shard_bytes=60_000)
    index, after = index_of(tmp_path / "out"), read_tensors(tmp_path / "out")
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in after.values())}
    assert report.tensor_bytes == index["metadata"]["total_size"]
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "out" / file, framework="pt") as shard:
            assert set(shard.keys()) == {n for n, f in index["weight_map"].items() if f == file}
            assert shard.metadata() == {"format": "pt"}
    sizes = [
        sum(after[n].nbytes for n in index["weight_map"] if index["weight_map"][n] == f)
        for f in set(index["weight_map"].values())
    ]
    assert len(sizes) > 3
    assert max(sizes) <= 65_536  # the embedding alone is 65,536 bytes, everything else keeps to the limit
    assert sorted(sizes)[-3] <= 60_000


def test_o09_the_ignore_list_is_what_is_stored_unpacked_both_ways(q3, glm, tmp_path):
    for number, (source, journal) in enumerate((q3, glm)):
        out = tmp_path / str(number)
        export(source, journal, out)
        ignore, after = config_of(out)["quantization_config"]["ignore"], read_tensors(out)
        assert set(ignore) == unpacked_2d(after)
        packed = {n.removesuffix(".weight_packed") for n in after if n.endswith(".weight_packed")}
        assert not [m for m in ignore for p in packed if p == m or p.startswith(m + ".")]
    assert {"model.layers.1.mlp.gate", "model.layers.2.eh_proj", "model.layers.2.mlp.experts.0.up_proj"} <= set(ignore)


def test_o11_the_correction_bias_stays_f32_bit_for_bit(glm, tmp_path):
    source, journal = glm
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    export(source, journal, tmp_path / "out")
    after = read_tensors(tmp_path / "out")
    assert after[name].dtype == torch.float32
    assert torch.equal(after[name], read_tensors(source)[name])


def test_o10_fused_stacks_give_the_bytes_their_slices_give(tmp_path):
    plain = tiny("qwen3_moe", tmp_path / "plain")
    fused = stack_experts(tiny("qwen3_moe", tmp_path / "fused"))
    one, two = export_of(plain, tmp_path / "a"), export_of(fused, tmp_path / "b")
    a, b = read_tensors(one), read_tensors(two)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)
    stack = read_tensors(fused)["model.layers.0.mlp.experts.gate_up_proj"].nbytes
    parts = sum(t.nbytes for n, t in b.items() if "layers.0.mlp.experts" in n and ("gate" in n or "up" in n))
    assert 3.5 < stack / parts < 3.8


def test_o12_a_tied_embedding_stays_tied_and_writes_no_head(tmp_path):
    source = tiny_q3(tmp_path / "source", tie_word_embeddings=True)
    out = export_of(source, tmp_path)
    assert not [n for n in read_tensors(out) if "lm_head" in n]
    assert config_of(out)["tie_word_embeddings"] is True
    assert "lm_head" in config_of(out)["quantization_config"]["ignore"]


def test_o12_a_quantized_tied_head_is_untied_and_leaves_the_embedding_alone(tmp_path):
    source = tiny_q3(tmp_path / "source", tie_word_embeddings=True)
    embedding = read_tensors(source)["model.embed_tokens.weight"]
    head = torch.randn(256, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    out = export_of(source, tmp_path, extra={"lm_head.weight": head})
    after = read_tensors(out)
    assert config_of(out)["tie_word_embeddings"] is False
    assert torch.equal(after["lm_head.weight"], head)
    assert torch.equal(after["model.embed_tokens.weight"], embedding)


def test_a_head_of_its_own_is_told_at_any_depth_of_a_copy():
    tied = {"tie_word_embeddings": True}
    nested = {**tied, "text_config": {**tied, "a": {**tied}}}
    before = copy.deepcopy(nested)
    inner = {"tie_word_embeddings": False, "a": {"tie_word_embeddings": False}}
    assert untied_config(nested) == {"tie_word_embeddings": False, "text_config": inner}
    assert nested == before
    assert untied_config({"a": {"b": 1}}) == {"a": {"b": 1}, "tie_word_embeddings": False}


def test_o12_a_packed_head_takes_the_place_of_the_plain_one(q3, tmp_path):
    source, _ = q3
    codes, grid = rtn(read_tensors(source)["lm_head.weight"].float())
    parts = packed_parts("lm_head", codes, grid, symmetric=False, scale_dtype=torch.bfloat16)
    out = export_of(source, tmp_path, extra=parts)
    after = read_tensors(out)
    assert "lm_head.weight" not in after
    assert torch.equal(matrix(after, "lm_head", 128), dequantize(codes, grid))
    assert "lm_head" not in config_of(out)["quantization_config"]["ignore"]


def test_o13_mtp_tensors_are_carried_over_and_listed(glm, tmp_path):
    source, journal = glm
    report = export(source, journal, tmp_path / "out")
    before, after = read_tensors(source), read_tensors(tmp_path / "out")
    mtp = [n for n in before if n.startswith("model.layers.2.")]
    assert len(mtp) == report.mtp_tensors > 20
    assert all(torch.equal(after[n], before[n]) for n in mtp)
    assert set(mtp) <= index_of(tmp_path / "out")["weight_map"].keys()
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
    assert report.warnings == ()


def test_names_with_digits_that_are_no_numbers_are_carried_over(tmp_path):
    source = tiny_q3(tmp_path / "source")
    odd = {"model.layers.\u00b2.weight": torch.ones(2), "\u00b2": torch.ones(3)}  # superscript two: a digit, no number
    write_tensors(source, read_tensors(source) | odd)
    export(source, make_journal(source, tmp_path / "journal"), tmp_path / "out")
    after = read_tensors(tmp_path / "out")
    assert all(torch.equal(after[name], tensor) for name, tensor in odd.items())


def test_o13_mtp_in_a_file_of_its_own_is_carried_over(tmp_path):
    source = tiny_glm(tmp_path / "source")
    tensors = read_tensors(source)
    mtp = {n for n in tensors if n.startswith("model.layers.2.")}
    (source / "model.safetensors").unlink()
    save_file({n: t for n, t in tensors.items() if n not in mtp}, source / "model-00001-of-00001.safetensors")
    save_file({n: tensors[n] for n in mtp}, source / "mtp.safetensors")  # no metadata either: O-17
    where = {n: "mtp.safetensors" if n in mtp else "model-00001-of-00001.safetensors" for n in tensors}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    out = export_of(source, tmp_path)
    after = read_tensors(out)
    assert all(torch.equal(after[n], tensors[n]) for n in mtp)
    assert not (out / "mtp.safetensors").exists()


def test_o13_a_declared_mtp_layer_without_tensors_is_a_warning(tmp_path):
    source = edit_config(tiny("glm4_moe", tmp_path / "source"), num_nextn_predict_layers=1)
    report = export(source, make_journal(source, tmp_path / "journal"), tmp_path / "out")
    assert report.warnings == ("config.json declares 1 MTP layer(s) of which the source holds no tensor",)


def test_o16_an_fp8_source_leaves_no_trace_of_its_scheme_but_in_the_report(tmp_path):
    source = tiny_ds8(tmp_path / "source")
    config = config_of(source)
    nested = {"text_config": {"quantization_config": config["quantization_config"], "vocab_size": 256}}
    edit_config(source, **nested)
    journal = make_journal(source, tmp_path / "journal")
    report = export(source, journal, tmp_path / "out")
    after, written = read_tensors(tmp_path / "out"), (tmp_path / "out" / "config.json").read_text()
    assert "fp8" not in written
    assert json.loads(written)["text_config"] == {"vocab_size": 256}
    assert json.loads(written)["quantization_config"]["quant_method"] == "compressed-tensors"
    assert not [n for n in after if "scale_inv" in n]
    kept = after["model.layers.0.self_attn.kv_b_proj.weight"]
    codes = read_tensors(source)["model.layers.0.self_attn.kv_b_proj.weight"].float()
    scale = read_tensors(source)["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"]
    wide = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, (codes * wide).bfloat16())
    assert len(report.dropped) == len([n for n in read_tensors(source) if n.endswith("scale_inv")])


def test_config_keeps_every_source_key_and_adds_ours(q3, tmp_path):
    source, journal = q3
    export(source, journal, tmp_path / "out")
    before, after = config_of(source), config_of(tmp_path / "out")
    added = {"quantization_config", "int4_quantization_scheme", "protect_numeric_tokens"}
    assert after.keys() - before.keys() == added
    assert {k: after[k] for k in before} == before
    assert after["int4_quantization_scheme"] == "eampq"
    assert after["protect_numeric_tokens"] is True
    group = after["quantization_config"]["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 64,
        "dynamic": False,
    }


def test_o39_rope_settings_are_copied_unchanged(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 1024}
    source = tiny_q3(tmp_path / "source", rope_parameters=yarn)
    edit_config(source, rope_theta=1e6)
    before, after = config_of(source), config_of(export_of(source, tmp_path))
    assert before["rope_parameters"]["factor"] == 4.0
    assert {k: v for k, v in after.items() if "rope" in k} == {k: v for k, v in before.items() if "rope" in k}


def test_o23_side_files_are_copied_byte_for_byte_and_code_is_never_run(tmp_path):
    source = tiny_q3(tmp_path / "source")
    marker = tmp_path / "marker"
    files = {
        "generation_config.json": b'{"eos_token_id": [1, 2]}\r\n',
        "chat_template.jinja": "{{ '数' }}\n".encode(),
        "tokenizer.model": bytes(range(256)),
        "added_tokens.json": b"{}",
        "modeling_x.py": f"open({str(marker)!r}, 'w')".encode(),
        "assets/note.txt": b"kept",
    }
    (source / "assets").mkdir()
    for name, data in files.items():
        (source / name).write_bytes(data)
    for name in ("pytorch_model.bin", "model.gguf", ".cache.lock"):
        (source / name).write_bytes(b"not copied")
    edit_config(source, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    out = export_of(source, tmp_path)
    assert {name: (out / name).read_bytes() for name in files} == files
    assert not [n for n in content(out) if n.endswith((".bin", ".gguf", ".lock"))]
    assert config_of(out)["auto_map"] == {"AutoModelForCausalLM": "modeling_x.X"}
    assert not marker.exists()


def test_o41_two_exports_have_equal_bytes_whatever_the_order_files_are_listed_in(q3, tmp_path, monkeypatch):
    source, journal = q3
    one = export(source, journal, tmp_path / "a", max_shard_bytes=100_000)
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listed(self), reverse=True)))
    two = export(source, journal, tmp_path / "b", max_shard_bytes=100_000)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert one.files == two.files
    assert {f.name for f in one.files} == content(tmp_path / "a").keys()


def test_no_file_names_the_machine_it_was_made_on(q3, tmp_path):
    source, journal = q3
    export(source, journal, tmp_path / "out")
    assert not [n for n, data in content(tmp_path / "out").items() if str(source.parent).encode() in data]


def test_replaced_plain_tensors_are_written_and_listed(q3, tmp_path):
    norm = torch.full((128,), 0.5, dtype=torch.bfloat16)
    out = export_of(q3[0], tmp_path, extra={"model.norm.weight": norm})
    assert torch.equal(read_tensors(out)["model.norm.weight"], norm)
    assert json.loads((out / "eampq" / "eampq.json").read_text())["replaced"] == ["model.norm.weight"]


def test_the_sidecar_lies_apart_and_is_never_named_in_the_index(q3, tmp_path):
    extra = {
        "eampq/model.layers.0.self_attn.q_proj.shadow_index": torch.tensor([1, 5], dtype=torch.int32),
        "eampq/model.layers.0.self_attn.q_proj.shadow_weight": torch.ones(128, 2, dtype=torch.float16),
    }
    source = q3[0]
    report = export(source, make_journal(source, tmp_path / "journal", extra=extra), tmp_path / "out")
    out = tmp_path / "out"
    record = json.loads((out / "eampq" / "eampq.json").read_text())
    assert not [n for n in index_of(out)["weight_map"] if "shadow" in n]
    assert record["features"] == ["shadows"]
    name = "model.layers.0.self_attn.q_proj.shadow_weight"
    assert record["tensors"][name] == {"file": "eampq-00001-of-00001.safetensors", "dtype": "F16", "shape": [128, 2]}
    assert set(record["modules"]) == {
        n.removesuffix(".weight_packed") for n in read_tensors(out) if n.endswith("packed")
    }
    assert report.sidecar_bytes == 2 * 4 + 256 * 2
    with safe_open(out / "eampq" / "eampq-00001-of-00001.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor(name), torch.ones(128, 2, dtype=torch.float16))


def test_o01_all_zero_blocks_come_back_as_zero_and_are_counted(tmp_path):
    source = tiny_q3(tmp_path / "source")
    rewrite(source, "model.layers.1.mlp.experts.3.down_proj.weight", torch.zeros_like)

    def one_block(tensor):
        tensor[5, 64:128] = 0
        return tensor

    rewrite(source, "model.layers.0.self_attn.q_proj.weight", one_block)
    report = export(source, make_journal(source, tmp_path / "journal"), tmp_path / "out")
    after = read_tensors(tmp_path / "out")
    assert report.zero_blocks == {"model.layers.0.self_attn.q_proj": 1, "model.layers.1.mlp.experts.3.down_proj": 128}
    assert torch.equal(matrix(after, "model.layers.1.mlp.experts.3.down_proj", 64), torch.zeros(128, 64))
    assert torch.equal(matrix(after, "model.layers.0.self_attn.q_proj", 128)[5, 64:], torch.zeros(64))
    assert all(bool((t > 0).all()) for n, t in after.items() if n.endswith("weight_scale"))
