"""README.md of an export: what the folder is. The source's card, whose figures are the source's, lies beside it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5_quant.model.journal import Manifest
from glm5_quant.model.runtimes import RuntimeVerdict

CARD = "README.md"
KEPT = re.compile(r"(license\w*|language|pipeline_tag)\s*:")
"""Lines of a card's front matter that hold for an export as well."""
_HUB_FOLDER = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def kept_name(names: Collection[str]) -> str:
    """The name under which an export keeps its source's card, given the names of the source's side files."""
    name = CARD
    while name in names:
        name = f"SOURCE_{name}"
    return name


def as_kept(side_files: Mapping[str, Path]) -> dict[str, Path]:
    """A source's side files by the names that they have in an export."""
    kept = kept_name(side_files)
    return {kept if name == CARD else name: path for name, path in side_files.items()}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card tells. Sizes in bytes; `eight`: matrices of `packed` that are stored in 8 bits; `kept`: tensors in
    source precision; `form`: the format's name in config.json."""

    manifest: Manifest
    packed: int
    eight: int
    kept: int
    symmetric: bool
    group_size: int
    form: str
    bits_per_weight: float
    tensor_bytes: int
    source_bytes: int
    verdicts: Sequence[RuntimeVerdict]


def write_card(source: Path, card: Path, kept: str, facts: CardFacts) -> str:
    """The text of an export's card. source: the source's folder; card: its own card; kept: that one's name here."""
    front, heading = _parts(card.read_text(encoding="utf-8", errors="replace"))
    base = _hub_id(source)
    title = heading or base or f"A model of type {facts.manifest.source.model_type}"
    head = []
    if front is not None:
        named = [f"base_model: {base}", "base_model_relation: quantized"] if base else []
        head = ["---", *front, *named, "tags: [compressed-tensors, int4]", "---", ""]
    rows = [f"| {name} | {value} |" for name, value in _rows(facts)]
    made_by = f"glm5-quant {facts.manifest.tool_version}"
    return "\n".join([
        *head,
        f"# {title}, in INT4",
        "",
        f"Quantized{f' from {base}' if base else ''} by {made_by} (`glm5-quant calibrate`, then `glm5-quant export`).",
        f"The source's own card is kept as [{kept}]({kept}): its sizes, number formats and results are the source's.",
        "",
        "| | |",
        "|---|---|",
        *rows,
        "",
        "`glm5-quant verify FOLDER` checks the folder and says why a runtime does not load it; `glm5-quant eval`",
        "measures how far it is from its source.",
        "",
    ])  # fmt: skip


def _rows(facts: CardFacts) -> list[tuple[str, str]]:
    data, kind = facts.manifest.data, "symmetric" if facts.symmetric else "asymmetric"
    eight = f", {facts.eight} of them to 8 bits" if facts.eight else ""
    tested, ruled = (_loaders(facts.verdicts, basis) for basis in ("tested", "rule"))
    return [
        (
            "quantized",
            f"{facts.packed} matrices{eight}; INT4, {kind}, blocks of {facts.group_size} inputs, "
            f"{facts.bits_per_weight:.3f} bits a weight",
        ),
        ("not quantized", f"{facts.kept} tensors, in source precision"),
        ("tensors", f"{facts.tensor_bytes / 1e6:.1f} MB, of {facts.source_bytes / 1e6:.1f} MB in the source"),
        ("method", "EAMPQ; its settings are in `eampq/eampq.json`"),
        ("calibrated on", f"{data.windows} windows of {data.seqlen} tokens"),
        ("format", f"`{facts.form}` of compressed-tensors; what lies in `eampq/` only glm5-quant reads"),
        ("loaded by", f"{tested}; by their code, but not tried: {ruled}" if ruled else tested),
    ]


def _loaders(verdicts: Sequence[RuntimeVerdict], basis: str) -> str:
    """Runtimes that load the export, with what they pass over."""
    found = [verdict for verdict in verdicts if verdict.loads and verdict.basis == basis]
    return ", ".join(f"{v.runtime} ({v.reason})" if v.reason else v.runtime for v in found)


def _hub_id(folder: Path) -> str:
    """The hub id of a folder in the hub's cache; "" for any other, whose name is its owner's affair."""
    found = (_HUB_FOLDER.fullmatch(part) for part in reversed(folder.parts))
    return next((f"{match[1]}/{match[2]}" for match in found if match), "")


def _parts(text: str) -> tuple[list[str] | None, str]:
    """Lines of a card's front matter that an export keeps (None: it has no front matter), and its first heading."""
    lines = text.lstrip("\ufeff").splitlines()
    front: list[str] | None = None
    if lines and lines[0].strip() == "---" and "---" in [line.strip() for line in lines[1:]]:
        end = 1 + [line.strip() for line in lines[1:]].index("---")
        front, keeps = [], False
        for line in lines[1:end]:
            if re.match(r"[^\s#-]", line):
                keeps = KEPT.match(line) is not None
            front += [line.rstrip()] if keeps else []
        lines = lines[end + 1 :]
    return front, next((line[2:].strip() for line in lines if line.startswith("# ")), "")
