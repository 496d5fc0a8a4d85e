"""How a calibration starts: one run at a time, nothing half-written, and refusals in the first second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support_calibrate import sample_text, small
from support_models import edit_config, tiny, tiny_q3

from glm5_quant.calibrate import lock
from glm5_quant.calibrate.lock import only_run
from glm5_quant.calibrate.plan import make_plan
from glm5_quant.calibrate.settings import Settings, quant_config
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.journal import open_journal


def test_a_second_run_in_the_same_folder_is_refused_by_process(tmp_path: Path) -> None:
    model = tiny_q3(tmp_path / "m")
    with only_run(tmp_path / "w"), pytest.raises(UserError, match=rf"another run \(process {os.getpid()}\)"):
        small(model, tmp_path / "w")
    assert not (tmp_path / "w" / "calibration").exists()
    small(model, tmp_path / "w")
    assert not (tmp_path / "w" / lock.NAME).exists()


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib, sys\n"
        "from glm5_quant.calibrate.lock import only_run\n"
        "with only_run(pathlib.Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert (tmp_path / lock.NAME).exists()
    with only_run(tmp_path):
        assert (tmp_path / lock.NAME).read_text() == str(os.getpid())
    assert not (tmp_path / lock.NAME).exists()


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
    with pytest.raises(UserError, match="must lie outside the model's"):
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


@pytest.mark.parametrize("device", ["cuda", "gpu0"])
def test_another_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(UserError, match=rf"device.*found {device}; expected cpu"):
        Settings(device=device)


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
