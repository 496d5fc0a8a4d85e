"""How a calibration starts, goes on and ends: one run at a time, nothing half-written, refusals in the first second."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from support_calibrate import sample_text, small
from support_models import edit_config, read_tensors, rewrite, tiny, tiny_q3, write_tensors

from glm5_quant.calibrate.plan import make_plan
from glm5_quant.calibrate.run import StoppedSafely
from glm5_quant.calibrate.settings import Settings, quant_config
from glm5_quant.calibrate.spill import SPILL_BYTES, Spill
from glm5_quant.calibrate.stream import Stream
from glm5_quant.model import lock
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.journal import open_journal
from glm5_quant.quant.factor import order_columns
from glm5_quant.quant.target import ridge


def only_run(folder: Path) -> AbstractContextManager[None]:
    return lock.only_run(folder, lock.CALIBRATION, instead="use another --work-dir")


def test_a_second_run_in_the_same_folder_is_refused_by_process(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    with only_run(tmp_path / "w"), pytest.raises(UserError, match=rf"another run \(process {os.getpid()}\)"):
        small(model, tmp_path / "w")
    assert not (tmp_path / "w" / "calibration").exists()
    small(model, tmp_path / "w")
    assert not (tmp_path / "w" / lock.CALIBRATION).exists()


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib, sys\n"
        "from glm5_quant.model import lock\n"
        "with lock.only_run(pathlib.Path(sys.argv[1]), lock.CALIBRATION, instead=''):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (tmp_path / lock.CALIBRATION).exists()
    with only_run(tmp_path):
        assert (tmp_path / lock.CALIBRATION).read_text() == str(os.getpid())
    assert not (tmp_path / lock.CALIBRATION).exists()


def test_where_a_system_has_no_locks_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    with only_run(tmp_path / "w"):
        assert not (tmp_path / "w").exists()


def test_a_work_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/w: cannot be written"), only_run(tmp_path / "file" / "w"):
        pass


@pytest.mark.parametrize("inside", [".", "work", "deep/work"])
def test_a_work_folder_inside_the_model_is_refused(tmp_path: Path, inside: str) -> None:
    model = tiny_q3(tmp_path / "m")
    before = sorted(model.rglob("*"))
    with pytest.raises(UserError, match="must lie outside the model folder"):
        make_plan(open_checkpoint(model), Settings(), model / inside)
    assert sorted(model.rglob("*")) == before


def test_a_start_that_failed_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, work = tiny_q3(tmp_path / "m"), tmp_path / "w"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("glm5_quant.calibrate.run.write_record", full)
        with pytest.raises(UserError, match="No space left"):
            small(model, work)
    (work / "calibration" / "layers").mkdir(parents=True, exist_ok=True)  # what a kill at that moment leaves
    assert small(model, work).layers_reused == 0


def test_required_and_overwrite_contradict_each_other(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    small(model, tmp_path / "w")
    with pytest.raises(UserError, match="--resume required"):
        small(model, tmp_path / "w", resume="required", overwrite=True)
    assert open_journal(tmp_path / "w" / "calibration").complete


def test_starting_again_keeps_the_journal_of_other_inputs_unless_told(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    small(model, tmp_path / "w")
    with pytest.raises(UserError, match=r"settings\.quant\.symmetric"):
        small(model, tmp_path / "w", resume="never", quant={"symmetric": True})
    assert open_journal(tmp_path / "w" / "calibration").complete
    assert small(model, tmp_path / "w", resume="never").layers_reused == 0
    assert small(model, tmp_path / "w", resume="never", overwrite=True, quant={"symmetric": True}).layers_reused == 0


def test_names_that_are_no_utf8_are_recorded_readably(tmp_path: Path) -> None:
    text = sample_text(tmp_path)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    odd.write_bytes(text.read_bytes())
    small(tiny_q3(tmp_path / "m"), tmp_path / "w", dataset=odd)
    assert open_journal(tmp_path / "w" / "calibration").manifest.data.name.endswith(r"caf\xe9.txt")


def test_an_unknown_activation_is_refused_by_the_plan(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    edit_config(model, hidden_act="nosuch")
    with pytest.raises(UserError, match=r"config\.json: hidden_act.*found nosuch"):
        make_plan(open_checkpoint(model), Settings(), tmp_path / "w")


def test_the_plan_warns_of_windows_beyond_the_positions_and_of_blocks_that_eval_cannot_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama", tmp_path / "m", max_position_embeddings=128))
    plan = make_plan(checkpoint, Settings(seqlen=256, quant=quant_config("default", group_size=32)), tmp_path / "w")
    assert any("128 positions" in warning for warning in plan.warnings)
    assert any("blocks of 32" in warning and "64 only" in warning for warning in plan.warnings)
    assert not make_plan(checkpoint, Settings(seqlen=128), tmp_path / "w").warnings


def test_the_source_is_followed_over_as_many_windows_as_it_takes_however_many_there_are(tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(tiny("llama", tmp_path / "m")), Settings(seqlen=512), tmp_path / "w")
    widest = max(item.k for items in plan.by_layer.values() for item in items)
    needed = -(-20 * widest // 512)
    assert plan.source_windows(128, 8) == 8 + needed
    assert plan.source_windows(8 + needed - 1, 8) == 8 + needed - 1


def test_wide_models_are_followed_for_the_blocks_their_moments_are_kept_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glm5_quant.calibrate.plan.LARGEST_HESSIAN", 16)
    plan = make_plan(open_checkpoint(tiny("llama", tmp_path / "m")), Settings(seqlen=64), tmp_path / "w")
    assert plan.source_windows(128, 8) == 8 + 5


def test_blocks_that_do_not_fit_where_very_wide_inputs_are_cut_are_refused_by_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny("llama", tmp_path / "m"))
    monkeypatch.setattr("glm5_quant.calibrate.plan.LARGEST_HESSIAN", 150)
    for group_size, fits in ((64, True), (24, False)):
        settings = Settings(quant=quant_config("default", group_size=group_size))
        with nullcontext() if fits else pytest.raises(UserError, match=r"group_size.*24 for .*down_proj.*a divisor of"):
            make_plan(checkpoint, settings, tmp_path / "w")


def test_a_run_goes_on_with_other_chunks_than_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What shared indexers hand from layer to layer belongs to windows: a run killed for memory resumes with less."""
    model = tiny("glm_moe_dsa", tmp_path / "m", scale=0.2)
    whole = open_journal(small(model, tmp_path / "whole").journal)
    for name, chunks in (("fewer", (8, 2)), ("more", (2, 8))):
        calls = iter([False, True])
        for chunk in chunks:
            ranges = [(first, first + chunk) for first in range(0, 8, chunk)]
            with monkeypatch.context() as patched, suppress(StoppedSafely):
                patched.setattr("glm5_quant.calibrate.plan.Plan.chunks", lambda _, __, ranges=ranges: ranges)
                small(model, tmp_path / name, should_stop=lambda calls=calls: next(calls, False))
        journal = open_journal(tmp_path / name / "calibration")
        for layer in range(journal.manifest.layers):
            one, other = whole.record(layer), journal.record(layer)
            assert one.coverage is None or sum(one.coverage) == sum(other.coverage or [])
            assert other.stream_error == pytest.approx(one.stream_error, rel=0.2)


