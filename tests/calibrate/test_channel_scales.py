"""`--activations int4-channel`: fixed channel scales, from the inputs of calibration to the runtime's integers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support_calibrate import small
from support_models import rewrite, tiny, tiny_q3

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.plan import make_plan
from glm5_quant.calibrate.seen import SAMPLE_TOKENS, Sample, Seen
from glm5_quant.calibrate.settings import Settings
from glm5_quant.calibrate.shadows import Facts, ShadowFinder, Solution
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.exporting import export
from glm5_quant.model.families import family_of, linears
from glm5_quant.model.loading import load
from glm5_quant.model.verifying import verify
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.grid import dequantize, minmax_grid, quantize
from glm5_quant.quant.rotation import rotate
from glm5_quant.quant.statistics import Moments


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SCALE = 0.2 + normal(128, seed=4).abs()
VIEWS = [Seen(), Seen(rotated=True), Seen(scale_K=SCALE), Seen(rotated=True, scale_K=SCALE)]


@pytest.mark.parametrize("seen", VIEWS)
def test_what_codes_see_gives_the_same_product_and_the_moments_of_what_is_seen(seen: Seen) -> None:
    x, weight = normal(50, 128, seed=1), normal(8, 128, seed=2)
    inputs = rotate(x) if seen.rotated else x
    inputs = inputs if seen.scale_K is None else inputs / seen.scale_K
    torch.testing.assert_close(inputs @ seen.weight(weight).T, x @ weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen.moments(x.T @ x), inputs.T @ inputs, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(seen.plain(seen.weight(weight)), weight, rtol=1e-4, atol=1e-5)
    part = slice(64, 128)
    torch.testing.assert_close(seen.columns(part).weight(weight[:, part]), seen.weight(weight)[:, part])


def test_a_sample_is_spread_over_the_fitted_tokens_and_its_scales_have_mean_one() -> None:
    tokens, size = 3 * SAMPLE_TOKENS, torch.linspace(0.1, 8, 16)
    evidence = Evidence.empty(16, tokens=tokens, held_from=2 * SAMPLE_TOKENS, gap=False, device="cpu", sampled=True)
    x = normal(tokens, 16) * size
    for start in range(0, tokens, 600):
        evidence.add(x[start : start + 600], None, start)
    assert evidence.sample is not None
    kept = torch.cat(evidence.sample.parts)
    assert len(kept) < 1.1 * SAMPLE_TOKENS
    thinned = x[:: evidence.stride][: -(-2 * SAMPLE_TOKENS // evidence.stride)]
    assert torch.equal(kept, thinned[:: evidence.sample.step])
    scales = evidence.sample.scales(16, rotated=False)
    assert float(scales.log().mean().abs()) < 1e-5
    torch.testing.assert_close(scales / scales[0], size / size[0], rtol=0.3, atol=0)
    assert torch.equal(Sample.of(10).scales(4, rotated=True), torch.ones(4))


@pytest.mark.parametrize("seen", VIEWS)
def test_shadows_take_off_the_plain_error_what_they_promise_whatever_codes_see(seen: Seen) -> None:
    x, weight = normal(4000, 128, seed=1) * torch.linspace(0.1, 3, 128), normal(8, 128, seed=2)
    target = seen.weight(weight)
    grid = minmax_grid(target)
    restored = dequantize(quantize(target, grid), grid)
    total, held = Moments.empty(128), Moments.empty(128)
    total.add(x)
    held.add(x[2000:])
    hessian = seen.moments(total.hessian_KK)
    finder = ShadowFinder(config=QuantConfig(shadow_budget=0.02, shrink=False), names=frozenset({"m"}))
    found = Solution(
        weights_NK=[weight],
        target_NK=target,
        restored_NK=restored,
        hessian_KK=hessian,
        total=total,
        held=held,
        seen=seen,
    )
    linear: Any = type("L", (), {"name": "m"})()
    finder.add([linear], 0, found, [Facts(size=1.0, wrong=1.0, held_size=1.0)])
    kept = finder.offers.tensors
    channels = kept["m.channels"].long()
    residual = torch.linalg.solve(kept["m.within"].double(), kept["m.reach"].double().T).T.float()
    mended = restored.clone()
    mended[:, channels] += residual
    before, after = (seen.plain(one) - weight for one in (restored, mended))
    for name, hessian_KK in (("drops", total.hessian_KK), ("unseen", held.hessian_KK)):
        change = float((before @ hessian_KK * before).sum() - (after @ hessian_KK * after).sum())
        told = float(kept["m.drops"].sum()) if name == "drops" else -float(kept["m.unseen"][-1])
        assert told == pytest.approx(change, rel=0.1)
        assert change > 0


@pytest.mark.parametrize("rotation", ["none", "full", "folded"])
def test_a_calibrated_model_runs_on_four_bit_inputs_and_verifies(rotation: str, tmp_path: Path) -> None:
    source = tiny_q3(tmp_path / "m", scale=0.08)
    rewrite(source, "model.layers.0.input_layernorm.weight", lambda norm: norm * torch.linspace(0.1, 4, 128))
    small(source, tmp_path / "w", quant={"activations": "int4-channel", "rotation": rotation})
    export(source, tmp_path / "w" / "calibration", tmp_path / "out")
    report = verify(tmp_path / "out", source)
    assert report.ok
    assert "activations" in report.features
    assert max(sample.error for sample in report.samples) < 0.7  # channels left out would give 1 and more
    ids = torch.randint(0, 240, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours, original = (load(x, dtype=torch.float32)(ids).logits for x in (tmp_path / "out", source))
    error = (ours - original).square().sum() / (original - original.mean(-1, keepdim=True)).square().sum()
    assert float(error) < 0.3


def test_matrices_that_read_one_input_share_scales_and_starved_experts_have_some_too(tmp_path: Path) -> None:
    source = tiny("qwen3_moe", tmp_path / "m", num_hidden_layers=1, num_experts=12, num_experts_per_tok=1)
    rewrite(source, "model.layers.0.mlp.gate.weight", lambda gate: gate * (torch.arange(12)[:, None] < 2))
    small(source, tmp_path / "w", quant={"activations": "int4-channel"})
    tensors = load_file(tmp_path / "w" / "calibration" / "layers" / "00000.safetensors")
    scales = {n.split(".", 3)[-1]: t for n, t in tensors.items() if n.endswith(".activation_scale")}
    checkpoint = open_checkpoint(source)
    found = linears(checkpoint, family_of(checkpoint.config))
    assert len(scales) == len(found)
    for linear in found:
        mine = tensors[f"eampq/{linear.name}.activation_scale"]
        assert mine.shape == (linear.k,)
        assert bool((mine > 0).all())
        partner = next(other for other in found if other.group == linear.group)
        assert torch.equal(mine, tensors[f"eampq/{partner.name}.activation_scale"])
    attention = tensors["eampq/model.layers.0.self_attn.q_proj.activation_scale"]
    assert float(attention.std()) > 0.01
    export(source, tmp_path / "w" / "calibration", tmp_path / "out")
    assert verify(tmp_path / "out", source).ok
    assert load(tmp_path / "out").packed_count == len(found)


def test_the_plan_counts_the_memory_of_the_sample(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama", tmp_path / "m"))
    plain, scaled = (
        make_plan(checkpoint, Settings(quant=QuantConfig(activations=mode)), tmp_path).least_memory_bytes
        for mode in ("none", "int4-channel")
    )
    assert scaled - plain == 4 * 4 * SAMPLE_TOKENS * 192


@pytest.mark.parametrize("mode", ["int4-channel", "int4-block"])
def test_inputs_of_four_bits_without_an_online_rotation_are_warned_about(mode: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama", tmp_path / "m"))
    plain, turned = (
        make_plan(checkpoint, Settings(quant=QuantConfig(activations=mode, rotation=rotation)), tmp_path).warnings
        for rotation in ("folded", "full")
    )
    assert any("--rotation full" in warning for warning in plain)
    assert not any("--rotation full" in warning for warning in turned)
