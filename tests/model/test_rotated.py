"""A residual stream rotated inside the weights: the same function, family by family."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import (
    ALL_TYPES,
    glm5_shapes,
    hollow,
    read_tensors,
    rewrite,
    stack_experts,
    tiny,
    tiny_ds8,
    tiny_glm,
    write_tensors,
)

from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import FAMILIES, MLA, family_of
from glm5_quant.model.layers import LayerRunner
from glm5_quant.model.rotated import Fold, Rows, as_rotated
from glm5_quant.quant.rotation import butterfly, fold_gain, rotate, rotate_rows

UNTOUCHED = (
    "q_a_layernorm.weight",
    "kv_a_layernorm.weight",
    "q_b_proj.weight",
    "wq_b.weight",
    "k_norm.weight",
    "k_norm.bias",
    "e_score_correction_bias",
)
UNROTATABLE = [name for name, row in FAMILIES.items() if row.unrotatable]
ROTATABLE = [name for name in ALL_TYPES if name not in UNROTATABLE]


def tokens(length: int = 40) -> torch.Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(3))


def logits(checkpoint: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, hidden states of the last layer) in float32, through the layer runner."""
    runner = LayerRunner(checkpoint, family_of(checkpoint.config), torch.float32)
    hidden, kwargs, side = runner.embed(ids), runner.kwargs_for(ids), None
    for layer in range(runner.layer_count):
        hidden, side = runner.run_layer(runner.load_layer(layer), hidden, kwargs[layer], side)
    return runner.logits(hidden), hidden


def tiny_of(model_type: str, folder: Any, **overrides: Any) -> Any:
    mla = FAMILIES[model_type].attention is MLA
    size = {"v_head_dim": 64} if mla else {"head_dim": 64}
    if model_type == "olmoe":  # its query norm spans all heads, and must be as wide as the stream
        size["num_attention_heads"] = 2
    return tiny(model_type, folder, scale=0.15, dtype=torch.float32, **(size | overrides))


@pytest.mark.parametrize("model_type", ROTATABLE)
def test_rotated_logits_equal_the_sources_and_the_stream_is_the_rotated_one(model_type: str, tmp_path: Any) -> None:
    source = open_checkpoint(tiny_of(model_type, tmp_path / "m"))
    expected, stream = logits(source, tokens())
    got, turned = logits(as_rotated(source, "folded"), tokens())
    assert float(expected.std()) > 0.05
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4 * float(expected.abs().max()))
    torch.testing.assert_close(turned, rotate(stream), rtol=1e-3, atol=2e-4 * float(stream.abs().max()))
    assert float((turned - stream).abs().max()) > 0.1 * float(stream.abs().max())


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {"hidden_size": 160}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 32}),
        ("deepseek_v3", {"q_lora_rank": None, "v_head_dim": 32}),
        ("glm_moe_dsa", {"attention_bias": True}),
    ],
)
def test_ragged_streams_biases_tied_heads_and_other_head_sizes_keep_the_function(
    model_type: str, overrides: dict[str, Any], tmp_path: Any
) -> None:
    source = open_checkpoint(tiny_of(model_type, tmp_path / "m", **overrides))
    view = as_rotated(source, "folded")
    expected, got = logits(source, tokens())[0], logits(view, tokens())[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-4 * float(expected.abs().max()))
    assert view.config["tie_word_embeddings"] is False
    assert view.info("lm_head.weight").shape == (256, source.config["hidden_size"])


