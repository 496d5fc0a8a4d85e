"""Random probes of an attention: moments against J^T g by hand, groups by head, and what calibration makes of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support_calibrate import small
from support_models import tiny
from torch import Tensor, nn

from glm5_quant.calibrate import attention
from glm5_quant.calibrate.probe import MOST_ROWS, Probe, Prober, groups_of
from glm5_quant.calibrate.taps import install
from glm5_quant.model.families import Linear
from glm5_quant.model.journal import open_journal
from glm5_quant.quant.rows import OutputMoments, RowFeedback


class Toy(nn.Module):
    """`a` and `b` read the input, `c` what they make: the output is c(a(x) * b(x)), and something beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4, bias=False), nn.Linear(6, 4), nn.Linear(4, 3)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.c(self.a(x) * self.b(x)), None


def test_gradients_of_random_probes_reach_the_moments_as_by_hand() -> None:
    toy, x, weight = Toy(), torch.randn(2, 5, 6), torch.rand(2, 5)
    linears = {name: (module.weight.clone(), module.bias) for name, module in toy.named_children()}
    found = {"a": OutputMoments.empty(2, 2), "b": OutputMoments.empty(1, 4)}
    handler = Prober(found, torch.float32)
    install(toy, {name: name for name in linears}, {name: pair[0] for name, pair in linears.items()}, handler)
    with torch.no_grad():
        out, beside = Probe(toy, weight, [7, 9])(x)
    a, b = x @ linears["a"][0].T, x @ linears["b"][0].T + linears["b"][1]
    torch.testing.assert_close(out, (a * b) @ linears["c"][0].T + linears["c"][1])
    assert beside is None
    assert not out.requires_grad

    drawn = torch.stack([torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in (7, 9)])
    drawn *= weight.sqrt()[..., None]
    inner = (drawn @ linears["c"][0]).flatten(0, 1)
    wanted = {"a": OutputMoments.empty(2, 2), "b": OutputMoments.empty(1, 4)}
    wanted["a"].add(inner * b.flatten(0, 1))
    wanted["b"].add(inner * a.flatten(0, 1))
    for name, one in found.items():
        torch.testing.assert_close(one.sum_GRR, wanted[name].sum_GRR)
        torch.testing.assert_close(one.n_eff, wanted[name].n_eff)


def test_without_weights_all_tokens_are_drawn_alike() -> None:
    toy, x = Toy(), torch.randn(1, 3, 6)
    out = Probe(nn.Identity(), None, [1])(x.clone().requires_grad_())
    torch.testing.assert_close(out, x)
    assert Probe(toy.requires_grad_(True), None, [1])(x)[0].shape == (1, 3, 3)


@pytest.mark.parametrize(
    ("role", "n", "groups"),
    [
        ("q_proj", 96, (6, 16)),
        ("k_proj", 32, (2, 16)),
        ("v_proj", 32, (2, 16)),
        ("q_b_proj", 144, (6, 24)),
        ("q_a_proj", 96, (1, 96)),
        ("kv_a_proj_with_mqa", 3 * MOST_ROWS, (3, MOST_ROWS)),
        ("kv_a_proj_with_mqa", 2054, (13, 158)),  # 2 * 13 * 79, and 1,027 rows are too many
        ("k_proj", 101, (1, 101)),
    ],
)
def test_rows_are_grouped_by_the_head_they_belong_to(role: str, n: int, groups: tuple[int, int]) -> None:
    linear = Linear("m", 0, role, None, False, n, 8, "m.weight", (None, 0, n), "m", f"self_attn.{role}")
    assert groups_of(linear, SimpleNamespace(num_attention_heads=6, hidden_size=96)) == groups
    if role in ("k_proj", "v_proj") and n == 32:
        assert groups_of(linear, SimpleNamespace(num_attention_heads=6, hidden_size=96, head_dim=8)) == (4, 8)


