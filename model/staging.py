"""An output folder that is filled in a hidden stage inside it and then changed over by renames.

    <out>/.glm5-quant-export.part/plan.json     what is being written; a killed run with the same plan is taken up
    <out>/.glm5-quant-export.part/publishing    the stage is complete and its files are being moved out
    <out>/.glm5-quant-export.part/files/        finished files under their final names

The stage lies inside the output folder so that renames never cross a disk. Until the last rename (config.json) no
reader can load the folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_quant.model import atomic
from glm5_quant.model.errors import UserError
from glm5_quant.model.files import INDEX_NAME, read_json

STAGE_NAME = ".glm5-quant-export.part"
CONFIG_NAME = "config.json"
LAST = (INDEX_NAME, CONFIG_NAME)
_MODEL_MARKS = ("*.safetensors", "*.bin", "*.gguf", CONFIG_NAME, INDEX_NAME)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """An output folder that was checked and made ready. `leftovers`: what a killed export left there, in words."""

    output: Path
    created: bool
    leftovers: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.output / STAGE_NAME

    @property
    def files(self) -> Path:
        return self.folder / "files"

    def publish(self, names: Iterable[str]) -> None:
        """Move the finished files out; exactly they remain. The index comes second to last, config.json last."""
        atomic.write_bytes(self.folder / "publishing", b"")
        old = sorted(self.output.iterdir(), key=lambda path: (path.name not in LAST, path.name))
        for path in old:
            if path.name != STAGE_NAME:
                atomic.remove(path)
        ordered = [name for name in names if name not in LAST] + list(LAST)
        try:
            for name in ordered:
                target = self.output / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (self.files / name).replace(target)
            atomic.sync_folder(self.output)
        except OSError as error:
            raise atomic.os_error(error, self.output) from None
        atomic.remove(self.folder)

    def discard(self) -> None:
        """Leave the output folder as it was found: no stage, and no folder where there was none."""
        with suppress(UserError):
            atomic.remove(self.folder)
        if self.created:
            with suppress(OSError):
                self.output.rmdir()


def check_place(output: Path, *protected: Path) -> None:
    """Refuse an output folder that is, holds or lies in a folder that must not be touched (source, journal)."""
    place = output.resolve()
    for folder in protected:
        other = folder.resolve()
        if place == other or place in other.parents or other in place.parents:
            raise UserError(
                "the output folder must lie apart from its inputs",
                file=output,
                found=f"it overlaps {folder}",
                hint="Choose another output folder",
            )


def open_stage(output: Path, plan: dict[str, Any], names: set[str], *, overwrite: bool) -> Stage:
    """Check the output folder (content, rights) and make its stage; what a killed run of the same plan finished stays.

    Raises:
        UserError: a non-empty folder without `overwrite`; with it, one that does not look like a model folder.
    """
    if output.is_dir():
        _check_content(output, names, overwrite)
    created = atomic.make_folder(output)
    atomic.check_writable(output)
    stage = Stage(output=output, created=created, leftovers=tuple(_take_up(output, plan, names)))
    stage.files.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(stage.folder / "plan.json", atomic.json_bytes(plan))
    return stage


def _check_content(output: Path, names: set[str], overwrite: bool) -> None:
    entries = [path.name for path in output.iterdir() if path.name != STAGE_NAME]
    publishing = (output / STAGE_NAME / "publishing").exists()
    tops = {name.split("/")[0] for name in names}
    foreign = sorted(entry for entry in entries if not (publishing and entry in tops))
    if not foreign:
        return
    if not overwrite:
        hint = "Choose another folder, or replace its content with --overwrite"
        raise UserError("the output folder is not empty", file=output, found=", ".join(foreign[:5]), hint=hint)
    if not any(True for mark in _MODEL_MARKS for _ in output.glob(mark)):
        raise UserError(
            "not replacing a folder that does not look like a model",
            file=output,
            found=", ".join(foreign[:5]),
            expected="config.json or weight files in it",
            hint="Choose another output folder",
        )


def _take_up(output: Path, plan: dict[str, Any], names: set[str]) -> list[str]:
    """Deal with a killed run's stage: keep finished files of the same plan, remove the rest; say what was found."""
    folder = output / STAGE_NAME
    if not folder.exists():
        return []
    try:
        same = read_json(folder / "plan.json") == plan
    except UserError:
        same = False
    if not same:
        atomic.remove(folder)
        return ["an unfinished export of something else, removed"]
    if (folder / "publishing").exists():
        # Killed while moving out: what is not in the stage any more was moved already, so it comes back.
        for name in names:
            moved, staged = output / name, folder / "files" / name
            if moved.is_file() and not moved.is_symlink() and not staged.exists():
                staged.parent.mkdir(parents=True, exist_ok=True)
                moved.replace(staged)
        atomic.remove(folder / "publishing")
    found = []
    for path in sorted((folder / "files").rglob("*")):
        if atomic.is_part(path):
            atomic.remove(path)
            found.append(f"half-written {path.name.strip('.').removesuffix(atomic.PART_SUFFIX)}, removed")
        elif path.is_file():
            found.append(f"finished {path.relative_to(folder / 'files').as_posix()}")
    return found
