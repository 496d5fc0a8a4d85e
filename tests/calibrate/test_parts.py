"""Taps, streams, coverage, evidence: the parts a layer is solved with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glm5_quant.calibrate.coverage import by_expert, summarize
from glm5_quant.calibrate.evidence import Evidence
from glm5_quant.calibrate.settings import Settings, parse_bytes, quant_config
from glm5_quant.calibrate.stream import Stream, relative_weights, scratch
from glm5_quant.calibrate.taps import Keep, Recorder, Replay, Solver, StageReached, install, slice_norms, swapped
from glm5_quant.model.errors import UserError


class Toy(nn.Module):
    """Three linears: a and b read one input, c reads what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 3), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.a(x)) + self.b(x))
        return out


def test_recorder_groups_linears_by_the_input_they_read_and_changes_no_result() -> None:
    toy, x = Toy(), torch.randn(5, 4)
    expected = toy(x)
    recorder = Recorder(torch.float32)
    weights = {f"L.{name}": module.weight.detach() for name, module in toy.named_children()}
    install(toy, {"a": "L.a", "b": "L.b", "c": "L.c"}, weights, recorder)
    assert torch.equal(toy(x), expected)
    assert recorder.groups == [["L.a", "L.b"], ["L.c"]]
    assert torch.equal(recorder.inputs[0], x)


def test_recorder_names_the_linear_whose_output_is_returned_as_it_is_and_starts_anew() -> None:
    toy, x = Toy(), torch.randn(5, 4)
    recorder = Recorder(torch.float32)
    weights = {name: module.weight.detach() for name, module in toy.named_children()}
    install(toy, {name: name for name in weights}, weights, recorder)
    inputs = recorder.take((toy(x), None))
    assert [tuple(one.shape) for one in inputs] == [(5, 4), (5, 3)]
    assert (recorder.returned, recorder.rest, recorder.inputs) == ("c", (None,), [])
    assert len(recorder.take((2 * toy(x), None))) == 2
    assert recorder.returned is None
    recorder.take((toy(x), torch.ones(1)))
    assert recorder.returned is None
    assert recorder.groups == [["a", "b"], ["c"]]


def test_a_forward_stops_at_the_first_linear_that_is_not_solved_and_goes_through_those_that_are() -> None:
    toy, x = Toy(), torch.randn(6, 4)
    solved = {"a": torch.randn(3, 4), "b": torch.randn(3, 4), "c": torch.randn(2, 3)}
    solver = Solver(torch.float32)
    taps = install(toy, {name: name for name in solved}, dict.fromkeys(solved, torch.zeros(1, 1)), solver)
    with pytest.raises(StageReached) as stage:
        toy(x)
    assert stage.value.x is x
    solver.solved |= {name: solved[name] for name in "ab"}
    middle = torch.tanh(x @ solved["a"].T + taps["a"].bias) + x @ solved["b"].T
    with pytest.raises(StageReached) as stage:
        toy(x)
    assert torch.allclose(stage.value.x, middle, atol=1e-6)
    solver.solved["c"] = solved["c"]
    assert torch.allclose(toy(x), middle @ solved["c"].T + taps["c"].bias, atol=1e-6)


def test_swapped_modules_come_back_even_after_an_error() -> None:
    toy = Toy()
    original = toy.a
    with pytest.raises(RuntimeError), swapped(toy, {"a": Keep()}):
        raise RuntimeError
    assert toy.a is original


def test_replay_gives_its_output_the_shape_the_caller_works_in() -> None:
    stored = torch.arange(12.0).view(6, 2)
    assert Replay(stored)(torch.zeros(2, 3, 2)).shape == (2, 3, 2)
    assert Replay((stored, None))(torch.zeros(1)) == (stored, None)


def test_tokens_are_sorted_to_experts_in_ascending_order_with_their_router_weights() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [2, 0]])
    scale = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]])
    routed = by_expert(chosen, scale, 3)
    assert [index.tolist() for index in routed.index] == [[0, 1, 2], [], [0, 2]]
    assert [weight.tolist() for weight in routed.scale] == [
        pytest.approx([0.3, 0.6, 0.1]),
        [],
        pytest.approx([0.7, 0.9]),
    ]
    assert routed.counts == [3, 0, 2]


