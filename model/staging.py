"""An output folder that is filled in a hidden stage inside it and then changed over by renames.

    <out>/.glm5-quant-export.part/plan.json     what is being written; a killed run with the same plan is taken up
    <out>/.glm5-quant-export.part/publishing    the stage is complete and its files are being moved out
    <out>/.glm5-quant-export.part/files/        finished files under their final names

The stage lies inside the output folder so that renames never cross a disk. Until the last rename (config.json) no
reader can load the folder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_quant.model import atomic, lock
from glm5_quant.model.errors import UserError
from glm5_quant.model.files import INDEX_NAME, read_json
from glm5_quant.model.journal import SIDECAR_PREFIX

STAGE_NAME = ".glm5-quant-export.part"
CONFIG_NAME = "config.json"
LAST = (INDEX_NAME, CONFIG_NAME)
_SIDECAR_FOLDER = SIDECAR_PREFIX.rstrip("/")
_SIDECAR_FILE = re.compile(r"\.?eampq(\.json|-\d+-of-\d+\.safetensors)")
_MODEL_ENDINGS = (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model", ".tiktoken", ".gitattributes")
_MODEL_FILE = re.compile(
    r"((SOURCE_)*README|LICENSE|LICENCE|NOTICE)(\.\w+)?|(merges|vocab)\.txt|(modeling|configuration|tokenization)_\w+\.py"
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """An output folder that was checked and made ready. `replaced`: what lay there and makes room, by name;
    `leftovers`: what a killed export left there, in words."""

    output: Path
    replaced: frozenset[str]
    leftovers: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.output / STAGE_NAME

    @property
    def files(self) -> Path:
        return self.folder / "files"

    def publish(self, names: Iterable[str]) -> None:
        """Move the finished files out in the place of what was replaced. The index comes second to last, config.json
        last. What appeared in the folder since it was checked stays."""
        atomic.write_bytes(self.folder / "publishing", b"")
        for name in sorted(self.replaced, key=lambda name: (name not in LAST, name)):
            atomic.remove(self.output / name)
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
        """Leave no stage in the output folder."""
        with suppress(UserError):
            atomic.remove(self.folder)


@contextmanager
def only_export(output: Path) -> Iterator[None]:
    """While this is held no other export works in the output folder. Folders that were made for nothing go again.

    Raises:
        UserError: another export works there, or the folder cannot be written.
    """
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        with lock.only_run(output, lock.EXPORT, instead="choose another output folder"):
            yield
    finally:
        with suppress(OSError):  # the first that holds anything ends it
            for folder in made:
                folder.rmdir()


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


def check_apart(work_dir: Path, model_folder: Path) -> None:
    """Refuse a work folder that is the model's folder or lies inside it: nothing is ever written into a source."""
    place, other = work_dir.resolve(), model_folder.resolve()
    if place == other or other in place.parents:
        raise UserError(
            "the work folder must lie outside the model folder",
            file=work_dir,
            found=f"it {'is' if place == other else 'lies inside'} {model_folder}",
            hint="Choose another work folder",
        )


def open_stage(output: Path, plan: dict[str, Any], names: set[str], *, overwrite: bool) -> Stage:
    """Check the output folder (content, rights) and make its stage; what a killed run of the same plan finished stays.

    Raises:
        UserError: a non-empty folder without `overwrite`; with it, one that is no model folder, or holds anything
            that does not belong to a model.
    """
    replaced = _check_content(output, names, overwrite) if output.is_dir() else frozenset[str]()
    atomic.make_folder(output)
    atomic.check_writable(output)
    stage = Stage(output=output, replaced=replaced, leftovers=tuple(_take_up(output, plan, names)))
    stage.files.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(stage.folder / "plan.json", atomic.json_bytes(plan))
    return stage


def _check_content(output: Path, names: set[str], overwrite: bool) -> frozenset[str]:
    """Names of what lies in the folder and makes room for the export."""
    entries = frozenset(path.name for path in output.iterdir() if path.name not in (STAGE_NAME, lock.EXPORT))
    publishing = (output / STAGE_NAME / "publishing").exists()
    tops = {name.split("/")[0] for name in names}
    others = sorted(entry for entry in entries if not (publishing and entry in tops))
    if not others:
        return entries
    if not overwrite:
        hint = "Choose another folder, or replace its content with --overwrite"
        raise UserError("the output folder is not empty", file=output, found=", ".join(others[:5]), hint=hint)
    # A killed export that was moving out has been through this, and its config.json may be gone already.
    if not publishing and not _is_model(output):
        raise UserError(
            "not replacing a folder that does not look like a model",
            file=output,
            found=", ".join(others[:5]),
            expected="an earlier export, or config.json with a model_type beside *.safetensors",
            hint="Choose another output folder",
        )
    foreign = sorted(entry for entry in others if _is_foreign(output / entry, output, names))
    if foreign:
        raise UserError(
            "not replacing a folder that holds more than a model",
            file=output,
            item=foreign[0],
            found=", ".join(foreign[:5]),
            expected="only files of a model or of an earlier export",
            hint="Move it away, or choose another output folder",
        )
    return entries


def _is_model(folder: Path) -> bool:
    """Whether a folder is an export of ours or plainly a checkpoint."""
    for name, key in ((f"{_SIDECAR_FOLDER}/eampq.json", "format"), (CONFIG_NAME, "model_type")):
        try:
            value = read_json(folder / name).get(key)
        except UserError:
            continue
        if value == "eampq" if key == "format" else isinstance(value, str) and any(folder.glob("*.safetensors")):
            return True
    return False


def _is_foreign(path: Path, output: Path, names: Collection[str]) -> bool:
    """Whether something in an output folder is neither part of a model nor replaced by a file of the new export."""
    if path.is_symlink():  # only the link goes
        return False
    if path.is_dir():
        return any(_is_foreign(inner, output, names) for inner in path.iterdir()) or not any(path.iterdir())
    name = path.relative_to(output).as_posix()
    if "/" in name:
        own = path.parent.name == _SIDECAR_FOLDER and path.parent.parent == output
        return name not in names and not (own and _SIDECAR_FILE.fullmatch(path.name))
    return not (name in names or name.endswith(_MODEL_ENDINGS) or _MODEL_FILE.fullmatch(name) or atomic.is_part(path))


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
