"""Verify: reads an export back without trusting its writer, and says who can load it."""

from __future__ import annotations

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_journal import config_of, export_of, sealed
from support_models import edit_config, read_tensors, rewrite, tiny, tiny_glm, tiny_q3

from glm5_quant.model import verify
from glm5_quant.model.errors import UserError
from glm5_quant.model.export_plan import natural_key, tensor_parallel_sizes

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def q3(tmp_path_factory):
    """(source, its export) of TINY-Q3."""
    root = tmp_path_factory.mktemp("q3")
    source = tiny_q3(root / "source")
    return source, export_of(source, root)


@pytest.fixture
def copy(q3, tmp_path):
    """An export to damage."""
    shutil.copytree(q3[1], tmp_path / "copy")
    return tmp_path / "copy"


def patch(folder, name, change):
    """Change one tensor of an export in place (None: delete it), index and all."""
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    value = change(tensors.pop(name).clone())
    if value is None:
        del index["weight_map"][name]
    else:
        tensors[name] = value
    save_file(tensors, file, {"format": "pt"})
    index["metadata"]["total_size"] = sum(t.nbytes for t in read_tensors(folder).values())
    index_file.write_text(json.dumps(index))
    if (folder / "eampq").exists():
        sealed(folder)


def put(index, value):
    def change(tensor):
        tensor[index] = value
        return tensor

    return change


def test_a_fresh_export_has_no_fault(q3):
    source, out = q3
    report = verify(out, source)
    assert report.ok
    assert report.problems == report.warnings == ()
    assert report.packed_linears == 32
    assert report.unpacked_matrices == 4  # embedding, head, two routers
    assert report.compared_tensors == len(read_tensors(source)) - 32
    assert report.tensor_bytes == sum(t.nbytes for t in read_tensors(out).values())
    assert (report.symmetric, report.group_size) == (False, 64)
    assert 4.25 < report.bits_per_weight < 4.4


def test_sampled_errors_are_what_round_to_nearest_costs(q3):
    report = verify(q3[1], q3[0])
    assert len(report.samples) == 32
    assert all(0.05 < sample.error < 0.12 and not sample.outlier for sample in report.samples)
    few = verify(q3[1], q3[0], samples=5).samples
    assert len(few) == len({sample.module for sample in few}) == 5
    assert set(few) <= set(report.samples)


def test_without_a_source_nothing_is_sampled(q3):
    report = verify(q3[1])
    assert report.ok
    assert report.samples == ()
    assert report.compared_tensors == 0


@pytest.mark.parametrize(("factor", "warned"), [(1.5, False), (1.7, False), (1.9, True), (4.0, True)])
def test_a_matrix_far_off_is_a_warning_from_0_8_on(copy, q3, factor, warned):
    patch(copy, f"{Q_PROJ}.weight_scale", lambda t: t * factor)
    report = verify(copy, q3[0])
    assert report.ok
    assert [s.module for s in report.samples if s.outlier] == [Q_PROJ] * warned
    assert [
        w.startswith(f"{Q_PROJ}: relative error {factor - 1:.1f}") and "far above" in w for w in report.warnings
    ] == [True] * warned


def test_another_source_is_one_problem_that_names_both(q3, tmp_path):
    other = rewrite(tiny_q3(tmp_path / "other"), "model.norm.weight", lambda t: t + 1)
    edit_config(other, rope_theta=123.0)
    report = verify(q3[1], other)
    (problem,) = report.problems
    assert problem.startswith(f"{q3[1]}: this export was made from another model; found config.json, model-00002")
    assert str(other) in problem
    assert "expected the qwen3_moe model" in problem
    assert report.samples == ()
    assert report.compared_tensors == 0
    assert {v.runtime for v in report.runtimes if v.loads} == {"glm5-quant", "compressed-tensors", "vLLM"}


def test_a_moved_source_is_the_same_one(q3, tmp_path):
    shutil.copytree(q3[0], tmp_path / "moved")
    assert verify(q3[1], tmp_path / "moved").ok


def test_without_its_sidecar_an_export_is_compared_with_any_source(copy, tmp_path):
    shutil.rmtree(copy / "eampq")
    other = rewrite(tiny_q3(tmp_path / "other"), "model.norm.weight", lambda t: t + 1)
    assert "model.norm.weight: differs from the source" in verify(copy, other).problems


