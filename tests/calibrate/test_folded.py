"""`--rotation folded` from calibration to other people's readers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_calibrate import small
from support_models import byte_tokenizer, read_tensors, tiny, tiny_ds8, tiny_q3

from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.exporting import export
from glm5_quant.model.loading import load
from glm5_quant.model.rotated import as_rotated
from glm5_quant.model.verifying import verify

FOLDED = {"rotation": "folded", "symmetric": True, "shadow_budget": 0.0, "compensation": False}


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, export) of a tied llama, symmetric, calibrated on its rotated stream."""
    root = tmp_path_factory.mktemp("folded")
    source = tiny("llama", root / "m", scale=0.1, head_dim=64, tie_word_embeddings=True)
    small(source, root / "w", quant=FOLDED)
    export(source, root / "w" / "calibration", root / "out")
    return source, root / "out"


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL(p || q) of logits, in nats."""
    return float((p.log_softmax(-1).exp() * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean())


def test_a_folded_export_is_plain_to_transformers_and_computes_what_our_loader_does(folded: Any) -> None:
    from transformers import AutoModelForCausalLM

    source, out = folded
    ids = torch.randint(0, 240, (2, 48), generator=torch.Generator().manual_seed(1))
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours, original = load(out, dtype=torch.float32), load(source, dtype=torch.float32)
    with torch.no_grad():
        theirs, here, before = (model(ids).logits for model in (plain, ours, original))
    torch.testing.assert_close(here, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    assert ours.glm5_quant.inputs.plain
    assert kl(before, here) < 0.3 * kl(before, torch.zeros_like(before))


def test_the_export_holds_the_rotated_stream_and_verify_compares_it_with_the_source(folded: Any, tmp_path: Any) -> None:
    source, out = folded
    tensors, view = read_tensors(out), as_rotated(open_checkpoint(source), "folded")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.post_attention_layernorm.weight"):
        assert torch.equal(tensors[name], view.read(name))
    report = verify(out, source)
    assert report.ok
    assert len(report.samples) == 14
    assert max(sample.error for sample in report.samples) < 0.2
    original = read_tensors(source)["model.embed_tokens.weight"]
    file = next(file for file in out.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(file))
    saved = file.read_bytes()
    save_file(load_file(file) | {"model.embed_tokens.weight": original}, file, {"format": "pt"})
    assert "model.embed_tokens.weight: differs from the source" in verify(out, source).problems
    file.write_bytes(saved)


def test_experts_and_their_router_are_calibrated_on_the_rotated_stream(tmp_path: Path) -> None:
    source = tiny_q3(tmp_path / "m", num_hidden_layers=1)
    reports = [
        small(source, tmp_path / rotation, quant={"rotation": rotation, "alphas": ()})
        for rotation in ("none", "folded")
    ]
    for report in reports:
        assert len(report.roles) == 7 and all(role.error < role.error_rtn for role in report.roles)
    export(source, tmp_path / "folded" / "calibration", tmp_path / "out")
    router = "model.layers.0.mlp.gate.weight"
    view = as_rotated(open_checkpoint(source), "folded")
    assert torch.equal(read_tensors(tmp_path / "out")[router], view.read(router))
    assert not torch.equal(view.read(router), open_checkpoint(source).read(router))
    assert verify(tmp_path / "out", source).ok


@pytest.mark.parametrize("kind", ["fp8", "granitemoe", "glm_moe_dsa"])
def test_widened_sources_fused_stacks_and_indexers_export_what_was_calibrated(kind: str, tmp_path: Path) -> None:
    source = tiny_ds8(tmp_path / "m") if kind == "fp8" else tiny(kind, tmp_path / "m")
    small(source, tmp_path / "w", preset="fast", quant={"rotation": "folded"})
    export(source, tmp_path / "w" / "calibration", tmp_path / "out")
    report = verify(tmp_path / "out", source)
    assert report.ok
    assert max(sample.error for sample in report.samples) < 0.2
    ids = torch.randint(0, 240, (1, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, original = (load(x, dtype=torch.float32)(ids).logits for x in (tmp_path / "out", source))
    assert kl(original, ours) < 0.2 * kl(original, torch.zeros_like(original))


def test_a_journal_of_another_rotation_is_refused_by_name(folded: Any) -> None:
    source, out = folded
    with pytest.raises(UserError, match=r"this journal belongs to other inputs.*rotation"):
        small(source, out.parent / "w", quant=FOLDED | {"rotation": "none"})


def test_a_family_that_cannot_be_rotated_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    source = tiny("glm4", tmp_path / "m")
    byte_tokenizer(source)
    with pytest.raises(UserError, match="--rotation folded"):
        small(source, tmp_path / "w", dataset=tmp_path / "missing.txt", quant={"rotation": "folded"})
    assert not (tmp_path / "w" / "calibration").exists()


@pytest.mark.parametrize("activations", ["none", "int4-channel"])
def test_eight_bit_parts_are_of_the_rotated_weights_too(activations: str, tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "m", scale=0.1, tie_word_embeddings=True)
    settings = {"rotation": "folded", "activations": activations, "alphas": ()}
    small(source, tmp_path / "w", quant=settings, int8=("attention", "lm_head", "embed_tokens"))
    export(source, tmp_path / "w" / "calibration", tmp_path / "out")
    assert verify(tmp_path / "out", source).ok
    ids = torch.randint(0, 240, (1, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, original = (load(x, dtype=torch.float32)(ids).logits for x in (tmp_path / "out", source))
    assert kl(original, ours) < 0.3 * kl(original, torch.zeros_like(original))
