"""What a bare command works on: the packaged model and corpus, and what earlier commands left in the work folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from glm5_quant.cli.options import WORK_DIR
from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded


def calibration_folder(work_dir: str) -> Path:
    return expanded(work_dir) / "calibration"


def export_folder(work_dir: str) -> Path:
    return expanded(work_dir) / "export"


def unless_default(work_dir: str) -> str | None:
    """`--work-dir` as the next command needs it: only where it is not the default."""
    return None if work_dir == WORK_DIR else work_dir


def given(command: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those of the options that differ from the command's own defaults: what a command to type next must repeat."""
    defaults = inspect.signature(command).parameters
    return {name: value for name, value in options.items() if value != defaults[name].default}


def packaged_model() -> str:
    """Folder of glm5-tiny.

    Raises UserError where the installation lacks its weights.
    """
    folder = _tiny_folder()
    if folder is None:
        raise UserError("glm5-tiny is not in this installation", hint="Name a model of your own with --model")
    return str(folder)


def needed_data(source: str | None) -> str | None:
    """`--dataset` as the next command needs it: a placeholder for a model of the user's own."""
    return None if source is None or is_packaged(source) else "TEXT.jsonl"


def calibration_data(dataset: str | None, model: str, work_dir: str, *, dry: bool = False) -> str | None:
    """The data set named, else the packaged calibration dialogues, written to the work folder. `dry`: nothing is
    written, None stands for the dialogues, and a data set named is only tried.

    Raises typer.BadParameter for a model of the user's own without one: its calibration data are the user's choice.
    """
    if dataset is not None:
        if dry:
            from glm5_quant.model.texts import read_texts

            read_texts(dataset, limit=1)
        return dataset
    if not is_packaged(model):
        raise typer.BadParameter(
            "A model of your own needs data: name text like what it will read.", param_hint="--dataset"
        )
    return None if dry else _write_corpus(work_dir)


def is_packaged(model: str) -> bool:
    folder = _tiny_folder()
    return folder is not None and expanded(model).resolve() == folder


def _tiny_folder() -> Path | None:
    from glm5_quant.model import tiny

    folder = tiny.folder()
    return folder.resolve() if (folder / "config.json").exists() else None


def _write_corpus(work_dir: str) -> str:
    """Deterministic by seed, so writing it again changes nothing; renamed into place, so it is never half there."""
    from glm5_quant.model.tiny import corpus

    path = expanded(work_dir) / "data" / "calibration.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    corpus.export_jsonl(temporary, corpus.calibration_dialogues())
    temporary.replace(path)
    return str(path)


def source_of_work(model: str | None, work_dir: str) -> str:
    """The source model a command means: the one named, else the one calibrated here.

    Raises UserError saying what to run first, if there is neither.
    """
    if model is not None:
        return model
    from glm5_quant.model.journal import open_journal

    return open_journal(calibration_folder(work_dir)).manifest.source.folder


def existing_export(work_dir: str) -> Path:
    """The work folder's export.

    Raises UserError saying what to run first, if it is not there.
    """
    folder = export_folder(work_dir)
    if (folder / "config.json").exists():
        return folder
    calibrated = (calibration_folder(work_dir) / "manifest.json").exists()
    first = "`glm5-quant export`" if calibrated else "`glm5-quant calibrate`, then `glm5-quant export`,"
    raise UserError("no export here", file=folder, hint=f"Run {first} first, or name the folder of one")
