"""Activations of fewer bits in our runtime: what each mode computes, where its scales lie, and who else reads them."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_journal import (
    block_hadamard,
    channel_scale,
    config_of,
    dequantized_twin,
    edit_layer,
    export_of,
    make_journal,
    plain_weight,
)
from support_models import tiny, tiny_q3
from transformers import AutoModelForCausalLM

from glm5_quant.kernels.layout import Inputs, Shadow, dequantize, from_codes
from glm5_quant.model import export, load, verify
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.exported import open_exported
from glm5_quant.model.families import family_of, linears
from glm5_quant.model.modules import PackedExperts, PackedLinear
from glm5_quant.model.scheme import InputScheme

IDS = torch.arange(3, 27)[None]
MODES = ["int8", "int4-channel", "int4-block"]
SCALES = "eampq/eampq-00001-of-00001.safetensors"
GATE = "model.layers.0.mlp.experts.1.gate_proj"


def eight_bits(block):
    step = block.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (block / step).round().clamp(-127, 127) * step, 0.0)


def rounded(x_TK, mode, scale_K=None):
    """x as float64 after rounding, by the definitions: int8 has a symmetric range a token and block, int4-channel one a
    token, after division by the channel scales; int4-block has 16 levels from a block's lowest to its highest."""
    x_TK = x_TK.double() if scale_K is None else x_TK.double() / scale_K.double()
    if mode == "none":
        return x_TK
    if mode == "int4-channel":
        step = x_TK.abs().amax(-1, keepdim=True) / 7
        return torch.where(step > 0, (x_TK / step).round().clamp(-7, 7) * step, 0.0)
    if mode == "int8":
        return torch.cat([eight_bits(block) for block in x_TK.split(64, dim=-1)], dim=-1)
    out = x_TK.clone()
    for start in range(0, x_TK.shape[1], 64):
        block = x_TK[:, start : start + 64]
        low, high = block.amin(-1, keepdim=True).clamp(max=0), block.amax(-1, keepdim=True).clamp(min=0)
        step = (high - low) / 15
        zero = (-low / step).nan_to_num(0).round()
        codes = ((block / step).nan_to_num(0).round() + zero).clamp(0, 15)
        out[:, start : start + 64] = (codes - zero) * step
    return out


def seen(x_TK, mode, *, rotated, scale_K=None):
    """Inputs as codes see them."""
    return rounded(x_TK.double() @ block_hadamard(x_TK.shape[1]) if rotated else x_TK, mode, scale_K)