def test_problems_of_one_kind_are_counted_after_the_fifth(copy):
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    names = [name for name in index["weight_map"] if name.endswith(".weight_scale")]
    for name in names[:9]:
        patch(copy, name, put((0, 0), 0.0))
    patch(copy, names[9], put((0, 0), math.nan))
    problems = verify(copy).problems
    assert len(problems) == 7
    assert problems[5] == "and 4 more of this kind: not above zero at"
    assert "a weight is not finite" in problems[6]


def test_what_our_runtime_cannot_build_is_a_problem(copy, q3):
    shutil.copytree(copy, copy.parent / "wide")
    edit_config(copy.parent / "wide", vocab_size=9)
    assert any("a tensor does not fit the model that the config" in p for p in verify(copy.parent / "wide").problems)
    patch(copy, "model.norm.weight", lambda tensor: None)
    report = verify(copy)
    assert [p.split(": ", 1)[1] for p in report.problems] == ["model.norm.weight: 1 tensors are not in the checkpoint"]
    assert not any(verdict.loads for verdict in report.runtimes)


def test_a_zero_matrix_that_comes_back_zero_is_no_error(tmp_path):
    source = tiny_q3(tmp_path / "source")
    rewrite(source, f"{Q_PROJ}.weight", torch.zeros_like)
    report = verify(export_of(source, tmp_path), source)
    assert report.ok
    assert {s.module: s.error for s in report.samples}[Q_PROJ] == 0


@pytest.mark.parametrize(("change", "message"), [
    (put((2, 1), math.nan), r"weight_scale: a weight is not finite; found nan at \[2, 1\]"),
    (put((2, 1), math.inf), r"weight_scale: a weight is not finite; found inf"),
    (put((2, 1), 0.0), r"q_proj.weight_scale: not above zero at \[2, 1\]"),
    (put((2, 1), -0.5), r"q_proj.weight_scale: not above zero at \[2, 1\]"),
    (lambda t: t[:, :1].contiguous(), r"weight_scale is BF16 \[128, 1\], expected I?.*\[128, 2\]"),
    (lambda t: None, "weight_scale is missing"),
])  # fmt: skip
def test_bad_scales_are_named(copy, change, message):
    patch(copy, f"{Q_PROJ}.weight_scale", change)
    report = verify(copy)
    assert not report.ok
    assert any(re.search(message, problem) for problem in report.problems), report.problems


