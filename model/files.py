"""Which files make up a checkpoint folder: find it, read its JSON, check its index, list what is copied along.

Every name that comes out of a file is hostile until checked here: it may point outside the folder, or name a pickle.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from glm5_quant.model.errors import UserError
from glm5_quant.model.safetensors_header import unique_pairs

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_JSON_BYTES = 200_000_000
MAX_NAME_BYTES = 249  # a file has 6 more while it is written (atomic.part_name), and file systems allow 255
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "*.md"]
DOWNLOAD_PATTERNS += ["LICENSE*", "LICENCE*", "NOTICE*"]
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
WEIGHT_ENDINGS = (*PICKLE_ENDINGS, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ot", ".tflite")
LEFT_BEHIND_ENDINGS = (".index.json", ".lock", ".tmp", ".incomplete", ".pyc")


def expanded(path: str | Path) -> Path:
    """A path from outside with a leading `~` or `~user` put in full. UserError for a user that does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        if Path(path).exists():
            return Path(path)
        user = Path(path).parts[0]
        raise UserError(
            f"{user} is nobody's home folder here", file=path, hint=f"Give the path in full, or as ./{path}"
        ) from None


def source_folder(path_or_hub_id: str | Path) -> Path:
    """An existing folder, or the local snapshot of a hub id. UserError when it is neither."""
    path = expanded(path_or_hub_id)
    if path.is_dir():
        return path.absolute()
    if path.exists():
        raise UserError("this is a file", file=path, expected="a checkpoint folder or a hub id such as org/name")
    if not (isinstance(path_or_hub_id, str) and HUB_ID.fullmatch(path_or_hub_id)):
        raise UserError(
            "folder not found", file=path, hint="Give an existing checkpoint folder, or a hub id such as org/name"
        )
    return _download(path_or_hub_id)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=DOWNLOAD_PATTERNS)).absolute()
    except Exception as error:  # no network, no such model, no rights, offline and not cached: many unrelated types
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"no such folder, and the hub does not give this model: {reason}",
            file=hub_id,
            hint="Check the name, the network and HF_HUB_OFFLINE, or download the model first and give its folder",
        ) from None


def read_error(error: OSError, path: Path) -> UserError:
    """The system's refusal to let a file be read, as one short message."""
    return UserError(f"cannot be read: {error.strerror or error}", file=path)


def read_json(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """A JSON object from a file. UserError when it is missing, too large, no JSON, or (`strict`) names a key twice."""
    if not path.is_file():
        raise UserError("file not found", file=path, hint="A checkpoint folder holds config.json and *.safetensors")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise UserError(
            "file too large", file=path, found=f"{path.stat().st_size} bytes", expected=f"{MAX_JSON_BYTES} at most"
        )
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=unique_pairs if strict else None)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {error}", file=path) from None
    if not isinstance(value, dict):
        raise UserError("not a JSON object", file=path, found=type(value).__name__)
    return value


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The shards in name order, each with the tensors the index expects in it (None: no index)."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index.is_file():
        if not single.is_file():
            raise _no_weights(folder)
        return {single: None}
    shards = _shards(index)
    if single.is_file() and single not in shards:
        raise UserError(
            f"the folder holds {SINGLE_NAME} beside an index that does not name it, and readers disagree which counts",
            file=index,
            hint="One of them is a left-over: move it away",
        )
    return shards


def _no_weights(folder: Path) -> UserError:
    pickles = sorted(path.name for path in folder.iterdir() if path.name.endswith(PICKLE_ENDINGS))
    if pickles:
        return UserError(
            "only pickle weights here, and loading a pickle can run any code",
            file=folder,
            found=pickles[0],
            expected=f"{SINGLE_NAME} or {INDEX_NAME}",
            hint="Convert it to safetensors first (load it with transformers where you trust it, then save_pretrained)",
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    found = ", ".join(others[:3]) or "no safetensors file"
    return UserError("no weights found", file=folder, found=found, expected=f"{SINGLE_NAME} or {INDEX_NAME}")


def _shards(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(index, strict=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("bad index", file=index, item="weight_map", expected="an object of tensor name to file name")
    by_file: dict[str, set[str]] = {}
    for tensor, value in weight_map.items():
        if not isinstance(value, str) or (value not in by_file and not is_inside_name(value)):
            raise UserError(
                "the index names a file outside the folder, or none at all",
                file=index,
                item=tensor,
                found=repr(value)[:200],
                expected="a plain file name such as model-00001-of-00002.safetensors",
            )
        by_file.setdefault(value, set()).add(tensor)
    for value in sorted(by_file):
        if not value.endswith(".safetensors"):
            raise UserError("the index names a file that is no safetensors", file=index, found=value)
    missing = [value for value in sorted(by_file) if not (index.parent / value).is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(by_file)} shards named by the index are missing",
            file=index.parent / missing[0],
            hint="Download the missing shards",
        )
    return {index.parent / value: by_file[value] for value in sorted(by_file)}


def is_inside_name(value: str) -> bool:
    """True for a relative name that stays in its folder on every system (no `..`, root, drive or backslash)."""
    if not value or "\\" in value or ":" in value or any(ord(letter) < 32 for letter in value):
        return False
    path = PurePosixPath(value)
    return not path.is_absolute() and path.parts != () and ".." not in path.parts


def side_files(folder: Path) -> list[Path]:
    """Everything but weights, indexes, config.json, hidden files and caches, in name order.

    UserError for a link that leads out of the folder (other than into the hub cache it lies in): copying it would
    publish a stranger's file; for a link to nothing, and what may not be read, which would be missing in the copy; and
    for a name that is no text, which no list of files can hold, or too long to be written.
    """
    kept = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if hidden or parts == ("config.json",) or path.name.endswith(WEIGHT_ENDINGS + LEFT_BEHIND_ENDINGS):
            continue
        _check_readable(path)
        if path.is_file():
            _check_name(path.relative_to(folder), folder)
            _check_link(path, folder)
            kept.append(path)
    return kept


def _check_readable(path: Path) -> None:
    if not path.exists():
        hint = "Download the model again, or remove the link"
        raise UserError("a link leads to nothing", file=path, found=path.readlink(), hint=hint)
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise UserError("may not be read", file=path, hint="Change its rights, or move it away")


def _check_name(name: Path, folder: Path) -> None:
    if len(os.fsencode(name.name)) > MAX_NAME_BYTES:
        found, expected = f"{len(os.fsencode(name.name))} bytes", f"{MAX_NAME_BYTES} at most"
        raise UserError("a file's name is too long", file=folder / name, found=found, expected=expected)
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise UserError("a name that is not UTF-8", file=folder, found=os.fsencode(name), hint="Rename it") from None


def _check_link(path: Path, folder: Path) -> None:
    target, root = path.resolve(), folder.resolve()
    if not target.is_relative_to(root) and not target.is_relative_to(root.parent.parent / "blobs"):
        raise UserError(
            "a link leads out of the checkpoint folder", file=path, found=target, hint="Replace it by a copy"
        )