def packed(n, k, *, experts=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (n,) if experts is None else (experts, n)
    codes = torch.randint(0, 16, (*shape, k), generator=generator, dtype=torch.uint8)
    scale = torch.rand(*shape, -(-k // 64), generator=generator) * 0.05 + 0.01
    return from_codes(codes, scale, torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.uint8))


def tokens(count, k, seed=1):
    """With an outlier channel, a row of zeros, a row of one sign and a tiny row."""
    x_TK = torch.randn(count, k, generator=torch.Generator().manual_seed(seed))
    x_TK[:, 5] *= 20
    x_TK[1], x_TK[2], x_TK[3] = 0, x_TK[2].abs() + 1, x_TK[3] * 1e-20
    return x_TK


def scales(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2)) + 0.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("k", [64, 192, 100])
def test_a_packed_linear_equals_its_float64_reference(mode, rotated, k):
    scale_K = scales(k) if mode == "int4-channel" else None
    matrix = replace(packed(24, k), inputs=Inputs(hadamard=rotated, activations=mode, channel_scale=scale_K))
    x_TK, bias = tokens(7, k), torch.linspace(-1, 1, 24)
    out = PackedLinear(matrix, bias, backend="reference")(x_TK[None])[0]
    want = seen(x_TK, mode, rotated=rotated, scale_K=scale_K) @ dequantize(matrix).double().T + bias.double()
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
    assert (out - x_TK @ dequantize(matrix).T - bias).abs().max() > 1e-3  # it is not the plain product


def test_the_dots_of_integers_are_exact():
    """Steps of 1 and scales that are powers of two: nothing may be rounded, whatever the mode."""
    matrix = packed(8, 64)
    matrix = replace(matrix, scale=torch.full_like(matrix.scale, 0.25))
    x_TK = torch.randint(-7, 8, (5, 64), generator=torch.Generator().manual_seed(0)).float()
    x_TK[:, 0], x_TK[:, 1] = 7, -8
    want = x_TK.long() @ (dequantize(matrix) * 4).long().T
    eight, block = (replace(matrix, inputs=Inputs(activations=mode)) for mode in ("int8", "int4-block"))
    assert torch.equal(PackedLinear(block, backend="reference")(x_TK) * 4, want.float())
    x_TK[:, 0] = 127
    want = x_TK.long() @ (dequantize(matrix) * 4).long().T
    assert torch.equal(PackedLinear(eight, backend="reference")(x_TK) * 4, want.float())


def router_weights(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("each", [False, True])
def test_packed_experts_equal_their_float64_reference(mode, each):
    """Hidden channels are rotated and rounded between the two products; scales may be shared or each expert's own."""
    experts, d, i = 3, 128, 100
    lead = (experts,) if each else ()
    by_channel = mode == "int4-channel"
    stacks = [packed(2 * i, d, experts=experts, seed=3), packed(d, i, experts=experts, seed=4)]
    found = [scales(*lead, stack.k) if by_channel else None for stack in stacks]
    stacks = [
        replace(stack, inputs=Inputs(hadamard=True, activations=mode, channel_scale=scale))
        for stack, scale in zip(stacks, found, strict=True)
    ]
    x_TD = tokens(6, d)
    index, weight = torch.tensor([[0, 1], [2, 3], [1, 2], [0, 2], [3, 3], [2, 1]]), router_weights(6, 2)
    out = PackedExperts(*stacks, backend="reference")(x_TD, index, weight)
    want = torch.zeros(6, d, dtype=torch.float64)
    for t, chosen in enumerate(index.tolist()):
        for a, e in enumerate(chosen):
            if e < experts:
                first, second = (None if s is None else s[e] if each else s for s in found)
                gate_up = dequantize(stacks[0])[e].double() @ seen(x_TD[t, None], mode, rotated=True, scale_K=first)[0]
                hidden = torch.nn.functional.silu(gate_up[:i]) * gate_up[i:]
                part = dequantize(stacks[1])[e].double() @ seen(hidden[None], mode, rotated=True, scale_K=second)[0]
                want[t] += part * weight[t, a].double()
    # Sums of many products cancel: what float32 may lose is told by the largest of them.
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


def test_a_shadow_reads_the_rounded_inputs():
    shadow = Shadow(torch.tensor([2, 9]).int(), torch.ones(2, 8).half(), torch.tensor([0, 2]).int())
    plain = replace(packed(8, 64), inputs=Inputs(activations="int4-block"))
    x_TK = tokens(4, 64)
    change = PackedLinear(replace(plain, shadow=shadow))(x_TK) - PackedLinear(plain)(x_TK)
    want = rounded(x_TK, "int4-block")[:, [2, 9]].sum(-1, keepdim=True).expand(4, 8)
    torch.testing.assert_close(change.double(), want, rtol=1e-4, atol=1e-4)


def twin_with_rounded_inputs(source, out, folder, mode, *, rotated):
    """The dequantized source in plain transformers, whose linears see rounded inputs by hooks of this test."""
    model = AutoModelForCausalLM.from_pretrained(dequantized_twin(source, out, folder), dtype=torch.float32).eval()
    checkpoint, exported = open_checkpoint(source), open_exported(out)
    for linear in linears(checkpoint, family_of(checkpoint.config)):
        scale_K = channel_scale(linear) if mode == "int4-channel" else None

        def hook(module, args, scale_K=scale_K):
            flat = args[0].reshape(-1, args[0].shape[-1])
            x_TK = seen(flat, mode, rotated=rotated, scale_K=scale_K)
            x_TK = x_TK if scale_K is None else x_TK * scale_K.double()
            return (x_TK @ block_hadamard(flat.shape[1]) if rotated else x_TK).float().reshape(args[0].shape)

        module = model.get_submodule(linear.name)
        torch.testing.assert_close(module.weight.double(), plain_weight(exported, linear), rtol=1e-6, atol=1e-7)
        module.register_forward_pre_hook(hook)
    return model


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


def relative(left, right):
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize(("mode", "rotation"), [*((mode, "none") for mode in MODES), ("int4-channel", "full")])
def test_an_export_gives_the_logits_of_its_weights_on_rounded_inputs(mode, rotation, tmp_path):
    source = tiny("llama", tmp_path / "source")
    out = export_of(source, tmp_path, activations=mode, rotation=rotation)
    twin = twin_with_rounded_inputs(source, out, tmp_path / "twin", mode, rotated=rotation == "full")
    want = logits(twin)
    model = load(out, dtype=torch.float32, backend="reference")
    # Float noise may carry a value across a border between two steps: rarely, and the result stays close.
    assert relative(logits(model), want) < 0.01
    assert model.glm5_quant.inputs == InputScheme(rotation=rotation, activations=mode)
    for module in twin.modules():
        module._forward_pre_hooks.clear()
    assert relative(logits(twin), want) > (0.003 if mode == "int8" else 0.05)


@pytest.fixture(scope="module")
def channel(tmp_path_factory):
    """(source, its export with int4-channel activations on rotated inputs) of TINY-Q3."""
    root = tmp_path_factory.mktemp("q3")
    source = tiny_q3(root / "source")
    return source, export_of(source, root, activations="int4-channel", rotation="full")


def test_each_experts_own_scales_reach_its_stack(channel):
    model = load(channel[1], dtype=torch.float32)
    found = {(x.layer, x.role, x.expert): channel_scale(x) for x in linears_of(channel[0]) if x.expert is not None}
    for layer in range(2):
        experts = model.model.layers[layer].mlp.experts
        for name, role in (("gate_up", "gate"), ("down", "down")):
            stacked = experts.matrix(name).inputs.channel_scale
            assert torch.equal(stacked, torch.stack([found[layer, role, e] for e in range(4)]))
    assert torch.isfinite(logits(model)).all()
    assert torch.isfinite(logits(load(channel[1]))).all()  # bfloat16, by whatever backend the device prefers
    assert torch.equal(logits(model.to(torch.float64).to(torch.float32)), logits(model))


def linears_of(source):
    checkpoint = open_checkpoint(source)
    return linears(checkpoint, family_of(checkpoint.config))


def test_verify_takes_rotation_and_channel_scales_back_before_it_compares(channel):
    report = verify(channel[1], channel[0])
    assert report.ok and not report.warnings
    assert report.features == ("activations", "rotation")
    assert all(0.05 < sample.error < 0.2 for sample in report.samples)


def test_folded_scales_are_refused_by_every_other_reader(tmp_path):
    source = tiny("llama", tmp_path / "source")
    out = export_of(source, tmp_path, activations="int4-channel", symmetric=True)
    assert config_of(out)["quantization_config"]["format"] == "eampq-pack-quantized"
    for verdict in verify(out).runtimes:
        assert verdict.loads == (verdict.runtime == "glm5-quant")
        assert verdict.loads or "activation scales are folded into the weights" in verdict.reason
    with pytest.raises(ValueError, match="format"):
        AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("mode", ["int8", "int4-block"])
def test_scales_made_at_run_time_leave_a_base_that_others_read_as_w4a16(mode, tmp_path):
    source = tiny("llama", tmp_path / "source")
    out = export_of(source, tmp_path, activations=mode, symmetric=True)
    settings = config_of(out)["quantization_config"]
    assert settings["format"] == "pack-quantized"
    assert settings["eampq_inputs"] == {"rotation": "none", "activations": mode}
    for verdict in verify(out).runtimes:
        assert verdict.loads
        assert verdict.runtime == "glm5-quant" or verdict.reason == f"reads the base only, without {mode} activations"
    plain = export_of(source, tmp_path / "plain", symmetric=True)
    theirs = logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval())
    assert relative(theirs, logits(load(plain, dtype=torch.float32))) < 2**-8  # they round weights to bfloat16


def altered(channel, folder, change):
    """The export with other sidecar tensors."""
    shutil.copytree(channel[1], folder)
    save_file(change(load_file(folder / SCALES)), folder / SCALES, {"format": "pt"})
    return folder


def put(value):
    def change(tensors):
        tensors[f"{GATE}.activation_scale"][3] = value
        return tensors

    return change


@pytest.mark.parametrize(("change", "message"), [
    (put(0.0), r"gate_proj.activation_scale: not above zero at \[3\]"),
    (put(-1.0), r"gate_proj.activation_scale: not above zero at \[3\]"),
    (put(torch.nan), "gate_proj.activation_scale: a weight is not finite"),
    (put(0.5), r"up_proj.activation_scale: scales differ from those of .*gate_proj, which reads the same input"),
])  # fmt: skip
def test_bad_scales_are_named_by_load_and_verify(channel, tmp_path, change, message):
    folder = altered(channel, tmp_path / "copy", change)
    with pytest.raises(UserError, match=message):
        load(folder)
    assert any(message.split(":")[0].split(".")[0] in problem for problem in verify(folder).problems)
    assert not verify(folder).runtimes[0].loads


def test_without_its_sidecar_an_int4_channel_export_does_not_load(channel, tmp_path):
    shutil.copytree(channel[1], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "eampq")
    with pytest.raises(UserError, match="activation_scale: missing, though activations are int4-channel"):
        load(tmp_path / "copy")
    report = verify(tmp_path / "copy", channel[0])
    assert "activation_scale: missing" in report.problems[0]
    assert report.samples == ()


@pytest.mark.parametrize(("mode", "change", "message"), [
    ("int4-channel", lambda scale: None, "gate_proj.activation_scale: missing"),
    ("int4-channel", lambda scale: scale[:-1].clone(), r"F32 \[127\], expected F32 \[128\]"),
    ("int4-channel", lambda scale: scale.half(), r"F16 \[128\], expected F32 \[128\]"),
    ("int8", lambda scale: torch.ones(128), "not of a packed matrix in mode int4-channel"),
])  # fmt: skip
def test_a_journal_whose_scales_do_not_fit_its_mode_is_not_exported(channel, tmp_path, mode, change, message):
    journal = make_journal(channel[0], tmp_path / "journal", activations=mode)
    name = f"eampq/{GATE}.activation_scale"

    def edit(tensors):
        value = change(tensors.pop(name, None))
        return tensors if value is None else tensors | {name: value}

    edit_layer(journal, 0, edit)
    with pytest.raises(UserError, match=message):
        export(channel[0], journal, tmp_path / "export")
    assert not (tmp_path / "export").exists()