@pytest.mark.parametrize(("model_type", "count"), [("llama", 3), ("deepseek_v3", 3), ("glm_moe_dsa", 3), ("glm4", 3)])
def test_every_linear_before_the_output_is_probed_and_no_other(
    model_type: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[OutputMoments] = []
    of = RowFeedback.of

    def noted(moments: OutputMoments, damp: float, trust: float | None) -> RowFeedback:
        seen.append(moments)
        return of(moments, damp, trust)

    monkeypatch.setattr(attention.RowFeedback, "of", staticmethod(noted))
    model = tiny(model_type, tmp_path / "m")
    report = small(model, tmp_path / "w")
    assert len(seen) == count * report.layers
    assert all(bool((one.sum_GRR.diagonal(dim1=-2, dim2=-1).sum(-1) > 0).all()) for one in seen)
    assert all(bool((one.n_eff > 16).all()) for one in seen)


def test_the_switch_changes_codes_before_the_output_and_keeps_those_of_eight_bits(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")
    journals = {}
    runs: dict[str, dict[str, Any]] = {
        "on": {},
        "again": {},
        "off": {"quant": {"probed_tokens": 0}},
        "eight": {"int8": ("attention",)},
    }
    for name, options in runs.items():
        journals[name] = open_journal(small(model, tmp_path / name, **options).journal)
    codes = {name: load_file(journal.layer_file(0)) for name, journal in journals.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"model.layers.0.self_attn.{name}.weight_packed"
        assert torch.equal(codes["on"][key], codes["again"][key])
        assert not torch.equal(codes["on"][key], codes["off"][key])
        assert codes["eight"][key].shape[1] > codes["on"][key].shape[1]
    on, off = (journals[name].record(0).modules["model.layers.0.self_attn.q_proj"] for name in ("on", "off"))
    assert on.error != off.error


@pytest.mark.parametrize(("tokens", "windows"), [(1, 1), (64, 1), (65, 2), (10_000, 8)])
def test_as_many_windows_are_probed_as_tokens_are_asked_for_whatever_the_chunks(
    tokens: int, windows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: dict[int, list[int]] = {}
    sums: dict[int, list[Tensor]] = {}
    init, of = Probe.__init__, RowFeedback.of
    model = tiny("llama", tmp_path / "m")
    for chunk in (3, 8):
        seeds[chunk], sums[chunk] = [], []

        def noted(probe: Probe, module: nn.Module, weight: Tensor | None, own: list[int], at: int = chunk) -> None:
            seeds[at] += own
            init(probe, module, weight, own)

        def kept(moments: OutputMoments, damp: float, trust: float | None, at: int = chunk) -> RowFeedback:
            sums[at].append(moments.sum_GRR.clone())
            return of(moments, damp, trust)

        with monkeypatch.context() as patched:
            patched.setattr(Probe, "__init__", noted)
            patched.setattr(attention.RowFeedback, "of", staticmethod(kept))
            ranges = [(first, min(first + chunk, 8)) for first in range(0, 8, chunk)]
            patched.setattr("glm5_quant.calibrate.plan.Plan.chunks", lambda _, __, ranges=ranges: ranges)
            report = small(model, tmp_path / str(chunk), quant={"probed_tokens": tokens, "alphas": ()}, seed=3)
    assert seeds[3] == seeds[8]
    assert len(set(seeds[8])) == windows * report.layers
    for one, other in zip(sums[3][:3], sums[8][:3], strict=True):  # the first layer's: later ones see other roundings
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().amax()))


def test_an_attention_that_clips_in_place_is_probed(tmp_path: Path) -> None:
    report = small(tiny("olmoe", tmp_path / "m", clip_qkv=0.5), tmp_path / "w")
    assert report.layers


def test_without_shrinkage_moments_between_rows_are_not_shrunk_either() -> None:
    moments = OutputMoments.empty(1, 4)
    moments.add(torch.randn(3, 4, generator=torch.Generator().manual_seed(2)))
    plain, shrunk = (RowFeedback.of(moments, 0.01, trust) for trust in (None, 1.0))
    scaled_GRR = moments.sum_GRR / moments.sum_GRR.diagonal(dim1=-2, dim2=-1).mean()
    for feedback, equal in ((plain, True), (shrunk, False)):
        found_GRR = feedback.root_GRR @ feedback.root_GRR.transpose(1, 2)
        off = (found_GRR - scaled_GRR).masked_fill(torch.eye(4, dtype=torch.bool), 0.0)
        assert (float(off.abs().amax()) < 1e-5) == equal
