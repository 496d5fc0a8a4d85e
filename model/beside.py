"""What an export takes over from its source beside the tensors: the values of config.json, tokenizer, templates."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_quant.model.card import as_kept
from glm5_quant.model.checkpoint import Checkpoint
from glm5_quant.model.errors import UserError
from glm5_quant.model.scheme import NUMERIC_KEY, SCHEME_KEY, untied_config, without_quantization
from glm5_quant.model.sidecar import PREFIX

OWN_KEYS = (SCHEME_KEY, NUMERIC_KEY)
NOTES = ("transformers_version", "_name_or_path")  # say where a config comes from, and change nothing
# What decides which ids a text becomes, how messages are put together and when a server stops.
_WORKING_FILE = re.compile(
    r"(.*/)?((tokenizer|generation_config|chat_template|vocab|tekken|special_tokens|added_tokens|(pre)?processor)"
    r"[^/]*\.json|(vocab|merges)\.txt|[^/]*\.(jinja|model|tiktoken|py))"
)


@dataclass(kw_only=True)
class Differences:
    """`problems` change what the model does; `warnings` are of papers that nothing reads."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, line: str, *, works: bool) -> None:
        (self.problems if works else self.warnings).append(line)


def differences(export: Checkpoint, source: Checkpoint, *, untied: bool) -> Differences:
    """Every key of config.json and every file that is not as an export of this source has it.

    `source`: as calibrated. `untied`: the head has a matrix of its own that the source's has not.
    """
    found = Differences()
    expected = without_quantization(untied_config(source.config) if untied else source.config)
    here = without_quantization(export.config)
    for key in sorted((here.keys() | expected.keys()) - set(OWN_KEYS)):
        mine, theirs = ({key: side[key]} if key in side else {} for side in (here, expected))
        for line in _values(mine, theirs):
            found.add(f"config.json: {line}", works=key not in NOTES)
    theirs = as_kept(_files(source))
    try:
        ours = _files(export)
    except UserError as error:  # a link that leads out of the folder
        return Differences(problems=[*found.problems, str(error)], warnings=found.warnings)
    for name in sorted(ours.keys() | theirs.keys()):
        works = _WORKING_FILE.fullmatch(name) is not None
        if name not in ours:
            found.add(f"{name}: in the source, but not in the export", works=works)
        elif name not in theirs:
            if works:  # anyone may add a model card or a report
                found.add(f"{name}: not in the source", works=True)
        elif not filecmp.cmp(ours[name], theirs[name], shallow=False):
            found.add(f"{name}: differs from the source's", works=works)
    return found


def _values(here: Mapping[str, Any], there: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What differs, by key, also inside nested objects."""
    for key in sorted(here.keys() | there.keys()):
        mine, theirs = here.get(key), there.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            yield from _values(mine, theirs, f"{path}{key}.")
        elif key not in here:
            yield f"{path}{key} is missing, the source has {theirs!r}"
        elif key not in there:
            yield f"{path}{key} is {mine!r}, and the source has no such key"
        elif mine != theirs:
            yield f"{path}{key} is {mine!r}, the source has {theirs!r}"


def _files(checkpoint: Checkpoint) -> dict[str, Path]:
    """Side files by their name in the folder, without the sidecar."""
    names = {path.relative_to(checkpoint.folder).as_posix(): path for path in checkpoint.side_files()}
    return {name: path for name, path in names.items() if not name.startswith(PREFIX)}
