"""Shadows end to end on tiny models: what is bought, what it costs, what it does at run time, what is refused."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_calibrate import WORDS, sample_text, small
from support_journal import dequantized_twin
from support_models import read_tensors, rewrite, tiny, tiny_q3
from torch import Tensor

from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.finish import finish
from glm5_quant.calibrate.seen import Seen
from glm5_quant.calibrate.shadows import (
    Facts,
    ShadowFinder,
    Solution,
    candidate_bytes,
    candidate_count,
    fp16_bytes,
    shadowed,
)
from glm5_quant.model import export, load
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import Linear, family_of, linears
from glm5_quant.model.journal import FinishRecord, Journal, open_journal
from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.rotation import rotate

BUDGET = 0.05
FRESH = torch.tensor([list(b"31: not less than 640,000 and not more than 7.5% of the account, the limit of 9 is")])


def run(model: Path, work: Path, budget: float = BUDGET, **quant: Any) -> Journal:
    small(model, work, num_samples=24, quant={"shadow_budget": budget, "descent_sweeps": 0, **quant})
    return open_journal(work / "calibration")


@pytest.fixture(scope="module")
def q3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and the work folder of its calibration with shadows."""
    folder = tmp_path_factory.mktemp("q3")
    model = tiny_q3(folder / "m")
    run(model, folder / "w")
    return model, folder / "w"


def copied(work: Path, folder: Path) -> Journal:
    shutil.copytree(work, folder, dirs_exist_ok=True)
    return open_journal(folder / "calibration")


def bought(journal: Journal) -> dict[str, Tensor]:
    return {name.removeprefix("eampq/"): tensor for name, tensor in load_file(journal.shadow_file).items()}


def offered(model: Path) -> int:
    checkpoint = open_checkpoint(model)
    family = family_of(checkpoint.config)
    return fp16_bytes(shadowed(linears(checkpoint, family), family))


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    out: Tensor = load(folder, dtype=torch.float32, backend="reference")(FRESH).logits
    return out


