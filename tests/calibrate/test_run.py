"""`calibrate` on tiny models: what it writes, how it goes on after a stop, what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support_calibrate import sample_text, small
from support_models import OVERRIDES, byte_tokenizer, read_tensors, rewrite, tiny, tiny_glm, tiny_q3

from glm5_quant.calibrate.plan import make_plan
from glm5_quant.calibrate.run import StoppedSafely, token_weight
from glm5_quant.calibrate.settings import Settings
from glm5_quant.calibrate.taps import Recorder
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import family_of, linears, read_linear
from glm5_quant.model.journal import Journal, open_journal
from glm5_quant.model.layers import LayerRunner
from glm5_quant.quant.grid import Grid, dequantize
from glm5_quant.quant.packing import unpack_codes, unpack_zeros
from glm5_quant.quant.rotation import rotate


def restored(journal: Journal, layer: int, name: str) -> torch.Tensor:
    """A linear's dequantized weight, from the journal alone."""
    tensors = load_file(journal.layer_file(layer))
    n, k = tensors[f"{name}.weight_shape"].tolist()
    zero = tensors.get(f"{name}.weight_zero_point")
    grid = Grid(
        scale=tensors[f"{name}.weight_scale"].float(),
        zero=torch.full((n, -(-k // 64)), 8, dtype=torch.uint8) if zero is None else unpack_zeros(zero, n),
    )
    return dequantize(unpack_codes(tensors[f"{name}.weight_packed"], k), grid)


def digest(work: Path) -> dict[str, str]:
    files = sorted((work / "calibration" / "layers").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("model_type", [name for name in OVERRIDES if name != "glm5_ref"])
def test_every_family_is_calibrated_with_every_linear_in_the_journal(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type, tmp_path / "m")
    report = small(model, tmp_path / "w")
    journal = open_journal(tmp_path / "w" / "calibration")
    assert journal.complete
    checkpoint = open_checkpoint(model)
    expected = {item.name for item in linears(checkpoint, family_of(checkpoint.config))}
    found = {name for layer in journal.finished() for name in journal.record(layer).modules}
    assert found == expected
    assert report.modules == len(expected)
    assert not (tmp_path / "w" / "calibration" / "stream").exists()


def test_error_feedback_beats_round_to_nearest_on_the_tokens_it_saw(tmp_path: Path) -> None:
    report = small(tiny("llama", tmp_path / "m"), tmp_path / "w", num_samples=32)
    assert len(report.roles) == 7
    for role in report.roles:
        assert role.error < 0.9 * role.error_rtn, role


@pytest.mark.parametrize(("model_type", "tolerance"), [("llama", 1e-5), ("glm4_moe", 0.05)])
def test_the_quantized_stream_is_the_layers_run_with_the_journals_weights(
    model_type: str, tolerance: float, tmp_path: Path
) -> None:
    """The runner fills a layer with dequantized weights and adds its compensation; what comes out is the stream.

    With experts only nearly: both streams replay the source's routing, the runner routes by itself.
    """
    model = tiny(model_type, tmp_path / "m", dtype=torch.float32)
    kept: dict[str, torch.Tensor] = {}

    def keep_stream(done: object) -> None:
        folder = tmp_path / "w" / "calibration" / "stream"
        for path in folder.glob("quantized.*.bin"):
            kept[path.name] = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(8, 64, 128)

    small(model, tmp_path / "w", progress=keep_stream)
    checkpoint = open_checkpoint(model)
    runner = LayerRunner(checkpoint, family_of(checkpoint.config))
    layer = runner.load_layer(1)
    journal = open_journal(tmp_path / "w" / "calibration")
    for item in runner.linears[1]:
        weight = restored(journal, 1, item.name)
        if item.expert is None:
            layer.get_submodule(item.module).weight.copy_(weight)
        else:
            stack = layer.mlp.experts.down_proj if item.role == "down" else layer.mlp.experts.gate_up_proj
            first = item.n if item.role == "up" else 0
            stack[item.expert, first : first + item.n] = weight
    ids = torch.zeros(8, 64, dtype=torch.long)
    out, _ = runner.run_layer(layer, kept["quantized.00001.bin"], runner.kwargs_for(ids)[1])
    tensors, name = load_file(journal.layer_file(1)), "eampq/model.layers.1.compensation"
    if name in tensors:
        out = out + tensors[f"{name}_gain"] * tensors[name]
    stream = kept["quantized.00002.bin"]
    far = (out - stream).norm(dim=-1) / stream.norm(dim=-1)
    assert float(far.median()) < tolerance


def test_same_command_gives_equal_bytes_and_so_do_two_threads(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    small(model, tmp_path / "a")
    small(model, tmp_path / "b")
    torch.set_num_threads(2)
    try:
        small(model, tmp_path / "c")
    finally:
        torch.set_num_threads(1)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") == digest(tmp_path / "c")


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
def test_many_chunks_solve_the_same_as_one(
    dtype: torch.dtype, off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention in chunks of two windows, experts in chunks of 100 tokens: equal up to the order of sums. In bfloat16
    each chunk's moments are rounded, and one other code changes all that follow: equally good, then. Polish would turn
    more codes on the order of sums."""
    monkeypatch.setattr("glm5_quant.calibrate.run.run_dtype", lambda *_: dtype)
    model = tiny("glm_moe_dsa", tmp_path / "m")
    small(model, tmp_path / "a", quant={"descent_sweeps": 0})

    def chopped(*args: object) -> object:
        plan = make_plan(*args)  # type: ignore[arg-type]
        return dataclasses.replace(plan, chunk_windows=3, chunk_tokens=100, memory_short=True)

    monkeypatch.setattr("glm5_quant.calibrate.run.make_plan", chopped)
    small(model, tmp_path / "b", quant={"descent_sweeps": 0})
    one, two = open_journal(tmp_path / "a" / "calibration"), open_journal(tmp_path / "b" / "calibration")
    for name in one.record(0).modules:
        same = (restored(one, 0, name) == restored(two, 0, name)).float().mean()
        assert float(same) > 0.999 or dtype == torch.bfloat16, name
        assert two.record(0).modules[name].error == pytest.approx(one.record(0).modules[name].error, rel=off)
    assert one.record(3).coverage == two.record(3).coverage


@pytest.mark.parametrize("model_type", ["llama", "glm4_moe"])
def test_an_attention_computed_from_what_its_last_linear_read_is_the_one_run_once_more(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, returned = tiny(model_type, tmp_path / "m"), set()
    take = Recorder.take

    def noted(self: Recorder, value: object) -> list[torch.Tensor]:
        inputs = take(self, value)
        returned.add(self.returned)
        return inputs

    def unknown(self: Recorder, value: object) -> list[torch.Tensor]:
        inputs, self.returned = take(self, value), None
        return inputs

    monkeypatch.setattr(Recorder, "take", noted)
    small(model, tmp_path / "a")
    assert "model.layers.1.self_attn.o_proj" in returned
    monkeypatch.setattr(Recorder, "take", unknown)
    small(model, tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_windows_before_those_that_the_source_stream_follows_may_fill_whole_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", tmp_path / "m", dtype=torch.float32)
    monkeypatch.setattr("glm5_quant.calibrate.plan.SOURCE_TOKENS_PER_CHANNEL", 1)
    errors = []
    for chunk_windows in (8, 2):

        def chopped(*args: object, count: int = chunk_windows) -> object:
            return dataclasses.replace(make_plan(*args), chunk_windows=count)  # type: ignore[arg-type]

        monkeypatch.setattr("glm5_quant.calibrate.run.make_plan", chopped)
        small(model, tmp_path / str(chunk_windows), quant={"descent_sweeps": 0})
        journal = open_journal(tmp_path / str(chunk_windows) / "calibration")
        errors.append([module.held_out_error or 0.0 for module in journal.record(1).modules.values()])
    assert any(errors[0])
    assert errors[1] == pytest.approx(errors[0], rel=1e-2)


def test_a_source_stream_over_the_last_windows_is_the_whole_ones_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a dense model the source stream may follow fewer windows: same layers, same gap up to the tokens left out."""
    model = tiny("llama", tmp_path / "m", dtype=torch.float32)
    kept: dict[str, torch.Tensor] = {}

    def keep_stream(done: object) -> None:
        for path in (tmp_path / name / "calibration" / "stream" for name in "ab"):
            for file in path.glob("source.*.bin"):
                kept[f"{path.parts[-3]}/{file.name}"] = torch.frombuffer(
                    bytearray(file.read_bytes()), dtype=torch.float32
                )

    small(model, tmp_path / "a", progress=keep_stream)
    monkeypatch.setattr("glm5_quant.calibrate.plan.SOURCE_TOKENS_PER_CHANNEL", 1)
    report = small(model, tmp_path / "b", progress=keep_stream)
    assert report.stream_error is not None
    whole, part = (kept[f"{name}/source.00002.bin"].view(-1, 64, 128) for name in "ab")
    assert (len(whole), len(part)) == (8, 4)
    assert torch.allclose(part, whole[-4:], atol=1e-6)


def test_a_run_killed_with_sigkill_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    model = byte_tokenizer_model(tmp_path)
    small(model, tmp_path / "whole", dataset=sample_text(tmp_path))
    work = tmp_path / "killed"
    code = (
        "import os, signal, sys, torch\n"
        "torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from support_calibrate import small\n"
        "import glm5_quant.calibrate.run as run\n"
        "keep = run.save_layer\n"
        "def dying(path, tensors, *parts):\n"
        "    if path.name == '00001.safetensors':\n"
        "        path.with_suffix('.part').write_bytes(b'half')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return keep(path, tensors, *parts)\n"
        "run.save_layer = dying\n"
        f"small(Path({str(model)!r}), Path({str(work)!r}), dataset=Path({str(tmp_path / 'sample.txt')!r}))\n"
    )
    support = str(Path(__file__).parents[1] / "support")
    environment = {**os.environ, "PYTHONPATH": support, "PYTHONSAFEPATH": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert open_journal(work / "calibration").finished() == [0]
    before = (work / "calibration" / "layers" / "00000.safetensors").stat().st_mtime_ns
    report = small(model, work, dataset=tmp_path / "sample.txt", resume="required")
    assert report.layers_reused == 1
    assert (work / "calibration" / "layers" / "00000.safetensors").stat().st_mtime_ns == before
    assert digest(work) == digest(tmp_path / "whole")


def byte_tokenizer_model(tmp_path: Path) -> Path:
    model = tiny_q3(tmp_path / "m")
    byte_tokenizer(model)
    return model


def test_a_run_asked_to_stop_ends_between_layers_and_goes_on_later(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    calls = iter([False, True])
    with pytest.raises(StoppedSafely, match="1 of 2 layers"):
        small(model, tmp_path / "w", should_stop=lambda: next(calls))
    assert small(model, tmp_path / "w").layers_reused == 1


def test_changed_inputs_are_named_and_refused(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    small(model, tmp_path / "w")
    with pytest.raises(UserError, match=r"settings\.quant\.symmetric"):
        small(model, tmp_path / "w", quant={"symmetric": True})
    with pytest.raises(UserError, match=r"data\.seqlen"):
        small(model, tmp_path / "w", seqlen=32)
    other = tmp_path / "other.txt"
    other.write_text("another text altogether, " * 100)
    with pytest.raises(UserError, match=r"data\.sha256"):
        small(model, tmp_path / "w", dataset=other)
    rewrite(model, "model.norm.weight", lambda weight: weight * 2)
    with pytest.raises(UserError, match=r"source\.shards\.model"):
        small(model, tmp_path / "w")
    assert small(model, tmp_path / "w", overwrite=True).layers_reused == 0


def test_a_folder_that_is_no_journal_is_not_emptied(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    stray = tmp_path / "w" / "calibration" / "thesis.txt"
    stray.parent.mkdir(parents=True)
    stray.write_text("do not delete")
    with pytest.raises(UserError, match="not empty"):
        small(model, tmp_path / "w")
    assert stray.exists()


def test_nothing_to_resume_is_an_error_only_when_resume_is_required(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        small(tiny_q3(tmp_path / "m"), tmp_path / "w", resume="required")


def test_o01_blocks_of_zeros_come_back_as_zeros_and_are_counted(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    down = "model.layers.1.mlp.experts.3.down_proj"
    query = "model.layers.0.self_attn.q_proj"

    def blank(weight: torch.Tensor) -> torch.Tensor:
        weight[5, :64] = 0
        return weight

    rewrite(model, f"{down}.weight", torch.zeros_like)
    rewrite(model, f"{query}.weight", blank)
    report = small(model, tmp_path / "w")
    journal = open_journal(tmp_path / "w" / "calibration")
    assert report.zero_blocks == {query: 1, down: 128}
    assert not restored(journal, 1, down).any()
    assert not restored(journal, 0, query)[5, :64].any()
    assert all(
        torch.isfinite(tensor.float()).all()
        for layer in (0, 1)
        for name, tensor in load_file(journal.layer_file(layer)).items()
        if name.endswith("weight_scale")
    )


def test_o02_a_block_too_small_for_fp16_keeps_its_relative_error(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    name = "model.layers.0.mlp.experts.1.gate_proj"
    rewrite(model, f"{name}.weight", lambda w: torch.cat([w[:, :64] * 1e-6, w[:, 64:]], dim=1))
    # Without error feedback, which rightly loads other columns' errors onto weights that hardly count.
    small(model, tmp_path / "w", quant={"error_feedback": False, "descent_sweeps": 0, "alphas": ()})
    source = open_checkpoint(model).read(f"{name}.weight", torch.float32)
    got = restored(open_journal(tmp_path / "w" / "calibration"), 0, name)
    first, rest = ((got - source)[:, part].norm() / source[:, part].norm() for part in (slice(0, 64), slice(64, 128)))
    assert float(first) < 2 * float(rest)


def test_o04_a_nan_weight_stops_the_run_naming_file_tensor_and_index(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")

    def damage(weight: torch.Tensor) -> torch.Tensor:
        weight[3, 7] = float("nan")
        return weight

    rewrite(model, "model.layers.0.mlp.experts.1.up_proj.weight", damage)
    with pytest.raises(UserError, match=r"safetensors.*experts\.1\.up_proj.*3, 7"):
        small(model, tmp_path / "w")


def starved(folder: Path) -> Path:
    """TINY-GLM whose expert 3 is never chosen."""

    def banish(bias: torch.Tensor) -> torch.Tensor:
        bias[3] = -1e4
        return bias

    return rewrite(tiny_glm(folder), "model.layers.1.mlp.gate.e_score_correction_bias", banish)


@pytest.mark.parametrize("preset", ["fast", "default"])
def test_o07_o08_an_expert_without_tokens_gets_finite_weights_of_the_same_format(preset: str, tmp_path: Path) -> None:
    model = starved(tmp_path / "m")
    report = small(model, tmp_path / "w", preset=preset)
    assert report.coverage.unseen == 1
    assert "1 saw 0 tokens" in report.coverage.line
    journal = open_journal(tmp_path / "w" / "calibration")
    tensors = load_file(journal.layer_file(1))
    cold = {n.replace("experts.3.", "experts.0."): t for n, t in tensors.items() if ".experts.3." in n}
    for name, tensor in cold.items():
        assert tensors[name].shape == tensor.shape
        assert tensors[name].dtype == tensor.dtype
    assert journal.record(1).modules["model.layers.1.mlp.experts.3.down_proj"].fallback is None
    checkpoint = open_checkpoint(model)
    for item in linears(checkpoint, family_of(checkpoint.config)):
        if item.expert == 3:
            source, got = read_linear(checkpoint, item, torch.float32), restored(journal, 1, item.name)
            assert float((got - source).norm() / source.norm()) < 0.15


def test_o08_unseen_experts_with_equal_weights_are_solved_equally(tmp_path: Path) -> None:
    """They share the layer's pooled statistics, which must not be used up by the first of them."""
    model = tiny_glm(tmp_path / "m")
    stored = read_tensors(model)
    prefix = "model.layers.1.mlp."

    def banish(bias: torch.Tensor) -> torch.Tensor:
        bias[2:] = -1e4
        return bias

    rewrite(model, f"{prefix}gate.e_score_correction_bias", banish)
    for part in ("gate_proj", "up_proj", "down_proj"):
        twin = stored[f"{prefix}experts.2.{part}.weight"]
        rewrite(model, f"{prefix}experts.3.{part}.weight", lambda _, twin=twin: twin.clone())
    report = small(model, tmp_path / "w")
    assert report.coverage.unseen == 2
    journal = open_journal(report.journal)
    for part in ("gate_proj", "up_proj", "down_proj"):
        two, three = (restored(journal, 1, f"{prefix}experts.{e}.{part}") for e in (2, 3))
        assert torch.equal(two, three), part
        records = journal.record(1).modules
        assert records[f"{prefix}experts.2.{part}"] == records[f"{prefix}experts.3.{part}"], part


def test_o07_all_experts_changes_the_token_counts(tmp_path: Path) -> None:
    model = starved(tmp_path / "m")
    small(model, tmp_path / "w", all_experts=True)
    records = open_journal(tmp_path / "w" / "calibration").record(1).modules
    assert records["model.layers.1.mlp.experts.3.up_proj"].tokens == 512
    assert records["model.layers.1.mlp.experts.3.up_proj"].fallback is None


def test_o08_an_expert_with_exactly_one_token_is_solved(tmp_path: Path) -> None:
    report = small(starved(tmp_path / "m"), tmp_path / "w", num_samples=1, seqlen=2, held_out=0.0)
    assert min(m.tokens for m in open_journal(report.journal).record(1).modules.values()) <= 1


def test_o25_a_cap_too_small_for_one_layer_is_refused_before_any_work(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    with pytest.raises(UserError, match=r"--max-memory.*at least"):
        small(model, tmp_path / "w", max_memory_bytes=1 << 20)
    assert not (tmp_path / "w" / "calibration").exists()


def test_o27_a_full_disk_gives_one_message_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_q3(tmp_path / "m")

    def full(tensor: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("glm5_quant.model.shards.tensor_bytes", full)
    with pytest.raises(UserError, match="No space left"):
        small(model, tmp_path / "w")
    assert list((tmp_path / "w" / "calibration" / "layers").iterdir()) == []


def test_codes_moved_to_disk_while_a_layer_is_solved_end_in_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_q3(tmp_path / "m")
    small(model, tmp_path / "a")
    monkeypatch.setattr("glm5_quant.calibrate.spill.SPILL_BYTES", 1)
    small(model, tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert not (tmp_path / "b" / "calibration" / "stream").exists()


def test_o27_a_plan_that_needs_more_disk_than_is_free_is_refused(tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(tiny_q3(tmp_path / "m")), Settings(), tmp_path / "w")
    with pytest.raises(UserError, match="too little free disk"):
        dataclasses.replace(plan, disk_free_bytes=1000).refuse_impossible()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_o27_a_read_only_work_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(UserError, match="cannot be written"):
        make_plan(open_checkpoint(tiny_q3(tmp_path / "m")), Settings(), tmp_path / "w")


def test_the_plan_reads_no_tensor_and_knows_sizes_exactly(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    started = time.monotonic()
    plan = make_plan(open_checkpoint(model), Settings(num_samples=8, seqlen=64), tmp_path / "w")
    assert time.monotonic() - started < 5
    small(model, tmp_path / "w")
    layers = tmp_path / "w" / "calibration" / "layers"
    stored = sum(tensor.nbytes for f in layers.glob("*.safetensors") for n, tensor in load_file(f).items())
    assert plan.journal_bytes == pytest.approx(stored, rel=0.05)
    assert plan.tokens_per_expert == 8 * 64 * 2 / 4


def test_fast_follows_one_stream_and_still_records_errors(tmp_path: Path) -> None:
    report = small(tiny("llama", tmp_path / "m"), tmp_path / "w", preset="fast")
    assert report.stream_error is None
    assert len(report.roles) == 7 and all(role.error < role.error_rtn for role in report.roles)


def test_full_rotation_stores_codes_of_the_rotated_weight(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")
    small(model, tmp_path / "w", quant={"rotation": "full"})
    name = "model.layers.0.mlp.down_proj"
    source = open_checkpoint(model).read(f"{name}.weight", torch.float32)
    got = restored(open_journal(tmp_path / "w" / "calibration"), 0, name)
    assert float((rotate(got) - source).norm() / source.norm()) < 0.15
    assert float((got - source).norm() / source.norm()) > 0.5


def test_numeric_tokens_and_those_before_them_weigh_more(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    byte_tokenizer(model)
    ids = torch.tensor([list(b"at 12% of it")])
    weight = token_weight(open_checkpoint(model), ids, 2.0)
    assert weight is not None
    assert weight.tolist() == [1, 1, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1]
    assert token_weight(open_checkpoint(model), ids, 0.0) is None
