"""What is quantized follows from `model_type` and the config, and is found on disk before any work starts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from support_models import (
    ALL_TYPES,
    MOE_TYPES,
    edit_config,
    glm5_shapes,
    hollow,
    read_tensors,
    rewrite,
    split_experts,
    stack_experts,
    tiny,
    tiny_ds8,
    tiny_glm,
    tiny_q3,
    write_tensors,
)

from glm5_quant.model import families
from glm5_quant.model.build import build_empty
from glm5_quant.model.checkpoint import Checkpoint, open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import (
    FAMILIES,
    Linear,
    expert_linears,
    family_of,
    linears,
    model_config,
    mtp_tensors,
    name_prefix,
    read_linear,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for model_type in ALL_TYPES:
        tiny(model_type, root / model_type)
    return root


def opened(folder: Path) -> tuple[Checkpoint, list[Linear]]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, linears(checkpoint, family_of(checkpoint.config))


# What stays in source precision, by the ends of tensor names. Written by hand, not taken from the table.
KEPT = re.compile(
    r"(norm\.weight|norm\.bias|\.bias|embed_tokens\.weight|lm_head\.weight|mlp\.gate\.(weight|e_score_correction_bias)"
    r"|router\.layer\.weight|block_sparse_moe\.gate\.weight|shared_expert_gate\.weight|kv_b_proj\.weight|layernorm\.weight"
    r"|indexer\.(wq_b|wk|weights_proj)\.weight|mlp\.gate\..*|mask_predictor\..*)$"
)


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_each_tensor_is_either_a_linear_or_named_among_the_kept(models: Path, model_type: str) -> None:
    checkpoint, found = opened(models / model_type)
    sources = {linear.source for linear in found}
    for name in checkpoint.tensors:
        assert (name in sources) != bool(KEPT.search(name)), name
    assert len({linear.name for linear in found}) == len(found)


@pytest.mark.parametrize("model_type", ALL_TYPES)
def test_the_linears_of_a_layer_come_in_the_order_of_the_computation(models: Path, model_type: str) -> None:
    _, found = opened(models / model_type)
    order = [
        "q_a_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "kv_a_proj_with_mqa",
        "q_b_proj",
        "o_proj",
        "gate_up",
        "gate",
        "up",
        "down",
    ]
    keys = [(x.layer, x.expert is not None, x.expert or 0, order.index(x.role)) for x in found]
    assert keys == sorted(keys)


def test_the_names_and_places_of_experts_are_those_of_the_family(models: Path) -> None:
    def last(model_type: str) -> Linear:
        return opened(models / model_type)[1][-1]

    base = "model.layers.1.block_sparse_moe.experts.3"
    assert last("mixtral") == Linear(
        f"{base}.w2", 1, "down", 3, False, 128, 64, f"{base}.w2.weight", (None, 0, 128), f"{base}.down", "mlp.experts"
    )
    stack = "model.layers.1.block_sparse_moe.output_linear.weight"
    assert last("granitemoe") == Linear(
        f"{base}.down_proj",
        1,
        "down",
        3,
        False,
        128,
        64,
        stack,
        (3, 0, 128),
        f"{base}.down",
        "block_sparse_moe.experts",
    )
    base = "model.layers.1.mlp.experts.3"
    assert last("qwen3_moe") == Linear(
        f"{base}.down_proj",
        1,
        "down",
        3,
        False,
        128,
        64,
        f"{base}.down_proj.weight",
        (None, 0, 128),
        f"{base}.down",
        "mlp.experts",
    )


def test_what_servers_fuse_shares_a_group(models: Path) -> None:
    def groups(model_type: str, layer: int) -> set[frozenset[str]]:
        by_group: dict[str, set[str]] = {}
        for linear in opened(models / model_type)[1]:
            if linear.layer == layer and not linear.expert:
                by_group.setdefault(linear.group, set()).add(linear.module.split(".")[-1] + ":" + linear.role)
        return {frozenset(members) for members in by_group.values()}

    assert groups("llama", 0) == {
        frozenset({"q_proj:q_proj", "k_proj:k_proj", "v_proj:v_proj"}),
        frozenset({"o_proj:o_proj"}),
        frozenset({"gate_proj:gate", "up_proj:up"}),
        frozenset({"down_proj:down"}),
    }
    assert groups("glm_moe_dsa", 1) == {
        frozenset({"q_a_proj:q_a_proj", "kv_a_proj_with_mqa:kv_a_proj_with_mqa"}),
        frozenset({"q_b_proj:q_b_proj"}),
        frozenset({"o_proj:o_proj"}),
        frozenset({"gate_proj:gate", "up_proj:up"}),
        frozenset({"down_proj:down"}),
        frozenset({"experts:gate", "experts:up"}),
        frozenset({"experts:down"}),
    }
    assert frozenset({"gate_up_proj:gate_up"}) in groups("glm4", 0)


def test_shared_experts_are_marked_and_dense_first_layers_have_no_experts(models: Path) -> None:
    _, found = opened(models / "glm4_moe")
    assert {x.role for x in found if x.layer == 0 and "mlp" in x.name} == {"gate", "up", "down"}
    assert not any(x.shared or x.expert is not None for x in found if x.layer == 0)
    shared = [x for x in found if x.shared]
    assert [x.name for x in shared] == [f"model.layers.1.mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")]
    shared = [x.name for x in opened(models / "qwen2_moe")[1] if x.shared]
    assert len(shared) == 6 and "model.layers.0.mlp.shared_expert.gate_proj" in shared


def test_an_mla_model_without_a_query_bottleneck_has_a_plain_q_proj(tmp_path: Path) -> None:
    _, found = opened(tiny("deepseek_v2", tmp_path, q_lora_rank=None))
    assert [x.role for x in found if x.layer == 0][:3] == ["q_proj", "kv_a_proj_with_mqa", "o_proj"]


def test_qwen_layers_named_dense_by_step_or_list_hold_no_experts(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    _, found = opened(tiny("qwen3_moe", tmp_path, **sizes))
    assert {x.layer for x in found if x.expert is not None} == {1}


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_fused_stacks_and_separate_experts_are_the_same_linears_bit_for_bit(tmp_path: Path, model_type: str) -> None:
    checkpoint, found = opened(tiny(model_type, tmp_path))
    weights = [read_linear(checkpoint, linear) for linear in found]
    stored_fused = model_type in ("granitemoe", "glm5_ref")
    twin_checkpoint, twins = opened(split_experts(tmp_path) if stored_fused else stack_experts(tmp_path))
    assert [(x.name, x.group, x.n, x.k, x.module) for x in twins] == [
        (x.name, x.group, x.n, x.k, x.module) for x in found
    ]
    assert any(x.slice[0] is not None for x in found) == stored_fused
    assert any(x.slice[0] is not None for x in twins) != stored_fused
    for weight, linear in zip(weights, twins, strict=True):
        assert torch.equal(weight, read_linear(twin_checkpoint, linear)), linear.name


def test_an_fp8_stack_of_experts_is_found_too(tmp_path: Path) -> None:
    tensors = read_tensors(tiny_ds8(tmp_path))
    base = "model.layers.1.mlp.experts"
    expected = {}
    for part in ("gate_proj", "up_proj", "down_proj"):
        for ending in ("weight", "weight_scale_inv"):
            expected[part, ending] = [tensors.pop(f"{base}.{e}.{part}.{ending}") for e in range(4)]
    down = torch.stack([t.view(torch.uint8) for t in expected["down_proj", "weight"]]).view(torch.float8_e4m3fn)
    pairs = zip(expected["gate_proj", "weight"], expected["up_proj", "weight"], strict=True)
    gate_up = torch.stack([torch.cat([g.view(torch.uint8), u.view(torch.uint8)]) for g, u in pairs])
    tensors |= {
        f"{base}.gate_up_proj": gate_up.view(torch.float8_e4m3fn),
        f"{base}.gate_up_proj_scale_inv": torch.full((4, 3, 2), 0.5),
        f"{base}.down_proj": down,
        f"{base}.down_proj_scale_inv": torch.stack(expected["down_proj", "weight_scale_inv"]),
    }
    write_tensors(tmp_path, tensors)
    checkpoint, found = opened(tmp_path)
    up = next(x for x in found if x.expert == 2 and x.role == "up")
    assert up.slice == (2, 192, 384)
    assert torch.equal(read_linear(checkpoint, up, torch.float32), expected["up_proj", "weight"][2].float() * 0.5)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_renamed_prefixes_are_kept_in_names(tmp_path: Path, prefix: str) -> None:
    tensors = read_tensors(tiny_q3(tmp_path))
    write_tensors(tmp_path, {name.replace("model.", prefix, 1): t for name, t in tensors.items()}, shards=2)
    checkpoint, found = opened(tmp_path)
    assert name_prefix(checkpoint) == prefix
    assert len(found) == 32 and all(x.name.startswith(f"{prefix}layers.") for x in found)
    assert all(x.module.startswith(("self_attn.", "mlp.")) for x in found)


def test_layers_stored_under_two_prefixes_are_refused(tmp_path: Path) -> None:
    tensors = read_tensors(tiny_q3(tmp_path))
    twice = {name.replace("model.", "model.language_model.", 1): tensor.clone() for name, tensor in tensors.items()}
    write_tensors(tmp_path, tensors | twice)
    with pytest.raises(UserError, match="stored under two names"):
        opened(tmp_path)


def test_a_checkpoint_without_decoder_layers_is_refused(tmp_path: Path) -> None:
    tiny_q3(tmp_path)
    write_tensors(tmp_path, {"encoder.weight": torch.ones(2)})
    with pytest.raises(UserError, match=r"no decoder layers found; found encoder.weight"):
        opened(tmp_path)


@pytest.mark.parametrize("found", ["gpt2", None, 3, ["llama"]])
def test_an_unknown_model_type_lists_the_known_ones(found: object) -> None:
    with pytest.raises(
        UserError, match=r"config.json: model_type: unknown model type.*glm_moe_dsa, glm4_moe"
    ) as caught:
        family_of({"model_type": found}, file="config.json")
    assert all(name in str(caught.value) for name in FAMILIES)


def test_a_config_value_that_transformers_refuses_is_a_message(tmp_path: Path) -> None:
    edit_config(tiny_q3(tmp_path), hidden_size="wide")
    with pytest.raises(UserError, match=r"config.json: transformers refuses this config.*hidden_size"):
        opened(tmp_path)


def test_defaults_left_out_of_the_config_are_filled_in() -> None:
    config = model_config({"model_type": "glm_moe_dsa", "auto_map": {"AutoConfig": "x.Y"}, "quantization_config": {}})
    assert (config.hidden_size, config.num_hidden_layers, config.first_k_dense_replace) == (6144, 78, 3)
    assert not hasattr(config, "quantization_config")


def test_no_expert_found_is_an_error_that_counts_them(tmp_path: Path) -> None:
    tensors = read_tensors(tiny_q3(tmp_path))
    write_tensors(tmp_path, {name.replace(".experts.", ".specialists."): tensor for name, tensor in tensors.items()})
    with pytest.raises(
        UserError, match=r"model.layers.0.mlp.experts.0.gate_proj.weight: 0 of 24 expert weights matched"
    ):
        opened(tmp_path)


@pytest.mark.parametrize(("key", "count"), [("num_hidden_layers", 10**9), ("num_experts", 10**6)])
def test_counts_that_the_tensors_cannot_make_are_refused_at_once(tmp_path: Path, key: str, count: int) -> None:
    checkpoint = open_checkpoint(edit_config(tiny_q3(tmp_path), **{key: count}))
    family = family_of(checkpoint.config)
    message = rf"config.json: {key}: more than the weights .*found {count:,}; expected \d+ at most"
    for use in (
        lambda: linears(checkpoint, family),
        lambda: mtp_tensors(checkpoint, family),
        lambda: build_empty(checkpoint, torch.bfloat16),
    ):
        with pytest.raises(UserError, match=message):
            use()


def test_stacked_experts_may_be_more_than_the_tensors(tmp_path: Path) -> None:
    folder = stack_experts(tiny("qwen3_moe", tmp_path, num_experts=64, num_hidden_layers=1))
    checkpoint, found = opened(folder)
    assert len(checkpoint.tensors) < 64 < len(found)


def test_a_config_of_far_more_layers_than_there_are_stops_counting_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "_ENOUGH_MISSING", 40)
    checkpoint = open_checkpoint(edit_config(tiny_q3(tmp_path), num_hidden_layers=40))
    with pytest.raises(UserError, match=r"layers.2.self_attn.q_proj.weight: (\d+) of \d+ weights") as caught:
        linears(checkpoint, family_of(checkpoint.config))
    assert int(caught.value.problem.split()[0]) < 100


def test_one_missing_weight_is_named_and_counted(tmp_path: Path) -> None:
    rewrite(tiny_q3(tmp_path), "model.layers.1.mlp.experts.2.up_proj.weight", lambda old: None)
    with pytest.raises(
        UserError, match=r"layers.1.mlp.experts.2.up_proj.weight: 1 of 32 weights to quantize are not in"
    ):
        opened(tmp_path)
    rewrite(tmp_path, "model.layers.0.self_attn.o_proj.weight", lambda old: None)
    with pytest.raises(UserError, match=r"layers.0.self_attn.o_proj.weight: 2 of 32"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (128, 128)),
        ("model.layers.1.mlp.experts.3.down_proj.weight", (128, 128)),
        ("model.layers.1.mlp.experts.3.gate_proj.weight", (64,)),
    ],
)
def test_a_weight_of_another_shape_than_the_configs_is_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    rewrite(tiny_q3(tmp_path), name, lambda old: torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(UserError, match=f"{name}: a weight does not fit the config") as caught:
        opened(tmp_path)
    assert str(list(shape)) in str(caught.value)


def test_a_stack_of_too_few_experts_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(stack_experts(tiny_q3(tmp_path)), name, lambda old: old[:3])
    with pytest.raises(UserError, match=rf"{name}: a weight does not fit.*\[3, 128, 64\].*\[4, 128, 64\]"):
        opened(tmp_path)


def test_a_weight_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(tiny_q3(tmp_path), name, lambda old: torch.zeros(128, 128, dtype=torch.int8))
    with pytest.raises(UserError, match=f"{name}: a weight does not fit the config; found I8"):
        opened(tmp_path)


def test_a_model_that_is_int4_already_is_refused(tmp_path: Path) -> None:
    tiny_q3(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    assert len(opened(tmp_path)[1]) == 32  # settings without packed tensors: weights are what they are
    name = "model.layers.0.self_attn.q_proj"
    tensors = read_tensors(tmp_path)
    del tensors[f"{name}.weight"]
    write_tensors(tmp_path, tensors | {f"{name}.qweight": torch.zeros(16, 128, dtype=torch.int32)})
    with pytest.raises(UserError, match=r"quantization_config: this model is quantized already; found gptq"):
        opened(tmp_path)


@pytest.mark.parametrize("part", ["weight_scale", "weight_zero_point", "weight_shape", "weight_packed"])
def test_what_is_left_of_a_quantized_matrix_beside_a_plain_one_is_refused(tmp_path: Path, part: str) -> None:
    folder = tiny_q3(tmp_path)
    name = f"model.layers.0.self_attn.q_proj.{part}"
    write_tensors(folder, read_tensors(folder) | {name: torch.ones(1)})
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match=rf"{name}: a part of a quantized matrix beside a plain one; found .* of BF16"):
        linears(checkpoint, family_of(checkpoint.config))


def test_the_mtp_block_is_listed_and_never_quantized(tmp_path: Path) -> None:
    checkpoint, found = opened(tiny_glm(tmp_path))
    extra = mtp_tensors(checkpoint, family_of(checkpoint.config))
    assert extra == [name for name in checkpoint.tensors if name.startswith("model.layers.2.")]
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight"} <= set(extra)
    assert not {linear.source for linear in found} & set(extra)


def test_an_mtp_block_under_its_own_name_is_listed(tmp_path: Path) -> None:
    tensors = read_tensors(tiny_q3(tmp_path))
    write_tensors(tmp_path, tensors | {"mtp.layers.0.fc.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(2)})
    checkpoint = open_checkpoint(tmp_path)
    assert mtp_tensors(checkpoint, FAMILIES["qwen3_moe"]) == ["mtp.layers.0.fc.weight", "mtp.norm.weight"]


def test_the_experts_of_one_layer_can_be_asked_for_alone(models: Path) -> None:
    checkpoint, found = opened(models / "glm4_moe")
    family = family_of(checkpoint.config)
    assert expert_linears(checkpoint, family, 0) == []
    assert expert_linears(checkpoint, family, 1) == [x for x in found if x.expert is not None]


@pytest.mark.slow
def test_every_linear_of_glm5_itself_is_found_from_headers_alone(tmp_path: Path) -> None:
    shapes = glm5_shapes()
    assert len(shapes) == 59_079 and round(sum(map(math.prod, shapes.values())) / 1e9, 1) == 743.9
    shapes |= {
        name.replace("layers.77.", "layers.78."): shape for name, shape in shapes.items() if "layers.77." in name
    }
    shapes |= {"model.layers.78.eh_proj.weight": (6144, 12_288), "model.layers.78.enorm.weight": (6144,)}
    try:
        hollow(tmp_path, shapes, {"model_type": "glm_moe_dsa", "num_nextn_predict_layers": 1}, shards=282)
    except OSError as error:
        pytest.skip(f"this file system has no sparse files of this size: {error}")
    checkpoint, found = opened(tmp_path)
    assert len(found) == 78 * 4 + 3 * 3 + 75 * 3 * (1 + 256)
    assert [x.expert for x in found].count(255) == 75 * 3
    assert sum(x.n * x.k for x in found) == 740_012_851_200  # 78 x 150,339,584 + 9 x 75,497,472 + 57,825 x 12,582,912
    assert len(mtp_tensors(checkpoint, FAMILIES["glm_moe_dsa"])) == 787 + 2


def test_each_family_of_the_design_has_a_row() -> None:
    wanted = "glm_moe_dsa glm4_moe glm4_moe_lite deepseek_v3 deepseek_v2 qwen3_moe qwen2_moe mixtral olmoe granitemoe"
    assert {*wanted.split(), "llama", "qwen3", "glm4", "glm5_ref"} <= FAMILIES.keys()
    assert set(ALL_TYPES) == FAMILIES.keys()


def test_a_dtype_that_nothing_here_reads_is_refused_before_work(tmp_path: Path) -> None:
    header = {"extra": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    raw = json.dumps(header).encode()
    tiny_q3(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra"] = "extra.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "extra.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0")
    with pytest.raises(UserError, match=r"extra: values of this dtype cannot be read; found F4"):
        opened(tmp_path)