def test_what_is_spent_is_what_lies_in_the_file_and_never_more_than_the_budget(q3: tuple[Path, Path]) -> None:
    journal = open_journal(q3[1] / "calibration")
    record, tensors = journal.finish_record(), bought(journal)
    assert record.budget_bytes == int(BUDGET * offered(q3[0])) == int(BUDGET * record.expert_fp16_bytes)
    assert record.spent_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert record.budget_bytes - 2 * (2 * 128 + 4) < record.spent_bytes <= record.budget_bytes
    assert record.columns == sum(len(tensor) for name, tensor in tensors.items() if name.endswith("index"))
    # Codes, a bf16 scale and half a byte of zero-point for each 64 weights, two int64 for each of 24 matrices.
    assert record.expert_int4_bytes == 8 * 3 * (64 * 128 // 2 + 128 * 2 + 128 // 2 + 16)


def test_candidates_are_a_few_times_the_even_share_and_cost_no_final_byte(q3: tuple[Path, Path]) -> None:
    journal = open_journal(q3[1] / "calibration")
    offers = load_file(journal.candidates_file(0))
    assert {len(t) for n, t in offers.items() if n.endswith("down_proj.channels")} == {candidate_count(64, BUDGET)}
    assert candidate_count(64, BUDGET) == 13
    assert candidate_count(128, 1.0) == 128
    assert candidate_count(128, 0.0) == 0
    assert not any("channels" in name for name in load_file(journal.layer_file(0)))
    checkpoint = open_checkpoint(q3[0])
    items = [item for item in linears(checkpoint, family_of(checkpoint.config)) if f"{item.name}.facts" in offers]
    # An expert without held-out tokens stores no change on them, 8 bytes a column.
    unjudged = sum(len(offers[f"{m.name}.channels"]) for m in items if not len(offers[f"{m.name}.unseen"]))
    assert candidate_bytes(items, BUDGET) == sum(tensor.nbytes for tensor in offers.values()) + 8 * unjudged


def test_int8_buys_nearly_twice_the_columns(q3: tuple[Path, Path], tmp_path: Path) -> None:
    journal = run(q3[0], tmp_path, shadow_dtype="int8")
    record, tensors = journal.finish_record(), bought(journal)
    assert record.spent_bytes == sum(tensor.nbytes for tensor in tensors.values()) <= record.budget_bytes
    assert record.columns > 1.8 * open_journal(q3[1] / "calibration").finish_record().columns
    assert {t.dtype for n, t in tensors.items() if n.endswith("shadow_weight")} == {torch.int8}


@pytest.mark.parametrize("rotation", ["none", "full"])
def test_the_runtime_computes_what_a_dense_model_with_the_residual_pasted_in_does(
    rotation: str, q3: tuple[Path, Path], tmp_path: Path
) -> None:
    model, work = q3
    if rotation == "full":
        work = tmp_path
        run(model, work, rotation=rotation)
    journal = open_journal(work / "calibration")
    export(model, journal.folder, tmp_path / "export")
    twin = dequantized_twin(model, tmp_path / "export", tmp_path / "twin")
    plain = logits_of_twin(twin)
    compensate_nothing(tmp_path / "export")
    paste(bought(journal), twin, rotated=rotation == "full")
    computed = logits(tmp_path / "export")
    torch.testing.assert_close(computed, logits_of_twin(twin), rtol=1e-4, atol=2e-5)
    assert float((computed - plain).abs().max()) > 1e-4


@torch.no_grad()
def test_experts_come_closer_to_the_source_on_text_that_calibration_did_not_see(
    q3: tuple[Path, Path], tmp_path: Path
) -> None:
    """What the quantized model's experts return in its own stream, against the source's in the source's. Experts that
    make up for what the stream lacks return something else on purpose: not here."""
    model, _ = q3
    run(model, tmp_path, correct_stream=False)
    journal = open_journal(tmp_path / "calibration")
    export(model, journal.folder, tmp_path / "export")
    twin = dequantized_twin(model, tmp_path / "export", tmp_path / "twin")
    wanted, _ = expert_calls(model)
    inputs, without = expert_calls(twin)
    paste(bought(journal), twin)
    _, with_them = expert_calls(twin)
    errors = torch.zeros(2)
    for (routed, target), (own, _), old, new in zip(wanted, inputs, without, with_them, strict=True):
        outputs = (module(own[0], *routed[1:]) for module in (old, new))
        errors += torch.stack([(out - target).square().sum() / target.square().sum() for out in outputs])
    # Half of this error comes with the inputs: the attention before is quantized, and has no shadows.
    assert float(errors[1]) < 0.98 * float(errors[0])


@torch.no_grad()
def expert_calls(folder: Path) -> tuple[list[tuple[tuple[Tensor, ...], Tensor]], list[Any]]:
    """What each layer's experts are called with and return over unseen text, and these modules."""
    model = load(folder, dtype=torch.float32)
    modules = [layer.mlp.experts for layer in model.model.layers]
    calls: list[tuple[tuple[Tensor, ...], Tensor]] = []
    for module in modules:
        module.register_forward_hook(lambda _module, args, out: calls.append((args, out)))
    model(torch.tensor([list(f"{i}: {WORDS}".encode())[:64] for i in range(900, 932)]))
    return list(calls), modules


def paste(shadows: dict[str, Tensor], folder: Path, *, rotated: bool = False) -> None:
    """Add every residual to the plain weights of a folder."""
    tensors = load_file(folder / "model.safetensors")
    for name in (n.removesuffix(".shadow_index") for n in shadows if n.endswith("index")):
        pasted = torch.zeros_like(tensors[f"{name}.weight"])
        pasted[:, shadows[f"{name}.shadow_index"].long()] = shadows[f"{name}.shadow_weight"].float()
        tensors[f"{name}.weight"] += rotate(pasted) if rotated else pasted
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def logits_of_twin(folder: Path) -> Tensor:
    out: Tensor = load(folder, dtype=torch.float32)(FRESH).logits
    return out


def compensate_nothing(folder: Path) -> None:
    """Set every gain of an export to 0, so that only shadows are seen."""
    for path in (folder / "eampq").glob("*.safetensors"):
        tensors = load_file(path)
        save_file({n: t * 0 if n.endswith("gain") else t for n, t in tensors.items()}, path, {"format": "pt"})


def linear_of(name: str, n: int, k: int) -> Linear:
    return Linear(name, 0, name.rpartition(".")[2], 3, False, n, k, f"{name}.weight", (None, 0, n), name, "mlp.experts")


@pytest.mark.parametrize("turned", [False, True])
def test_what_a_layer_offers_is_what_its_tokens_say(turned: bool) -> None:
    """Reference: float64, token by token. Residuals are fitted on the first 200 tokens, judged on the other 100."""
    torch.manual_seed(1 + turned)
    k, n, held_from = 64, 6, 200
    x = torch.randn(300, k) @ (torch.eye(k) + torch.randn(k, k) / 6)
    source, lack, weight_T = x + 0.2 * torch.randn(300, k), torch.randn(300, n), torch.rand(300) + 0.5
    seen = Seen(rotated=True, scale_K=torch.rand(k) + 0.5) if turned else Seen()
    names = ["net.down"] if turned else ["net.gate", "net.up"]
    evidence = Evidence.empty(k, tokens=300, held_from=held_from, gap=True, device="cpu", writes=n if turned else 0)
    evidence.add(x, source, 0, weight_T, lack)
    (part,) = evidence.parts
    held_lack, held, total = part.lacks()[1], part.held, part.total()
    weights = [torch.randn(n, k) for _ in names]
    target = seen.weight(torch.cat(weights))
    restored = (target * 1.5).round() / 1.5
    hessian = seen.moments(total.hessian_KK)
    finder = ShadowFinder(config=QuantConfig(shadow_budget=0.015), names=frozenset({*names, "net.down"}))
    solution = Solution(
        weights_NK=weights,
        target_NK=target,
        restored_NK=restored,
        hessian_KK=hessian,
        total=total,
        held=held,
        held_lack_NK=held_lack,
        seen=seen,
    )
    facts = [Facts(size=2.0 + i, wrong=0.0, held_size=5.0) for i in range(len(names))]
    finder.add([linear_of(name, n, k) for name in names], 0, solution, facts)

    z, w = seen.inputs(x).double(), weight_T.double()

    def moments(rows: slice) -> tuple[Tensor, float]:
        of, n_eff = w[rows], float(w[rows].sum() ** 2 / w[rows].square().sum())
        shrunk = (z[rows].T * of) @ z[rows] / of.sum() * n_eff / (k + n_eff)
        shrunk.diagonal().mul_((k + n_eff) / n_eff)
        return shrunk, 0.01 * float(hessian.diagonal().mean())

    for i, name in enumerate(names):
        rows = slice(i * n, (i + 1) * n)
        channels = finder.offers.tensors[f"{name}.channels"].long()
        assert len(set(channels.tolist())) == 4  # 4 x 1.5% of 64, rounded up
        error = (target - restored)[rows].double()
        everything, extra = moments(slice(0, 300))
        everything.diagonal().add_(extra)
        assert finder.facts[name].wrong == pytest.approx(float(((error @ everything) * error).sum()), rel=1e-4)
        fitted, extra = moments(slice(0, held_from))
        fitted.diagonal().add_(extra)
        missing = source.double() @ weights[i].double().T - x.double() @ seen.plain(restored)[rows].double().T
        missing = (missing + lack.double() if turned else missing)[held_from:]
        for count in range(1, 5):
            some = channels[:count]
            fit = (error @ fitted[:, some]) @ torch.linalg.inv(fitted[some][:, some])
            left = missing - z[held_from:, some] @ fit.T
            change = float(w[held_from:] @ (left.square().sum(1) - missing.square().sum(1)) / w[held_from:].sum())
            assert float(finder.offers.tensors[f"{name}.unseen"][count - 1]) == pytest.approx(change, rel=1e-3)


def test_a_networks_share_of_the_stream_is_the_mean_over_all_tokens() -> None:
    """Reference: c^2 |y|^2 / |h|^2 in float64, 0 for tokens that the network does not see."""
    torch.manual_seed(3)
    y, scale, hidden = torch.randn(3, 5), torch.tensor([0.5, 1.0, 2.0]), torch.randn(2, 4, 5)
    finder = ShadowFinder(config=QuantConfig(), names=frozenset({"net.gate", "net.down"}))
    facts = Facts(size=2.0, wrong=3.0, held_size=5.0)
    finder.facts |= {"net.gate": facts, "net.down": facts, "unseen.down": facts}
    finder.watch(linear_of("net.down", 5, 64), torch.tensor([0, 3, 6]), y, scale)
    finder.watch(linear_of("net.down", 5, 64), 1, 0.5 * y[:2], None)
    finder.watch(linear_of("other.down", 5, 64), 0, 1e6 * y, None)
    sizes = hidden.double().square().sum(-1).flatten()
    shares = (y.double() * scale[:, None]).square().sum(1) / sizes[[0, 3, 6]]
    share = float(shares.sum() + ((0.5 * y[:2].double()).square().sum(1) / sizes[1:3]).sum()) / 8
    peak = float(y.abs().max())
    offers = finder.finish(hidden).tensors
    for name in ("net.gate", "net.down"):
        assert offers[f"{name}.facts"].tolist() == pytest.approx([2.0, 3.0, 5.0, share, peak], rel=1e-5)
    assert offers["unseen.down.facts"].tolist() == [2.0, 3.0, 5.0, 0.0, 0.0]


def test_the_estimated_gain_is_confirmed_by_tokens_kept_out_of_the_fit(q3: tuple[Path, Path]) -> None:
    record = open_journal(q3[1] / "calibration").finish_record()
    assert 0 < record.gain < 1
    assert 0 < record.held_out_gain < 1.5 * record.gain


def test_a_gain_is_a_share_of_the_error_where_tokens_are_few_too(tmp_path: Path) -> None:
    """All columns of every matrix are bought, so all that shadows can take off is taken off."""
    small(tiny_q3(tmp_path / "m"), tmp_path / "w", num_samples=2, seqlen=32, quant={"shadow_budget": 1.0})
    gain = open_journal(tmp_path / "w" / "calibration").finish_record().gain
    assert 0.5 < gain <= 1.0 + 1e-6


def test_in_a_model_without_experts_every_mlp_may_have_shadows_and_attention_none(tmp_path: Path) -> None:
    journal = run(tiny("llama", tmp_path / "m"), tmp_path / "w")
    names = {name.split(".")[3] for name in bought(journal)}
    assert names == {"mlp"}
    assert journal.finish_record().expert_fp16_bytes == 2 * 2 * 3 * 128 * 192


def test_inputs_that_are_too_many_for_one_hessian_offer_columns_part_by_part(
    q3: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm5_quant.calibrate.evidence.LARGEST_HESSIAN", 64)
    monkeypatch.setattr("glm5_quant.calibrate.evidence.HESSIAN_BLOCK", 64)
    journal = run(q3[0], tmp_path)
    assert "model.layers.0.mlp.experts.0.gate_proj#64.reach" in load_file(journal.candidates_file(0))
    record, tensors = journal.finish_record(), bought(journal)
    assert record.spent_bytes == sum(tensor.nbytes for tensor in tensors.values()) <= record.budget_bytes
    indices = [tensor for name, tensor in tensors.items() if name.endswith("gate_proj.shadow_index")]
    assert all(len(set(index.tolist())) == len(index) for index in indices)
    assert any(int(index.min()) < 64 <= int(index.max()) for index in indices)
    assert 0 < record.held_out_gain < 1


def test_a_super_expert_is_kept_whole_and_comes_back_as_it_was(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    name = "model.layers.1.mlp.experts.2"
    rewrite(model, f"{name}.down_proj.weight", lambda weight: weight * 40)
    journal = run(model, tmp_path / "w", budget=0.2)
    record, tensors = journal.finish_record(), bought(journal)
    assert record.experts == [name]
    source = read_tensors(model)
    export(model, journal.folder, tmp_path / "export")
    twin = load_file(dequantized_twin(model, tmp_path / "export", tmp_path / "twin") / "model.safetensors")
    for role in ("gate_proj", "up_proj", "down_proj"):
        index, residual = (tensors[f"{name}.{role}.shadow_{kind}"] for kind in ("index", "weight"))
        whole = twin[f"{name}.{role}.weight"]
        whole[:, index.long()] += residual.float()
        torch.testing.assert_close(whole, source[f"{name}.{role}.weight"].float(), rtol=0, atol=5e-4)
    assert record.columns > 0


def test_no_budget_means_no_files_and_still_a_complete_journal(tmp_path: Path) -> None:
    journal = run(tiny_q3(tmp_path / "m"), tmp_path / "w", budget=0.0)
    assert journal.complete
    assert not journal.shadow_file.exists()
    assert not journal.candidates_file(0).exists()
    assert journal.finish_record().spent_bytes == 0


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_run_that_dies_after_the_last_layer_is_not_complete_and_only_redoes_the_last_step(
    q3: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = q3
    options: dict[str, Any] = {
        "num_samples": 24,
        "quant": {"shadow_budget": BUDGET, "descent_sweeps": 0},
        "dataset": sample_text(tmp_path),
    }

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("glm5_quant.calibrate.run.finish", die)
    with pytest.raises(KeyboardInterrupt):
        small(model, tmp_path / "w", **options)
    journal = open_journal(tmp_path / "w" / "calibration")
    assert journal.finished() == [0, 1]
    assert not journal.complete
    with pytest.raises(UserError, match="2 of 2 layers but not the step after the last"):
        export(model, journal.folder, tmp_path / "export")
    monkeypatch.setattr("glm5_quant.calibrate.run.finish", finish)
    assert small(model, tmp_path / "w", **options).layers_reused == 2
    assert journal.complete
    one = open_journal(whole / "calibration")
    assert digest(journal.shadow_file) == digest(one.shadow_file)
    assert journal.finish_file.read_bytes() == one.finish_file.read_bytes()


def test_a_layer_whose_shadows_fail_on_held_out_tokens_gets_none_and_others_get_its_bytes(
    q3: tuple[Path, Path], tmp_path: Path
) -> None:
    model, work = q3
    journal = copied(work, tmp_path)

    def finished(change: Callable[[Tensor], Tensor]) -> FinishRecord:
        """With what held-out tokens make of layer 0 changed so, while they find layer 1 a little better."""
        for layer, judged in ((0, change), (1, lambda t: -t.abs() - 1e-6)):
            path = journal.candidates_file(layer)
            save_file({n: judged(t) if n.endswith("unseen") else t for n, t in load_file(path).items()}, path)
        journal.finish_file.unlink()
        run(model, tmp_path)
        return journal.finish_record()

    before, after = finished(lambda t: -t.abs() - 1e-6), finished(lambda t: t.abs() + 1)
    assert before.refused_layers == []
    assert after.refused_layers == [0]
    assert all(".layers.1." in name for name in bought(journal))
    assert after.spent_bytes > before.spent_bytes - 2 * (2 * 128 + 4)


def test_export_refuses_shadows_that_are_not_what_was_written(q3: tuple[Path, Path], tmp_path: Path) -> None:
    model, work = q3
    journal = copied(work, tmp_path)
    data = bytearray(journal.shadow_file.read_bytes())
    data[-1] ^= 1
    journal.shadow_file.write_bytes(data)
    with pytest.raises(UserError, match=r"shadows are missing or not what was written.*Remove finish\.json"):
        export(model, journal.folder, tmp_path / "export")
    journal.finish_file.unlink()
    run(model, tmp_path)
    assert export(model, journal.folder, tmp_path / "export").sidecar_bytes > 0