@pytest.mark.parametrize(("part", "change", "message"), [
    ("weight_packed", lambda t: t[:, :-1].contiguous(), "weight_packed is I32"),
    ("weight_zero_point", lambda t: None, "weight_zero_point is missing"),
    ("weight_shape", lambda t: None, "no stored shape"),
    ("weight_shape", lambda t: t * 0, "not a matrix"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_named(copy, part, change, message):
    patch(copy, f"{Q_PROJ}.{part}", change)
    report = verify(copy)
    assert any(message in problem and Q_PROJ in problem for problem in report.problems), report.problems


def test_a_missing_tensor_is_named_with_and_without_the_source(copy, q3):
    name = "model.layers.1.mlp.experts.2.up_proj"
    for part in ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"):
        patch(copy, f"{name}.{part}", lambda tensor: None)
    assert any(f"{name}.weight" in problem for problem in verify(copy).problems)
    patch(copy, "model.norm.weight", lambda tensor: None)
    assert "model.norm.weight: in the source, but not in the export" in verify(copy, q3[0]).problems


def test_an_unpacked_tensor_that_changed_is_named(copy, q3):
    patch(copy, "model.norm.weight", lambda tensor: tensor * 1.01)
    assert verify(copy).ok
    assert "model.norm.weight: differs from the source" in verify(copy, q3[0]).problems


def test_a_tensor_of_another_shape_or_of_nowhere_is_named(copy, q3):
    patch(copy, "model.norm.weight", lambda tensor: tensor[:64].clone())
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    file = copy / index["weight_map"]["model.norm.weight"]
    save_file(load_file(file) | {"model.stray": torch.ones(1)}, file, {"format": "pt"})
    index["weight_map"]["model.stray"] = file.name
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    problems = verify(copy, q3[0]).problems
    assert "model.norm.weight: shape [64], the source has [128]" in problems
    assert "model.stray: not in the source" in problems
    assert any("total_size is" in problem for problem in problems)


def test_o09_the_ignore_list_is_held_against_the_tensors_both_ways(copy):
    config = config_of(copy)
    settings = config["quantization_config"]
    settings["ignore"].remove("model.layers.0.mlp.gate")
    settings["ignore"].append(Q_PROJ)
    edit_config(copy, quantization_config=settings)
    problems = verify(copy).problems
    assert "model.layers.0.mlp.gate: stored unpacked, but not in the ignore list" in problems
    assert f"{Q_PROJ}: in the ignore list, but not stored as an unpacked matrix" in problems


def test_o24_config_and_tensors_are_held_against_each_other_both_ways(copy, q3, tmp_path):
    settings = config_of(copy)["quantization_config"]
    edit_config(copy, quantization_config=...)
    assert any("config and weights disagree" in problem for problem in verify(copy).problems)
    shutil.copytree(q3[0], tmp_path / "dense")
    assert any("not quantized" in problem for problem in verify(tmp_path / "dense").problems)
    edit_config(tmp_path / "dense", quantization_config=settings)
    report = verify(tmp_path / "dense")
    assert any("config and weights disagree" in problem for problem in report.problems)
    assert report.packed_linears == 0
    assert report.runtimes == ()


def test_a_scheme_nobody_here_computes_is_named(copy):
    settings = config_of(copy)["quantization_config"]
    settings["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    edit_config(copy, quantization_config=settings)
    assert any("config_groups.group_0.weights.num_bits" in problem for problem in verify(copy).problems)


def test_our_own_config_keys_are_checked(copy):
    edit_config(copy, int4_quantization_scheme=..., protect_numeric_tokens="yes")
    edit_config(copy, text_config={"quantization_config": {"quant_method": "fp8"}})
    problems = " ".join(verify(copy).problems)
    assert "int4_quantization_scheme is None" in problems
    assert "protect_numeric_tokens is 'yes'" in problems
    assert "text_config holds a second quantization_config" in problems


def test_o20_stray_weight_files_and_leftovers_are_named(copy):
    (copy / "pytorch_model.bin").write_bytes(b"")
    (copy / ".model-00001-of-00002.safetensors.part").write_bytes(b"")
    (copy / ".glm5-quant-export.part").mkdir()
    problems = verify(copy).problems
    assert "pytorch_model.bin: a weight file that the index does not name" in problems
    assert ".model-00001-of-00002.safetensors.part: left over from a killed export" in problems
    assert ".glm5-quant-export.part: left over from a killed export" in problems


def test_o17_a_shard_without_metadata_is_named(copy):
    file = next(copy.glob("*.safetensors"))
    save_file(load_file(file), file)
    assert any('expected {"format": "pt"}' in problem for problem in verify(copy).problems)


def test_a_missing_index_is_named(copy):
    (copy / "model.safetensors.index.json").unlink()
    next(copy.glob("*.safetensors")).rename(copy / "model.safetensors")
    assert "model.safetensors.index.json is missing" in verify(copy).problems


def test_o18_a_cut_shard_is_refused_at_once(copy):
    file = next(copy.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="the file is cut"):
        verify(copy)


@pytest.mark.parametrize(("edit", "message"), [
    ({"version": 99}, "sidecar of a newer version"),
    ({"features": ["time_travel"]}, "needs what this version cannot compute; found time_travel"),
    ({"tensors": {"a": {"file": "../a", "dtype": "F16", "shape": [1]}}}, "leaves the sidecar folder"),
    ({"tensors": {"a": {"file": "a.safetensors", "dtype": "F16", "shape": [1]}}}, "file not found"),
    ({"format": "other"}, "not a valid record"),
])  # fmt: skip
def test_a_faulty_sidecar_is_named(copy, edit, message):
    file = copy / "eampq" / "eampq.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | edit))
    assert any(message in problem for problem in verify(copy).problems)


def test_sidecar_tensors_that_are_not_as_listed_are_named(q3, tmp_path):
    extra = {
        "eampq/model.layers.0.compensation": torch.ones(128),
        "eampq/model.layers.0.compensation_gain": torch.ones(()),
    }
    out = export_of(q3[0], tmp_path, extra=extra)
    report = verify(out)
    assert report.ok
    assert report.features == ("compensation",)
    assert "without compensation" in {v.runtime: v for v in report.runtimes}["vLLM"].reason
    save_file({"model.layers.0.compensation": torch.ones(64)}, out / "eampq" / "eampq-00001-of-00001.safetensors")
    assert any("disagree" in problem for problem in verify(out).problems)


def test_o13_mtp_is_whole_or_warned_about(tmp_path):
    source = tiny_glm(tmp_path / "source")
    out = export_of(source, tmp_path)
    assert verify(out, source).ok
    assert verify(out).warnings == ()
    bare = edit_config(tiny("glm4_moe", tmp_path / "bare"), num_nextn_predict_layers=1)
    assert "declares 1 MTP layer(s)" in verify(export_of(bare, tmp_path / "b")).warnings[0]


def verdicts(folder):
    return {verdict.runtime: verdict for verdict in verify(folder).runtimes}


def test_asymmetric_experts_load_in_vllm_only_and_the_reason_is_given(q3):
    found = verdicts(q3[1])
    assert {name: v.loads for name, v in found.items()} == {
        "glm5-quant": True,
        "compressed-tensors": True,
        "transformers": False,
        "vLLM": True,
        "SGLang": False,
    }
    assert "zero-points of routed experts" in found["transformers"].reason
    assert {name: v.basis for name, v in found.items()}["vLLM"] == "rule"


def test_symmetric_experts_load_everywhere(q3, tmp_path):
    found = verdicts(export_of(q3[0], tmp_path, symmetric=True))
    assert all(v.loads and not v.reason for v in found.values())
    assert found["transformers"].how == "AutoModelForCausalLM.from_pretrained(folder)"


def test_o05_ragged_inputs_load_here_only_and_the_matrices_are_listed(tmp_path):
    source = tiny("qwen3_moe", tmp_path / "source", moe_intermediate_size=96)
    found = verdicts(export_of(source, tmp_path, symmetric=True))
    assert found["glm5-quant"].loads
    for runtime in ("compressed-tensors", "transformers", "vLLM", "SGLang"):
        assert not found[runtime].loads
        assert "no multiple of 64 in model.layers.0.mlp.experts.0.down_proj" in found[runtime].reason
        assert "and 5 more" in found[runtime].reason


def test_verdicts_on_other_models(tmp_path):
    granite = verdicts(export_of(tiny("granitemoe", tmp_path / "granite"), tmp_path / "g", symmetric=True))
    assert not granite["transformers"].loads
    assert not granite["vLLM"].loads
    dense = verdicts(export_of(tiny("llama", tmp_path / "llama"), tmp_path / "l"))
    assert dense["transformers"].loads
    assert "dequantize=True" in dense["transformers"].how
    wide = verdicts(export_of(tiny("llama", tmp_path / "wide", dtype=torch.float32), tmp_path / "w"))
    assert "scales are F32" in wide["vLLM"].reason
    assert "SGLang's INT4 kernels" in wide["SGLang"].reason


def test_a_damaged_folder_loads_nowhere(copy):
    patch(copy, f"{Q_PROJ}.weight_scale", put((0, 0), 0.0))
    assert not any(v.loads for v in verify(copy).runtimes)


def linear(role, n, k):
    return SimpleNamespace(role=role, n=n, k=k)


def test_o06_tensor_parallel_sizes_that_cut_no_block_are_stated():
    experts = [linear("gate", 640, 2048), linear("up", 640, 2048), linear("down", 2048, 640)]
    sizes = tensor_parallel_sizes(experts, symmetric=True)
    assert sizes["down"] == [2, 5, 10]
    assert sizes["all"] == [2, 5, 10]
    assert not {4, 8} & set(sizes["down"])
    # 640 rows in 16 parts are 40 rows each: 5 words of 8 zero-points; 3 parts are no whole rows.
    assert tensor_parallel_sizes(experts, symmetric=False)["gate"] == [2, 4, 5, 8, 10, 16]
    assert tensor_parallel_sizes([linear("down", 64, 96)], symmetric=True) == {"down": [], "all": []}
    assert tensor_parallel_sizes([], symmetric=True) == {"all": []}


def test_layers_sort_by_number():
    names = ["model.layers.10.a", "model.layers.2.a", "lm_head", "model.layers.2.b"]
    assert sorted(names, key=natural_key) == ["lm_head", "model.layers.2.a", "model.layers.2.b", "model.layers.10.a"]