def test_a_run_goes_on_where_its_own_journal_has_taken_the_room_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", tmp_path / "m")
    needed = make_plan(open_checkpoint(model), Settings(num_samples=8, seqlen=64), tmp_path / "w").disk_needed_bytes
    room = needed + (1 << 16)

    def disk(folder: Path) -> SimpleNamespace:
        taken = sum(path.stat().st_size for path in (tmp_path / "w").rglob("*") if path.is_file())
        return SimpleNamespace(free=max(room - taken, 0))

    monkeypatch.setattr("glm5_quant.calibrate.plan.shutil.disk_usage", disk)
    calls = iter([False, True])
    with suppress(StoppedSafely):
        small(model, tmp_path / "w", should_stop=lambda: next(calls))
    assert disk(tmp_path).free < needed
    assert small(model, tmp_path / "w").layers_reused == 1
    room = 0
    with pytest.raises(UserError, match=r"too little free disk.* of the journal that is there"):
        small(model, tmp_path / "w")


def test_hidden_states_are_on_the_disk_before_the_record_of_their_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that goes down after a layer's record may lose what was not synced: the next run would not see it."""
    synced, sync = [], os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    model = tiny("glm_moe_dsa", tmp_path / "m")
    monkeypatch.setattr(os, "fsync", fsync)
    small(model, tmp_path / "w", num_samples=2)
    record = synced.index(".00000.json.part")
    parts = {f"{name}.00001.{kind}" for name in ("source", "quantized") for kind in ("part", "side.part")}
    assert parts <= set(synced[:record])
    assert "stream" in synced[:record]


