"""A router fitted again to the quantized stream: kept only where more of the source's experts are chosen."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support_calibrate import small
from support_models import byte_tokenizer, tiny, tiny_glm
from torch import nn

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.router import agreement, refit_router
from glm5_quant.eval import evaluate
from glm5_quant.eval.layer_errors import router_difference
from glm5_quant.eval.model_parts import decoder_layers
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.exporting import export
from glm5_quant.model.journal import open_journal
from glm5_quant.model.loading import load
from glm5_quant.model.sidecar import open_sidecar
from glm5_quant.model.verifying import verify


def test_agreement_is_the_share_of_wanted_experts_that_are_chosen() -> None:
    wanted = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert agreement(wanted.flip(1), wanted) == 1.0
    assert agreement(torch.tensor([[1, 7], [6, 7], [4, 5]]), wanted) == pytest.approx((0.5 + 0 + 1) / 3)


def refitted(distortion: torch.Tensor) -> tuple[nn.Linear, torch.Tensor, object, torch.Tensor | None]:
    """A router of 16 experts, top 4, whose inputs the layers before it have multiplied by `distortion`."""
    torch.manual_seed(0)
    tokens, dim, held = 4000, 32, 3000
    source = torch.randn(tokens, dim)
    stream = source @ distortion
    router = nn.Linear(dim, 16, bias=False)
    old = router.weight.detach().clone()

    def route(x: torch.Tensor) -> torch.Tensor:
        return router(x).topk(4).indices

    wanted = route(source)
    evidence = Evidence.empty(dim, tokens=tokens, held_from=held, gap=True, device="cpu")
    evidence.add(stream[:held], source[:held], 0)
    record, new = refit_router(router, evidence, route, (stream[held:], wanted[held:]), torch.float32, 1e-4)
    return router, old, record, new


def test_a_distorted_stream_is_made_up_for_on_tokens_that_were_not_fitted_on() -> None:
    distortion = torch.eye(32) + 0.1 * torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    router, old, record, new = refitted(distortion)
    assert record.kept
    assert record.agreement_before < 0.9 < record.agreement_after
    assert torch.equal(router.weight, new)
    assert torch.allclose(new, old @ torch.linalg.inv(distortion).T, atol=0.01)


def test_equal_streams_leave_the_router_as_it_is() -> None:
    router, old, record, new = refitted(torch.eye(32))
    assert not record.kept
    assert new is None
    assert torch.equal(router.weight, old)
    assert record.agreement_before == 1.0


@pytest.mark.parametrize("forced", [True, False])
def test_a_refitted_router_is_exported_in_the_sources_precision_and_its_bias_bit_for_bit(
    forced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`forced`: agreement is made to rise with every question asked, so that the router is kept."""
    scores = iter(range(100))
    monkeypatch.setattr(
        "glm5_quant.calibrate.router.agreement", (lambda *_: float(next(scores))) if forced else (lambda *_: 0.5)
    )
    model = tiny_glm(tmp_path / "m")
    report = small(model, tmp_path / "w", quant={"refit_router": True}, num_samples=16)
    record = open_journal(report.journal).record(1).router
    assert record is not None
    assert record.kept is forced
    assert f"{int(forced)} of 1 refitted" in (report.journal / "report.md").read_text()
    export(model, report.journal, tmp_path / "out")
    source, out = open_checkpoint(model), open_checkpoint(tmp_path / "out")
    router, bias = (f"model.layers.1.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias"))
    assert out.info(router).dtype == source.info(router).dtype
    assert torch.equal(source.read(router), out.read(router)) is not forced
    assert torch.equal(source.read(bias), out.read(bias))
    assert verify(tmp_path / "out", source=model).ok
    opened = open_sidecar(tmp_path / "out")
    assert opened is not None
    assert opened[0].refitted_routers == ([1] if forced else [])
    byte_tokenizer(model)
    found = evaluate(model, [tmp_path / "out"], ["12.5% of 340 is 42.50"], window=16, draws=50)
    assert not [finding for finding in found.exports[0].findings if finding.kind == "router"]
    assert any("fitted the routers of layers 1 again" in note for note in found.notes) is forced


def test_only_the_weight_of_a_refitted_router_may_differ(tmp_path: Path) -> None:
    layer = decoder_layers(load(tiny_glm(tmp_path / "m")))[1]
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.mlp.gate.weight.zero_()
    assert router_difference(layer, other) == "weight is not the source's"
    assert router_difference(layer, other, refitted=True) == ""
    other.mlp.gate.e_score_correction_bias.add_(1)
    assert router_difference(layer, other, refitted=True) == "e_score_correction_bias is not the source's"


def test_a_router_that_is_no_single_matrix_is_kept_and_said_to_be(tmp_path: Path) -> None:
    report = small(tiny("glm5_ref", tmp_path / "m"), tmp_path / "w", quant={"refit_router": True})
    assert report.routers == {}
    assert any("router kept: it is no single matrix" in note for note in report.notes)