def test_coverage_counts_unseen_and_thin_experts_over_all_layers() -> None:
    coverage = summarize([[0, 10, 200], [5, 500, 0]], target=100)
    assert (coverage.unseen, coverage.below_target, coverage.least, coverage.experts) == (2, 4, 0, 6)
    assert "2 saw 0 tokens" in coverage.line
    assert summarize([], target=1).line == "no routed experts"


def test_held_out_tokens_are_kept_from_the_fit_and_join_the_total() -> None:
    x, source = torch.randn(10, 4), torch.randn(10, 4)
    evidence = Evidence.empty(4, tokens=10, held_from=6, gap=True, device="cpu")
    evidence.add(x[:8], source[:8], 0)
    evidence.add(x[8:], source[8:], torch.tensor([8, 9]))
    (part,) = evidence.parts
    assert (part.fit.tokens, part.held.tokens, evidence.tokens) == (6, 4, 10)
    assert torch.allclose(part.held.hessian_KK, x[6:].T @ x[6:] / 4, atol=1e-6)
    total = part.total()
    assert torch.allclose(total.hessian_KK, x.T @ x / 10, atol=1e-6)
    assert total.gap_KK is not None
    assert torch.allclose(total.gap_KK, (source - x).T @ x / 10, atol=1e-6)


