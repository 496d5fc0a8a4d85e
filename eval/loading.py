"""Models for an evaluation: given ones as they are, folders through `model.load`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm5_quant.eval.config import EvalConfig
from glm5_quant.eval.runner import Runner
from glm5_quant.model.errors import UserError
from glm5_quant.model.families import model_config
from glm5_quant.model.files import expanded, read_json, source_folder
from glm5_quant.model.scheme import without_quantization


def is_folder(model: Any) -> bool:
    """Whether a model is named by folder rather than given."""
    return isinstance(model, str | Path)


def local(model: Any) -> Any:
    """A folder as it lies on this disk: `~` put in full, a hub id downloaded. A model object as it is."""
    if not is_folder(model):
        return model
    path = expanded(model)
    return path if path.is_dir() else source_folder(model)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known of a model before it is loaded; None where it does not say. `layers` is 0 then."""

    name: str
    max_positions: int | None
    vocab_size: int | None
    layers: int


def outline_of(model: Any) -> Outline:
    """The outline of a model object, or of a folder by its config.json alone."""
    if is_folder(model):
        file = Path(model) / "config.json"
        config, name = model_config(without_quantization(read_json(file)), file=file), Path(model).resolve().name
    else:
        runner = Runner(model)
        config, name = runner.config, runner.name
    return Outline(
        name=name,
        max_positions=_whole(config, "max_position_embeddings"),
        vocab_size=_whole(config, "vocab_size"),
        layers=_whole(config, "num_hidden_layers") or 0,
    )


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return int(value) if isinstance(value, int) else None


def open_runner(model: Any, config: EvalConfig, name: str = "") -> Runner:
    """A runner for a model object or a model folder."""
    if not is_folder(model):
        return Runner(model, name)
    from glm5_quant.model import load

    try:
        loaded = load(model, dtype=dtype_of(config), device=config.device)
    except ValueError as error:
        if isinstance(error, UserError) or config.dtype != "float16" or "never narrowed" not in str(error):
            raise
        # A folder that is float16 but for some tensors: only the loader knows which of them stay float32.
        found = f"float16, with {error}"
        raise UserError("not a dtype for this model", file=model, item="dtype", found=found) from None
    return Runner(loaded, name or Path(model).resolve().name)


def dtype_of(config: EvalConfig) -> torch.dtype | None:
    """float32 on a CPU unless asked otherwise: bfloat16 logits carry noise as large as small divergences."""
    if config.dtype == "auto":
        return torch.float32 if torch.device(config.device).type == "cpu" else None
    found: torch.dtype = getattr(torch, config.dtype)
    return found


def names_of(exports: Sequence[Any], names: Sequence[str] | None) -> list[str]:
    """A distinct name for each export: as given, else the shortest parts of their paths that differ."""
    if names is not None:
        if len(names) != len(exports) or len(set(names)) != len(names):
            raise UserError("needs one distinct name for each export", item="names", found=list(names))
        return list(names)
    paths = [
        _as_typed(Path(export)).parts if is_folder(export) else (f"model-{i}",) for i, export in enumerate(exports)
    ]
    if len({path[-1] for path in paths}) == 1 < len(paths):
        # WORK/export of several work folders: what they all end in tells nothing.
        paths = [path[:-1] for path in paths]
    for depth in range(1, max((len(path) for path in paths), default=1) + 1):
        found = ["/".join(path[-depth:]) for path in paths]
        if len(set(found)) == len(found):
            return found
    raise UserError("the same export is named twice", item="exports", found=[str(export) for export in exports])


def _as_typed(path: Path) -> Path:
    """The whole path, links kept: what a link points to is no name that the user knows."""
    return path.resolve() if ".." in path.parts else path.absolute()


def tokenizer_of(source: Any, exports: Sequence[Any]) -> Any:
    """The tokenizer of the first folder that has one, or None where only model objects are given."""
    from glm5_quant.model.texts import load_tokenizer

    folders = [model for model in (source, *exports) if is_folder(model)]
    return load_tokenizer(folders[0]) if folders else None


def same_vocabulary(size: int | None, export: int | None, name: str) -> None:
    """UserError when an export cannot be compared with a source of that vocabulary token by token."""
    if size is not None and export not in (None, size):
        raise UserError("source and export have different vocabularies", item=name, found=export, expected=size)


def other_tokenizers(source: Any, exports: Sequence[Any], names: Sequence[str]) -> list[str]:
    """A note for each export folder whose tokenizer.json is not byte for byte the source's."""
    mine = Path(source) / "tokenizer.json" if is_folder(source) else None
    if mine is None or not mine.is_file():
        return []
    notes = []
    for export, name in zip(exports, names, strict=True):
        theirs = Path(export) / "tokenizer.json" if is_folder(export) else None
        if theirs is not None and theirs.is_file() and theirs.read_bytes() != mine.read_bytes():
            notes.append(
                f"{name}: its tokenizer.json is not the source's; all models read what the source's makes of the text"
            )
    return notes


def folder_bytes(model: Any) -> int | None:
    """Size of all weight files of a folder in bytes."""
    if not is_folder(model):
        return None
    return sum(path.stat().st_size for path in Path(model).rglob("*.safetensors"))