def test_every_matrix_is_folded_as_written_down_and_down_projections_keep_their_inputs(tmp_path: Any) -> None:
    source = open_checkpoint(tiny_of("qwen2_moe", tmp_path / "m"))
    view = as_rotated(source, "folded")
    block = "model.layers.0.mlp."
    gain = source.read("model.layers.0.post_attention_layernorm.weight")
    for name in ("gate", "shared_expert_gate", "experts.3.gate_proj", "experts.3.up_proj", "shared_expert.up_proj"):
        expected = rotate(fold_gain(source.read(f"{block}{name}.weight"), gain))
        torch.testing.assert_close(view.read(f"{block}{name}.weight"), expected, rtol=1e-5, atol=1e-6)
    down = f"{block}experts.3.down_proj.weight"
    torch.testing.assert_close(view.read(down), rotate_rows(source.read(down)), rtol=1e-5, atol=1e-6)
    value, output = (f"model.layers.0.self_attn.{x}.weight" for x in ("v_proj", "o_proj"))
    both = view.read(output)[:, :64] @ view.read(value)[:64]
    gain = source.read("model.layers.0.input_layernorm.weight")
    plain = source.read(output)[:, :64] @ fold_gain(source.read(value)[:64], gain)
    torch.testing.assert_close(both, rotate_rows(rotate(plain)), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(view.read(output), rotate_rows(source.read(output)), atol=1e-3)
    assert bool((view.read("model.layers.0.input_layernorm.weight") == 1).all())
    assert view.config_file == source.config_file
    assert view.shards == source.shards


@pytest.mark.parametrize("kind", ["separate", "stacked"])
def test_slices_rows_and_stacks_are_parts_of_the_whole_bit_for_bit(kind: str, tmp_path: Any) -> None:
    folder = tiny_of("qwen3_moe", tmp_path / "m")
    plain = as_rotated(open_checkpoint(folder), "folded")
    parts = [plain.read(f"model.layers.0.mlp.experts.1.{x}_proj.weight") for x in ("gate", "up", "down")]
    if kind == "stacked":
        stack_experts(folder)
        view = as_rotated(open_checkpoint(folder), "folded")
        whole, down = (view.read(f"model.layers.0.mlp.experts.{x}_proj")[1] for x in ("gate_up", "down"))
        assert torch.equal(whole, torch.cat(parts[:2]))
        assert torch.equal(down, parts[2])
        assert torch.equal(view.read_slice("model.layers.0.mlp.experts.down_proj", 1, 5, 70), parts[2][5:70])
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"):
        assert torch.equal(plain.read_slice(name, None, 7, 101), plain.read(name)[7:101])
    rows = [3, 4, 9, 250]
    assert torch.equal(
        plain.read_rows("model.embed_tokens.weight", rows), plain.read("model.embed_tokens.weight")[rows]
    )
    with pytest.raises(ValueError, match="not independent"):
        plain.read_rows("model.layers.0.self_attn.o_proj.weight", rows)


def test_long_matrices_are_folded_a_few_rows_at_a_time_with_the_same_bits(tmp_path: Any, monkeypatch: Any) -> None:
    view = as_rotated(open_checkpoint(tiny_of("glm4_moe_lite", tmp_path / "m", hidden_size=160)), "folded")
    names = [f"model.layers.1.{x}.weight" for x in ("self_attn.kv_b_proj", "self_attn.o_proj", "mlp.gate")]
    whole = [view.read(name) for name in names]
    monkeypatch.setattr("glm5_quant.model.rotated.CHUNK_WEIGHTS", 1)
    assert all(torch.equal(view.read(name), one) for name, one in zip(names, whole, strict=True))


def test_fp8_weights_are_widened_then_folded(tmp_path: Any) -> None:
    source = open_checkpoint(tiny_ds8(tmp_path / "m"))
    view, name = as_rotated(source, "folded"), "model.layers.1.mlp.experts.2.up_proj.weight"
    gain = source.read("model.layers.1.post_attention_layernorm.weight")
    expected = rotate(fold_gain(source.read(name, torch.float32), gain))
    torch.testing.assert_close(view.read(name, torch.float32), expected, rtol=1e-5, atol=1e-6)
    assert view.read(name).dtype == torch.bfloat16


def test_stored_values_are_rounded_once_and_wider_reads_are_not(tmp_path: Any) -> None:
    view = as_rotated(open_checkpoint(tiny("llama", tmp_path / "m")), "folded")
    wide, stored = (view.read("lm_head.weight", dtype) for dtype in (torch.float32, None))
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored, wide.bfloat16())
    assert not torch.equal(stored.float(), wide)
    with pytest.raises(ValueError, match="never narrowed to FP16"):
        view.read("lm_head.weight", torch.float16)


def test_a_gain_too_large_for_the_dtype_is_named(tmp_path: Any) -> None:
    folder = tiny("llama", tmp_path / "m", dtype=torch.float16, scale=1.0)
    rewrite(folder, "model.norm.weight", lambda norm: norm * 30000)
    with pytest.raises(UserError, match=r"lm_head.weight.*too large for its dtype"):
        as_rotated(open_checkpoint(folder), "folded").read("lm_head.weight")


@pytest.mark.parametrize("model_type", UNROTATABLE)
def test_families_whose_stream_cannot_be_rotated_are_refused_with_the_reason(model_type: str, tmp_path: Any) -> None:
    source = open_checkpoint(tiny(model_type, tmp_path / "m"))
    reason = {"glm4": "norms with gains lie between", "glm5_ref": "LayerNorm"}[model_type]
    with pytest.raises(UserError, match=f"--rotation folded.*{reason}.*--rotation none or full"):
        as_rotated(source, "folded")
    assert as_rotated(source, "full") is source


def test_mtp_layers_are_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"model\.layers\.2\.\S*: .*beside multi-token-prediction layers.*such tensors"):
        as_rotated(open_checkpoint(tiny_glm(tmp_path / "m")), "folded")


def test_a_tensor_of_unknown_use_is_refused_by_name(tmp_path: Any) -> None:
    folder = tiny("llama", tmp_path / "m")
    write_tensors(folder, read_tensors(folder) | {"model.layers.0.mlp.extra.weight": torch.ones(4, 128)})
    with pytest.raises(UserError, match=r"what model\.layers\.0\.mlp\.extra\.weight has to do with"):
        as_rotated(open_checkpoint(folder), "folded")


def test_rotating_twice_is_rotating_once(tmp_path: Any) -> None:
    view = as_rotated(open_checkpoint(tiny("llama", tmp_path / "m")), "folded")
    assert as_rotated(view, "folded") is view


def test_the_butterfly_is_the_rotation_with_the_same_bits_at_every_size() -> None:
    x = torch.randn(37, 200, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(butterfly(x), rotate(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(butterfly(x)[5], butterfly(x[5]))
    assert torch.equal(butterfly(x[:, :40]), x[:, :40])


def test_thousands_of_experts_are_looked_up_by_name_in_a_second(tmp_path: Path) -> None:
    folder = hollow(tmp_path, glm5_shapes(layers=12), {"model_type": "glm_moe_dsa", "num_hidden_layers": 12})
    source = open_checkpoint(folder)
    started = time.process_time()
    view = as_rotated(source, "folded")
    assert time.process_time() - started < 3
    folds = view.folds  # type: ignore[attr-defined]
    place = "model.layers.11."
    assert folds[f"{place}self_attn.kv_b_proj.weight"] == Fold(rows=Rows(period=448, first=192))
    assert folds[f"{place}self_attn.indexer.wk.weight"].gain == f"{place}input_layernorm.weight"
    assert folds[f"{place}mlp.gate.weight"].gain == f"{place}post_attention_layernorm.weight"
    assert f"{place}self_attn.indexer.wq_b.weight" not in folds
    assert len(folds) == len(source.tensors) - sum(n.endswith(UNTOUCHED) for n in source.tensors)
