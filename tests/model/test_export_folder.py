"""Export: its output folder is whole or absent, whatever was there, whatever fails and wherever it is killed."""

from __future__ import annotations

import errno
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from support_journal import content, edit_layer, make_journal, packed_parts, rtn, source_record
from support_models import edit_config, read_tensors, rewrite, stack_experts, tiny, tiny_q3, write_tensors

from glm5_quant.model import atomic, export, exporting, lock, staging
from glm5_quant.model.checkpoint import open_checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.journal import Manifest, read_model, write_record

SHARD_BYTES = 80_000


@pytest.fixture(scope="module")
def q3(tmp_path_factory):
    """(source, finished journal) of TINY-Q3."""
    root = tmp_path_factory.mktemp("q3")
    source = tiny_q3(root / "source")
    return source, make_journal(source, root / "journal")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def export_killed(when, source, journal, out):
    """Run an export in a forked process that kills itself in the second shard, or after moving three files out."""
    child = os.fork()
    if child == 0:
        seen, replace = set(), Path.replace

        def progress(done, total, name):
            seen.add(name)
            if when == "shard" and len(seen) == 2:
                die()

        def counted(self, target):
            if when == "publish" and self.is_relative_to(out / staging.STAGE_NAME / "files") and target.parent == out:
                seen.add(str(target))
                if len(seen) - len({n for n in seen if "/" not in n}) == 4:
                    die()
            return replace(self, target)

        Path.replace = counted
        try:
            export(source, journal, out, max_shard_bytes=SHARD_BYTES, progress=progress)
        finally:
            os._exit(3)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_o10_a_stack_of_which_only_some_experts_are_packed_is_refused(tmp_path):
    source = stack_experts(tiny("qwen3_moe", tmp_path / "source"))
    journal = make_journal(source, tmp_path / "journal", only=lambda linear: linear.expert != 3)
    with pytest.raises(UserError, match=r"gate_up_proj: a fused stack is packed in part; found 6 of 8"):
        export(source, journal, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_o20_a_folder_with_files_is_refused_and_with_overwrite_only_the_new_set_stays(q3, tmp_path):
    source, journal = q3
    out, outside = tmp_path / "out", tmp_path / "outside"
    export(source, journal, out, max_shard_bytes=SHARD_BYTES)
    assert len(list(out.glob("*.safetensors"))) > 3
    outside.mkdir()
    (outside / "precious").write_bytes(b"1")
    (out / "pytorch_model.bin").write_bytes(b"stray")
    (out / "link").symlink_to(outside)
    (out / "tokenizer.json").symlink_to(outside / "precious")
    with pytest.raises(UserError, match=r"not empty.*--overwrite"):
        export(source, journal, out)
    assert (out / "pytorch_model.bin").exists()
    report = export(source, journal, out, overwrite=True)
    assert content(out).keys() == {f.name for f in report.files}
    assert [p.name for p in out.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert (outside / "precious").read_bytes() == b"1"


def test_overwrite_spares_a_folder_that_is_no_model(q3, tmp_path):
    (tmp_path / "home" / "letters").mkdir(parents=True)
    with pytest.raises(UserError, match="does not look like a model"):
        export(*q3, tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "letters").is_dir()


@pytest.mark.parametrize(
    "name", [".git/HEAD", "src/main.c", "eampq/notes.json", "thesis.docx", "optimizer.pt", "a.txt"]
)
@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_overwrite_spares_a_model_folder_that_holds_something_else(q3, tmp_path, name, kind):
    out = tmp_path / "out"
    if kind == "export":
        export(*q3, out)
    else:
        tiny_q3(out)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("precious")
    before = content(out)
    with pytest.raises(UserError, match=rf"{name.split('/')[0]}: not replacing a folder that holds more than a model"):
        export(*q3, out, overwrite=True)
    assert content(out) == before


def test_overwrite_spares_a_folder_with_just_any_config(q3, tmp_path):
    (tmp_path / "proj" / ".git").mkdir(parents=True)
    (tmp_path / "proj" / "config.json").write_text("{}")
    (tmp_path / "proj" / "data.bin").write_bytes(b"1")
    with pytest.raises(UserError, match="does not look like a model"):
        export(*q3, tmp_path / "proj", overwrite=True)
    assert (tmp_path / "proj" / ".git").is_dir()


def test_overwrite_replaces_an_export_with_side_files_in_folders(tmp_path):
    source = tiny_q3(tmp_path / "source")
    for name in ("figures/a.png", "README.md", "notes.txt"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    journal = make_journal(source, tmp_path / "journal")
    export(source, journal, tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    report = export(source, journal, tmp_path / "out", overwrite=True)
    assert content(tmp_path / "out").keys() == {f.name for f in report.files}
    assert "figures/a.png" in content(tmp_path / "out")


def test_what_appears_in_the_folder_during_an_export_stays(q3, tmp_path):
    out = tmp_path / "out"
    export(*q3, out)
    report = export(*q3, out, overwrite=True, progress=lambda *_: (out / "letter").write_text("precious"))
    assert content(out).keys() == {f.name for f in report.files} | {"letter"}


def test_a_work_folder_inside_the_model_folder_is_refused_with_both_names(tmp_path):
    model = tmp_path / "model"
    staging.check_apart(tmp_path / "work", model)
    staging.check_apart(tmp_path, model)
    (tmp_path / "link").symlink_to(model)
    for inside in (model, model / "work" / "deep", tmp_path / "link" / "work"):
        with pytest.raises(UserError, match=r"must lie outside the model folder; found it .*/model\.") as caught:
            staging.check_apart(inside, model)
        assert caught.value.file == inside


@pytest.mark.parametrize("place", ["source", "source/inside", "."])
def test_the_output_may_not_touch_its_inputs(q3, tmp_path, place):
    source, journal = q3
    before = content(source)
    with pytest.raises(UserError, match="must lie apart from its inputs"):
        export(source, journal, source.parent / place, overwrite=True)
    with pytest.raises(UserError, match="must lie apart from its inputs"):
        export(source, journal, journal / "export")
    assert content(source) == before


@pytest.mark.parametrize("when", ["shard", "publish"])
def test_o26_a_killed_export_is_taken_up_and_ends_with_the_bytes_of_an_unbroken_one(q3, tmp_path, when):
    source, journal = q3
    whole = export(source, journal, tmp_path / "whole", max_shard_bytes=SHARD_BYTES)
    out = tmp_path / "out"
    export_killed(when, source, journal, out)
    # O-19: nothing a reader could take for a model, and the next run says what it found.
    assert not (out / "config.json").exists()
    moved = [p.name for p in out.iterdir() if p.name not in (staging.STAGE_NAME, lock.EXPORT)]
    assert len(moved) == (0 if when == "shard" else 3)
    report = export(source, journal, out, max_shard_bytes=SHARD_BYTES)
    assert content(out) == content(tmp_path / "whole")
    assert report.files == whole.files
    shards = [f.name for f in whole.files if f.name.endswith(".safetensors")]
    assert len(shards) > 3
    assert report.shards_reused == (1 if when == "shard" else len(shards))
    assert f"finished {shards[0]}" in report.leftovers
    if when == "shard":
        assert f"half-written {shards[1]}, removed" in report.leftovers


def test_leftovers_of_another_export_are_removed_and_named(q3, tmp_path):
    stage = tmp_path / "out" / staging.STAGE_NAME
    (stage / "files").mkdir(parents=True)
    (stage / "plan.json").write_text("{")
    (stage / "files" / "model-00001-of-00001.safetensors").write_bytes(b"junk")
    report = export(*q3, tmp_path / "out")
    assert report.leftovers == ("an unfinished export of something else, removed",)
    assert report.shards_reused == 0
    assert content(tmp_path / "out").keys() == {f.name for f in report.files}


def test_an_interrupted_export_keeps_its_finished_shards(q3, tmp_path):
    def interrupt(done, total, name):
        if "00003" in name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(*q3, tmp_path / "out", max_shard_bytes=SHARD_BYTES, progress=interrupt)
    report = export(*q3, tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    assert report.shards_reused == 2


@pytest.mark.parametrize("lost", ["model-00002-of-00002.safetensors", "generation_config.json"])
def test_a_source_that_is_lost_during_an_export_is_named_and_not_the_output(tmp_path, lost):
    source = tiny_q3(tmp_path / "source")
    journal = make_journal(source, tmp_path / "journal")
    with pytest.raises(UserError, match=rf"source/{lost}: .*cannot be read: No such file"):
        export(source, journal, tmp_path / "out", progress=lambda *_: (source / lost).unlink(missing_ok=True))
    assert not (tmp_path / "out").exists()


def test_progress_counts_up_to_all_bytes(q3, tmp_path):
    seen = []
    report = export(*q3, tmp_path / "out", progress=lambda done, total, name: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (report.tensor_bytes, report.tensor_bytes)


def test_o27_a_full_disk_is_one_short_message_and_leaves_nothing(q3, tmp_path, monkeypatch):
    written = 0
    write = atomic.HashingFile.write

    def limited(self, data):
        nonlocal written
        written += len(data)
        if written > 150_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(atomic.HashingFile, "write", limited)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        export(*q3, tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    assert not (tmp_path / "out").exists()


def test_o27_too_small_a_disk_is_said_before_anything_is_written(q3, tmp_path, monkeypatch):
    usage = os.statvfs(tmp_path)
    assert usage.f_bavail
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    report = export(*q3, tmp_path / "fits")
    assert report.tensor_bytes < 1 << 20
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 10})())
    with pytest.raises(UserError, match="not enough free disk space; found 1,024 bytes"):
        export(*q3, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_o27_a_bare_relative_name_works(q3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = export(*q3, "out")
    assert report.output == tmp_path / "out"
    assert (tmp_path / "out" / "config.json").exists()


def test_a_tilde_in_front_of_the_output_is_the_home_folder(q3, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export(*q3, "~/out").output == tmp_path / "out"


def test_o27_the_source_is_never_written(q3, tmp_path):
    source, journal = q3
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(source.rglob("*"))}
    folder_time = source.stat().st_mtime_ns
    source.chmod(0o555)
    try:
        export(source, journal, tmp_path / "out")
    finally:
        source.chmod(0o755)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(source.rglob("*"))} == before
    assert source.stat().st_mtime_ns == folder_time


def test_o27_an_output_that_cannot_be_written_is_named(q3, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"file/out: cannot be written \(Not a directory\)"):
        export(*q3, tmp_path / "file" / "out")

    def refuse(**kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(atomic.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=r"out: cannot be written \(Read-only file system\)"):
        export(*q3, tmp_path / "out")


def test_an_unfinished_calibration_is_refused_with_the_command_to_run(q3, tmp_path):
    source, _ = q3
    journal = make_journal(source, tmp_path / "journal")
    (journal / "layers" / "00001.json").unlink()
    with pytest.raises(UserError, match=r"not finished; found 1 of 2 layers. Run the same `glm5-quant calibrate`"):
        export(source, journal, tmp_path / "out")
    with pytest.raises(UserError, match="no calibration journal here"):
        export(source, tmp_path / "nowhere", tmp_path / "out")
    make_journal(source, tmp_path / "again")
    (tmp_path / "again" / "layers" / "00001.safetensors").unlink()
    with pytest.raises(UserError, match="a finished layer lacks its file"):
        export(source, tmp_path / "again", tmp_path / "out")


def test_a_journal_of_another_model_is_refused_with_the_files_that_differ(q3, tmp_path):
    _, journal = q3
    other = rewrite(tiny_q3(tmp_path / "other"), "model.norm.weight", lambda t: t + 1)
    with pytest.raises(UserError, match=r"another model; found model-00002-of-00002.safetensors differ"):
        export(other, journal, tmp_path / "out")
    edit_config(other, rope_theta=123.0)
    with pytest.raises(UserError, match=r"found config.json, model-00002"):
        export(other, journal, tmp_path / "out")


def test_o04_a_damaged_weight_that_would_be_copied_stops_the_export(tmp_path):
    source = tiny_q3(tmp_path / "source")
    journal = make_journal(source, tmp_path / "journal")

    def damage(tensor):
        tensor[3, 7] = math.nan
        return tensor

    rewrite(source, "model.embed_tokens.weight", damage)
    manifest = read_model(journal / "manifest.json", Manifest)

    record = manifest.model_copy(update={"source": source_record(open_checkpoint(source))})
    write_record(journal / "manifest.json", record)
    with pytest.raises(UserError, match=r"model.embed_tokens.weight: a weight is not finite; found nan at \[3, 7\]"):
        export(source, journal, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("change", "message"), [
    ({"weight_scale": lambda t: t * 0}, "a block scale is not above zero"),
    ({"weight_scale": lambda t: t.to(torch.int32)}, "journal and source disagree"),
    ({"weight_packed": lambda t: t[:-1]}, "journal and source disagree"),
    ({"weight_zero_point": lambda t: t[:-1]}, "journal and source disagree"),
    ({"weight_zero_point": None}, "some matrices have zero-points and some do not"),
    ({"weight_shape": None}, "journal and source disagree"),
])  # fmt: skip
def test_a_journal_with_faulty_parts_is_refused(q3, tmp_path, change, message):
    source, _ = q3
    journal = make_journal(source, tmp_path / "journal")

    def edit(tensors):
        for part, value in change.items():
            name = f"model.layers.0.self_attn.q_proj.{part}"
            old = tensors.pop(name)
            tensors |= {} if value is None else {name: value(old)}
        return tensors

    edit_layer(journal, 0, edit)
    with pytest.raises(UserError, match=message):
        export(source, journal, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_file_that_changed_since_it_was_committed_is_refused(q3, tmp_path):
    journal = make_journal(q3[0], tmp_path / "journal")
    file = journal / "layers" / "00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"00001.safetensors: a finished layer's file is not what was written"):
        export(q3[0], journal, tmp_path / "out")


def test_a_packed_matrix_the_source_does_not_have_is_refused(q3, tmp_path):
    codes, grid = rtn(torch.randn(8, 64))
    extra = packed_parts("model.layers.9.q_proj", codes, grid, symmetric=False, scale_dtype=torch.bfloat16)
    journal = make_journal(q3[0], tmp_path / "journal", extra=extra)
    with pytest.raises(UserError, match=r"model.layers.9.q_proj: the journal packs a matrix"):
        export(q3[0], journal, tmp_path / "out")


def test_replaced_plain_tensors_must_have_the_source_shape(q3, tmp_path):
    journal = make_journal(q3[0], tmp_path / "journal", extra={"model.norm.weight": torch.ones(64)})
    with pytest.raises(UserError, match=r"model.norm.weight: journal and source disagree"):
        export(q3[0], journal, tmp_path / "out")


def test_o24_a_journal_that_quantized_nothing_is_refused(q3, tmp_path):
    journal = make_journal(q3[0], tmp_path / "journal", only=lambda linear: False)
    with pytest.raises(UserError, match="holds no quantized matrix"):
        export(q3[0], journal, tmp_path / "out")


def test_o24_the_export_checks_its_own_output(q3, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "export_config", lambda source, *args, **kwargs: dict(source))
    with pytest.raises(UserError, match=r"does not pass its own check; found .*config and weights disagree"):
        export(*q3, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bad_shard_limit_is_refused(q3, tmp_path):
    with pytest.raises(UserError, match="max_shard_bytes: setting out of range"):
        export(*q3, tmp_path / "out", max_shard_bytes=0)


def test_a_second_export_to_the_folder_is_refused_at_once_and_the_first_one_ends_well(q3, tmp_path):
    whole, out, refusals = export(*q3, tmp_path / "whole", max_shard_bytes=SHARD_BYTES), tmp_path / "out", []

    def second(done, total, name):
        if not refusals:
            with pytest.raises(UserError, match=rf"out: another run \(process {os.getpid()}\) is working here"):
                export(*q3, out, max_shard_bytes=SHARD_BYTES, overwrite=True)
            refusals.append(name)

    report = export(*q3, out, max_shard_bytes=SHARD_BYTES, progress=second)
    assert refusals
    assert report.files == whole.files
    assert content(out) == content(tmp_path / "whole")


def test_a_refused_export_leaves_no_folder_that_was_made_for_it(q3, tmp_path):
    journal = make_journal(q3[0], tmp_path / "journal")
    (journal / "finish.json").unlink()
    with pytest.raises(UserError, match="not finished"):
        export(q3[0], journal, tmp_path / "new" / "deep" / "out")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64, torch.complex64, torch.float8_e8m0fnu])
def test_a_tensor_of_a_rare_dtype_is_copied_bit_for_bit(tmp_path, dtype):
    source = tiny_q3(tmp_path / "source")
    extra = torch.arange(1, 65, dtype=torch.uint8).view(dtype)
    write_tensors(source, read_tensors(source) | {"model.extra": extra})
    export(source, make_journal(source, tmp_path / "journal"), tmp_path / "out")
    assert torch.equal(read_tensors(tmp_path / "out")["model.extra"].view(torch.uint8), extra.view(torch.uint8))


def test_a_side_file_whose_name_is_no_text_is_named_before_work(tmp_path):
    source = tiny_q3(tmp_path / "source")
    Path(os.fsdecode(os.fsencode(source) + b"/\xff.txt")).write_text("")
    with pytest.raises(UserError, match=r"source: a name that is not UTF-8; found b'\\xff.txt'. Rename it"):
        open_checkpoint(source).side_files()
