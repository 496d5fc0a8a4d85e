"""Parts that are kept in source precision or stored in 8 bits: in the journal, the export, both runtimes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support_calibrate import small
from support_models import byte_tokenizer, read_tensors, tiny, tiny_glm

from glm5_quant.calibrate.plan import make_plan
from glm5_quant.calibrate.precision import write_tables
from glm5_quant.calibrate.presets import make_settings
from glm5_quant.calibrate.settings import Settings
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.exported import open_exported
from glm5_quant.model.exporting import export
from glm5_quant.model.families import family_of
from glm5_quant.model.journal import open_journal
from glm5_quant.model.loading import load
from glm5_quant.model.modules import EightLinear
from glm5_quant.model.verifying import verify
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.eight import round_eight
from glm5_quant.quant.grid import dequantize
from glm5_quant.quant.packing import pack_bytes, unpack_bytes

EVERYTHING = {"int8": ("attention", "shared_experts", "dense_mlp", "lm_head", "embed_tokens")}


def exported(model: Path, folder: Path, **options: object) -> Path:
    report = small(model, folder / "w", **options)
    export(model, report.journal, folder / "out")
    return folder / "out"


def test_eight_bits_are_within_half_a_step_and_words_hold_the_lowest_byte_first() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 130) * torch.logspace(-3, 3, 6)[:, None]
    weight[2, :64] = 0
    codes, grid = round_eight(weight, group_size=64, scale_dtype=torch.float32)
    step = grid.scale.repeat_interleave(64, 1)[:, :130]
    assert bool(((dequantize(codes, grid) - weight).abs() <= 0.5001 * step).all())
    assert not dequantize(codes, grid)[2, :64].any()
    assert torch.equal(unpack_bytes(pack_bytes(codes), 130), codes)
    word = 1 | 2 << 8 | 3 << 16 | 128 << 24
    assert pack_bytes(torch.tensor([[1, 2, 3, 128]], dtype=torch.uint8)).tolist() == [[word - (1 << 32)]]


def test_kept_parts_are_in_the_export_bit_for_bit_and_in_the_ignore_list(tmp_path: Path) -> None:
    model = tiny_glm(tmp_path / "m")
    out = exported(model, tmp_path, keep=("attention", "shared_experts"))
    before, after = read_tensors(model), read_tensors(out)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    kept = [n for n in before if ".self_attn." in n or ".shared_experts." in n]
    assert kept
    for name in kept:
        assert torch.equal(before[name], after[name]), name
        assert name.removesuffix(".weight") in ignored or before[name].ndim == 1
    assert "model.layers.1.mlp.experts.0.up_proj.weight_packed" in after
    assert verify(out, source=model).ok


@pytest.mark.parametrize("rotation", ["none", "full"])
def test_an_export_with_8_bit_parts_loads_and_has_the_logits_of_its_dequantized_weights(
    rotation: str, tmp_path: Path
) -> None:
    """8-bit modules take plain inputs, whatever is done to those of the others."""
    model = tiny_glm(tmp_path / "m")
    quant = {"rotation": rotation, "compensation": False, "shadow_budget": 0.0}
    out = exported(model, tmp_path, quant=quant, **EVERYTHING)
    report = verify(out, source=model)
    assert report.ok
    assert 0 < report.eight_bit < report.packed_linears
    found = open_exported(out)
    assert found is not None
    assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.shared_experts.up_proj"} <= found.eight
    assert not any(".experts.0." in name for name in found.eight)
    packed, plain = load(out, dtype=torch.float32), load(model, dtype=torch.float32)
    assert isinstance(packed.model.layers[0].self_attn.q_proj, EightLinear)
    rows = packed.lm_head.row_index
    assert rows is not None
    with torch.no_grad():
        for name in found.shapes:
            weight = found.weight(name)
            if ".experts." in name:
                layer, expert, role = int(name.split(".")[2]), int(name.split(".")[5]), name.split(".")[6]
                experts = plain.model.layers[layer].mlp.experts
                if role == "down_proj":
                    experts.down_proj[expert] = weight
                else:
                    first = len(weight) if role == "up_proj" else 0
                    experts.gate_up_proj[expert, first : first + len(weight)] = weight
                continue
            if name in ("lm_head", "model.embed_tokens"):
                weight[rows] = plain.get_submodule(name).weight[rows]
            plain.get_submodule(name).weight.copy_(weight)
        ids = torch.arange(24).view(2, 12)
        assert torch.allclose(packed(ids).logits, plain(ids).logits, atol=2e-4)


def test_numeric_rows_of_an_8_bit_head_are_those_of_the_source(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m", tie_word_embeddings=True)
    out = exported(model, tmp_path, int8=("lm_head",))
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head" in config["quantization_config"]["config_groups"]["group_1"]["targets"]
    loaded = load(out)
    rows = loaded.lm_head.row_index.tolist()
    assert set(b"0123456789%") <= set(rows)
    source = open_checkpoint(model).read("model.embed_tokens.weight")
    assert torch.equal(loaded.lm_head.row_weight, source[rows])
    assert verify(out, source=model).ok
    found = {one.runtime: one for one in verify(out).runtimes}
    assert found["vLLM"].loads and "8-bit" not in found["vLLM"].reason
    assert not found["SGLang"].loads and "leaves a packed head unread" in found["SGLang"].reason


def test_a_head_in_8_bits_that_is_lost_or_damaged_in_the_journal_stops_the_export(tmp_path: Path) -> None:
    model, work = tiny("llama", tmp_path / "m"), tmp_path / "w"
    report = small(model, work, int8=("lm_head",))
    file = report.journal / "layers" / "model.safetensors"
    good = file.read_bytes()
    for bad in (bytes([*good[:-1], good[-1] ^ 1]), None):
        file.write_bytes(bad) if bad else file.unlink()
        with pytest.raises(UserError, match="head and embedding in 8 bits are missing or not what was written"):
            export(model, report.journal, tmp_path / "out")
    (report.journal / "finish.json").unlink()  # what the message says
    small(model, work, int8=("lm_head",))
    assert file.read_bytes() == good
    assert export(model, report.journal, tmp_path / "out").packed_linears == 15


@pytest.mark.parametrize("part", ["attention", "dense_mlp"])
def test_8_bit_parts_that_servers_fuse_do_not_load_in_each_of_them(part: str, tmp_path: Path) -> None:
    out = exported(tiny("llama", tmp_path / "m"), tmp_path, int8=(part,))
    found = {one.runtime: one for one in verify(out).runtimes}
    assert found["transformers"].loads
    assert found["vLLM"].loads and "pull request 49483" in found["vLLM"].reason
    assert not found["SGLang"].loads and "for 4-bit ones" in found["SGLang"].reason


@pytest.mark.parametrize("int8", [("embed_tokens",), ("embed_tokens", "lm_head")])
def test_an_8_bit_embedding_gives_numeric_tokens_their_own_rows_and_unties_the_head(
    int8: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny("llama", tmp_path / "m", tie_word_embeddings=True)
    out = exported(model, tmp_path, int8=int8)
    assert verify(out, source=model).ok
    assert "vLLM reads no packed embedding" in [one.reason for one in verify(out).runtimes]
    source = open_checkpoint(model).read("model.embed_tokens.weight")
    loaded = load(out, dtype=torch.float32)
    ids = torch.tensor([[*b"at 12.5%", 200]])
    rows = loaded.model.embed_tokens(ids)[0]
    exact = (rows == source.float()[ids[0]]).all(1).tolist()
    assert [exact[at] for at in (3, 4, 6, 7)] == [True] * 4
    assert not all(exact)
    assert float((rows - source.float()[ids[0]]).abs().max()) < 0.01 * float(source.abs().max())
    if len(int8) == 1:
        assert torch.equal(open_checkpoint(out).read("lm_head.weight"), source)
    with torch.no_grad():
        assert loaded(ids).logits.isfinite().all()


def test_plain_transformers_reads_both_groups(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny("llama", tmp_path / "m", dtype=torch.float32)
    out = exported(
        model,
        tmp_path,
        quant={"symmetric": True, "compensation": False, "shadow_budget": 0.0},
        int8=("attention", "lm_head"),
    )
    other = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.arange(24).view(2, 12)
    ours = load(out, dtype=torch.float32)
    ours.lm_head.row_index = None
    with torch.no_grad():
        assert torch.allclose(other(ids).logits, ours(ids).logits, atol=1e-4)


def test_8_bits_leave_a_far_smaller_error_and_are_recorded_as_such(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")
    small(model, tmp_path / "a", num_samples=32, quant={"alphas": ()})
    small(model, tmp_path / "b", num_samples=32, quant={"alphas": ()}, int8=("attention",))
    four, eight = (open_journal(tmp_path / name / "calibration").record(0).modules for name in "ab")
    for name in four:
        if ".self_attn." in name:
            assert eight[name].bits == 8
            assert eight[name].error < four[name].error / 4
            assert eight[name].error < four[name].error_rtn / 100
        else:
            assert eight[name].bits == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep": ("experts",)}, "keep: unknown part; found experts; expected attention, shared_experts, dense_mlp"),
        ({"int8": ("router",)}, "int8: unknown part; found router"),
        ({"keep": ("attention",), "int8": ("attention",)}, "keep: a part is to be kept and stored in 8 bits"),
    ],
)
def test_bad_parts_are_refused_by_name(values: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings(**values)


def test_keeping_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to quantize"):
        small(tiny("llama", tmp_path / "m"), tmp_path / "w", keep=("attention", "dense_mlp"))


def test_a_preset_file_names_parts(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('keep = ["attention"]\nint8 = ["lm_head"]\n')
    settings = make_settings(str(path))
    assert (settings.keep, settings.int8) == (("attention",), ("lm_head",))
    assert settings.deciding()["int8"] == ["lm_head"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("int8", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_the_plan_counts_head_and_embedding_in_8_bits(tied: bool, int8: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(byte_tokenizer(tiny("llama", tmp_path / "m", tie_word_embeddings=tied)))
    family, settings = family_of(checkpoint.config), Settings(num_samples=8, seqlen=64)
    journal: Any = SimpleNamespace(tables_file=tmp_path / "model.safetensors")
    write_tables(journal, checkpoint, family, replace(settings, int8=int8))
    parts = load_file(journal.tables_file).items()
    written = sum(part.nbytes for name, part in parts if not name.startswith("eampq/") and not name.endswith("_shape"))
    replaced = [name for name in int8 if not (tied and name == "lm_head")]
    gone = sum(checkpoint.info(f"{name.replace('embed', 'model.embed')}.weight").nbytes for name in replaced)
    without, plan = (make_plan(checkpoint, s, tmp_path / "w") for s in (settings, replace(settings, int8=int8)))
    assert plan.journal_bytes - without.journal_bytes == written > 0
    assert plan.export_bytes - without.export_bytes == written - gone


def test_sizes_of_a_plan_are_codes_scales_and_what_stays(tmp_path: Path) -> None:
    model = open_checkpoint(tiny("llama", tmp_path / "m", intermediate_size=96))
    settings = Settings(num_samples=8, seqlen=64, quant=QuantConfig(symmetric=True, shadow_budget=0.0))
    plan = make_plan(model, settings, tmp_path / "w")
    items = [item for layer in plan.by_layer.values() for item in layer]
    weights = sum(item.n * item.k for item in items)
    # 96 inputs are a block of 64 and one of 32, with a scale of 2 bytes each.
    blocks = sum(item.n * {64: 1, 96: 2, 128: 2}[item.k] for item in items)
    assert plan.journal_bytes == weights // 2 + 2 * blocks
    source = sum(tensor.nbytes for tensor in read_tensors(tmp_path / "m").values())
    assert (plan.source_bytes, plan.export_bytes) == (source, source - 2 * weights + plan.journal_bytes)
    attention = sum(item.n * item.k for item in items if ".self_attn." in item.name)
    eight = make_plan(model, replace(settings, int8=("attention",)), tmp_path / "w")
    assert eight.journal_bytes - plan.journal_bytes == eight.export_bytes - plan.export_bytes == attention // 2