def test_a_disk_that_fills_up_under_moved_codes_or_side_values_is_told_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("glm5_quant.calibrate.spill.save_file", full)
    stream = Stream(folder=tmp_path / "stream", name="source", shape=(1, 2, 3))
    stream.create(0)
    for write in (
        lambda: stream.commit(0, torch.zeros(2)),
        Spill(folder=tmp_path, tensors={"codes": torch.zeros(SPILL_BYTES // 4)}).spill,
    ):
        with pytest.raises(UserError, match=r"cannot be written .*No space left"):
            write()
    assert [path.name for path in tmp_path.rglob("*.part")] == ["source.00000.part"]


def test_a_layer_that_has_nothing_to_offer_as_a_shadow_ends_well(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "m")
    for role in ("gate", "up", "down"):
        rewrite(model, f"model.layers.0.mlp.{role}_proj.weight", torch.zeros_like)
    journal = open_journal(small(model, tmp_path / "w").journal)
    assert journal.complete
    assert journal.candidates_file(0).exists()


@pytest.mark.parametrize(
    ("name", "factor", "told"),
    [
        ("0.mlp.up_proj", 1e24, "layers.0.mlp.down_proj: inputs hold NaN or infinite values"),
        ("0.self_attn.v_proj", 1e24, "layers.0.self_attn.o_proj: inputs hold NaN"),
        ("1.mlp.down_proj", 1e38, "layer 1: outputs hold NaN or infinite values in the quantized stream"),
    ],
)
def test_a_model_that_overflows_is_told_by_matrix_or_layer(name: str, factor: float, told: str, tmp_path: Path) -> None:
    model = rewrite(
        tiny("llama", tmp_path / "m", dtype=torch.float32, scale=0.2),
        f"model.layers.{name}.weight",
        lambda weight: weight * factor,
    )
    with pytest.raises(UserError, match=told):
        small(model, tmp_path / "w", preset="fast", num_samples=2)
    assert open_journal(tmp_path / "w" / "calibration").finished() == [0][: name.startswith("1")]


def test_inputs_that_overflow_are_an_error_and_no_endless_search() -> None:
    broken = torch.eye(4)
    broken[1, 2] = broken[2, 1] = torch.inf
    for call in (lambda: ridge(torch.ones(2, 4), broken, 0.2), lambda: order_columns(broken[None], 0.01)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            call()


def test_a_model_that_is_quantized_already_is_called_that(tmp_path: Path) -> None:
    """It was "12 tensors are not in the checkpoint", which sends one to look for a broken download."""
    model = tiny_q3(tmp_path / "m")
    name = "model.layers.0.self_attn.q_proj"
    tensors = read_tensors(model)
    tensors[f"{name}.weight_packed"] = tensors.pop(f"{name}.weight")
    write_tensors(model, tensors)
    edit_config(model, quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(UserError, match=r"quantized already; found compressed-tensors.*Start from the original model"):
        make_plan(open_checkpoint(model), Settings(), tmp_path / "w")