@pytest.mark.parametrize("tokens", [10, 200])
def test_what_the_stream_lacks_is_summed_over_the_followed_tokens_of_each_side(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm5_quant.calibrate.evidence.FEWEST_VALUES", 0)
    x, source, lack, weight = torch.randn(10, 4), torch.randn(7, 4), torch.randn(7, 3), torch.rand(10)
    evidence = Evidence.empty(4, tokens=tokens * 2, held_from=6, gap=True, device="cpu", writes=3)
    assert evidence.wants_lack
    source_weight = torch.randn(3, 4)
    evidence.of([source_weight]).add(x, source, 0, weight, lack)
    (part,) = evidence.parts
    step = evidence.stride
    assert step == (1 if tokens == 10 else 2)
    index = torch.arange(0, 10, step)
    fit, held = index[(index >= 3) & (index < 6)], index[index >= 6]
    for found, rows in zip(part.lacks(), (fit, held), strict=True):
        assert found is not None
        exact = (lack[rows - 3] * weight[rows, None]).T @ x[rows] / weight[rows].sum()
        torch.testing.assert_close(found, exact)
    apart = (source - x[3:]) @ source_weight.T
    exact_floor = (apart[held - 3].square().sum(1) * weight[held]).sum() / weight[held].sum()
    assert part.floor_of(0) == pytest.approx(float(exact_floor), rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_floor_is_the_mean_of_what_the_source_weight_makes_of_the_gap(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 held-out tokens, two or four at a time, of which the source stream follows the last 5."""
    monkeypatch.setattr("glm5_quant.calibrate.evidence.FLOOR_TOKENS", 2)
    x, source, weight_T = torch.randn(10, 4), torch.randn(5, 4), torch.rand(10) + 0.1
    weights = [torch.randn(3, 4), torch.randn(2, 4)]
    evidence = Evidence.empty(4, tokens=10, held_from=4, gap=True, device="cpu").of(weights)
    (part,) = evidence.parts
    assert part.floor_of(0) == 0.0
    evidence.add(x, source, 0, weight_T if weighted else None)
    w = weight_T[5:].double() if weighted else torch.ones(5, dtype=torch.float64)
    for number, weight_NK in enumerate(weights):
        moved_TN = ((source - x[5:]).double() @ weight_NK.double().T).square()
        assert part.floor_of(number) == pytest.approx(float((w @ moved_TN).sum() / w.sum()), rel=1e-5)
        row = float((w @ moved_TN)[1] / w.sum())
        assert part.floor_of(number, slice(1, 2)) == pytest.approx(row, rel=1e-5)


def test_scales_of_inputs_are_of_an_experts_own_tokens_and_of_its_layers_only_where_it_has_none() -> None:
    pool, own, none = (
        Evidence.empty(4, tokens=9, held_from=9, gap=False, device="cpu", sampled=True) for _ in range(3)
    )
    x = torch.randn(9, 4)
    pool.add(x, None, 0)
    own.add(3 * x[:2], None, 0)
    for evidence, sample in ((own, 3 * x[:2]), (none, x)):
        evidence.lean_on(pool, 2.0)
        assert evidence.sample is not None
        assert torch.equal(torch.cat(evidence.sample.parts), sample)


def test_inputs_that_are_not_finite_are_named_with_their_matrix() -> None:
    for bad in (float("nan"), float("inf")):
        for place in (0, 5):
            evidence = Evidence.empty(4, tokens=6, held_from=4, gap=True, device="cpu")
            x, source = torch.randn(6, 4), torch.randn(6, 4)
            evidence.add(x, source, 0)
            evidence.require_finite("m", torch.float32)
            source[place, 2] = bad
            evidence.add(x, source, 0)
            with pytest.raises(UserError, match="m: inputs hold NaN or infinite values"):
                evidence.require_finite("m", torch.float32)


def test_nothing_is_lacking_where_a_group_does_not_write_or_its_inputs_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not Evidence.empty(4, tokens=9, held_from=9, gap=True, device="cpu").wants_lack
    assert not Evidence.empty(4, tokens=9, held_from=9, gap=False, device="cpu", writes=2).wants_lack
    monkeypatch.setattr("glm5_quant.calibrate.evidence.LARGEST_HESSIAN", 3)
    assert not Evidence.empty(4, tokens=9, held_from=9, gap=True, device="cpu", writes=2).wants_lack


def test_with_tokens_in_plenty_every_second_one_is_taken_and_its_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5_quant.calibrate.evidence.FEWEST_VALUES", 480)
    assert Evidence.empty(2, tokens=480, held_from=8, gap=True, device="cpu").stride == 2
    monkeypatch.setattr("glm5_quant.calibrate.evidence.FEWEST_VALUES", 0)
    x, source = torch.randn(11, 2), torch.randn(11, 2)
    evidence = Evidence.empty(2, tokens=200, held_from=8, gap=True, device="cpu")
    assert evidence.stride == 2
    evidence.add(x, source[4:], 0)
    (part,) = evidence.parts
    assert (part.fit.tokens, part.held.tokens) == (4, 2)
    assert torch.allclose(part.fit.hessian_KK, x[0:8:2].T @ x[0:8:2] / 4, atol=1e-6)
    assert part.held.gap_KK is not None
    assert part.fit.gap_KK is not None
    assert torch.allclose(part.held.gap_KK, (source - x)[8::2].T @ x[8::2] / 2, atol=1e-6)
    assert torch.allclose(part.fit.gap_KK, (source - x)[4:8:2].T @ x[4:8:2] / 2, atol=1e-6)


@pytest.mark.parametrize("size", [11, 5, 3, 1])
def test_the_same_tokens_are_taken_however_they_are_cut(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5_quant.calibrate.evidence.FEWEST_VALUES", 0)
    x, source, weight = torch.randn(11, 2), torch.randn(7, 2), torch.rand(11)
    evidence = Evidence.empty(2, tokens=240, held_from=8, gap=True, device="cpu")
    assert evidence.stride == 3
    for start in range(0, 11, size):
        own = slice(start, start + size)
        evidence.add(x[own], source[max(start - 4, 0) : max(start + size - 4, 0)], start, weight[own])
    (part,) = evidence.parts
    assert (part.fit.tokens, part.held.tokens) == (3, 1)
    rows = torch.tensor([0, 3, 6])
    wanted = (x[rows] * weight[rows, None]).T @ x[rows] / weight[rows].sum()
    assert torch.allclose(part.fit.hessian_KK, wanted, atol=1e-6)
    gap_KK = part.fit.gap_KK
    assert gap_KK is not None
    assert torch.allclose(gap_KK, torch.outer(source[2] - x[6], x[6]), atol=1e-6)


def test_very_wide_inputs_are_kept_as_blocks_of_the_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5_quant.calibrate.evidence.LARGEST_HESSIAN", 8)
    monkeypatch.setattr("glm5_quant.calibrate.evidence.HESSIAN_BLOCK", 6)
    evidence = Evidence.empty(16, tokens=5, held_from=100, gap=False, device="cpu")
    x = torch.randn(5, 16)
    evidence.add(x, None, 0)
    assert [part.columns for part in evidence.parts] == [slice(0, 6), slice(6, 12), slice(12, 16)]
    assert torch.allclose(evidence.parts[1].fit.hessian_KK, x[:, 6:12].T @ x[:, 6:12] / 5, atol=1e-6)


def test_a_stream_appears_whole_and_opens_with_the_same_values(tmp_path: Path) -> None:
    stream = Stream(folder=tmp_path / "s", name="quantized", shape=(2, 3, 4))
    values = torch.randn(2, 3, 4)
    stream.create(1).copy_(values)
    assert not stream.path(1).exists()
    stream.commit(1, torch.tensor([[1, 2], [3, 4]]))
    again = Stream(folder=tmp_path / "s", name="quantized", shape=(2, 3, 4))
    assert torch.equal(again.open(1), values)
    assert again.side is not None
    assert again.side.tolist() == [[1, 2], [3, 4]]
    stream.drop(1)
    assert list((tmp_path / "s").iterdir()) == []


def test_a_cut_stream_file_is_refused_by_name_and_size(tmp_path: Path) -> None:
    stream = Stream(folder=tmp_path, name="source", shape=(1, 2, 3))
    stream.path(0).write_bytes(b"1234")
    with pytest.raises(UserError, match=r"source\.00000\.bin.*4 bytes.*24 bytes"):
        stream.open(0)


def test_scratch_on_disk_leaves_no_file_behind(tmp_path: Path) -> None:
    buffer = scratch(tmp_path, (3, 5))
    buffer += 1
    assert float(buffer.sum()) == 15
    assert scratch(tmp_path, (0, 5)).shape == (0, 5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "count"), [("4GiB", 4 << 30), ("512M", 512 << 20), ("1000", 1000), ("1.5k", 1536)])
def test_sizes_are_read_in_powers_of_1024(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["lots", "-1G", "0", "4GG"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--max-memory"):
        parse_bytes(text)


def test_settings_refuse_bad_values_by_name() -> None:
    with pytest.raises(UserError, match="seqlen"):
        Settings(seqlen=1)
    with pytest.raises(UserError, match="held_out"):
        Settings(held_out=0.9)
    with pytest.raises(UserError, match="--preset"):
        quant_config("best")
    with pytest.raises(UserError, match="damp"):
        quant_config("default", damp=-1.0)


def test_norms_run_a_few_rows_at_a_time_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5_quant.calibrate.taps.SLICE_VALUES", 50)
    layer = nn.ModuleDict({"inner": nn.ModuleDict({"q_norm": nn.RMSNorm(8).bfloat16()}), "proj": nn.Linear(8, 8)})
    norm, x = layer["inner"]["q_norm"], torch.randn(7, 2, 8).bfloat16()
    whole = norm(x)
    calls: list[int] = []
    norm.register_forward_pre_hook(lambda _module, args: calls.append(len(args[0])))
    slice_norms(layer)
    torch.testing.assert_close(layer["inner"]["q_norm"](x), whole, rtol=0, atol=0)
    assert calls == [3, 3, 1]
    assert isinstance(layer["proj"], nn.Linear)
    assert layer["inner"]["q_norm"](x[:0]).shape == (0, 2, 8)


def test_tokens_of_almost_nothing_do_not_outweigh_all_others() -> None:
    energy = torch.tensor([4.0, 0.0, 2.0, 1e-30, 8.0, 4e6])
    assert relative_weights(energy).tolist() == pytest.approx([0.25, 2500.0, 0.5, 2500.0, 0.125, 2.5e-7])
    assert relative_weights(torch.zeros(2)).tolist() == [1.0, 1.0]
