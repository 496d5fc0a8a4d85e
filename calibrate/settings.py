"""What a user chooses for a calibration, checked where it is made."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from glm5_quant.model.errors import UserError
from glm5_quant.model.files import expanded
from glm5_quant.model.placing import check_device
from glm5_quant.quant.config import PRESETS, QuantConfig

Resume = Literal["auto", "required", "never"]
PARTS = ("attention", "shared_experts", "dense_mlp")
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a calibration's bytes, and a few things that do not (`device`, `max_memory_bytes`).

    `held_out` is the share of windows kept out of the solve to choose what only unseen tokens can judge (the strength
    of the target's correction); they join the statistics once that is chosen. With `choose_samples`, the windows are
    chosen by who is routed where out of `candidates` times as many, which costs a pass of the source model over those.
    `num_samples` 0 stands for as many windows as tell this model's statistics something new (plan.useful_windows).
    `keep` names parts that stay in source precision, `int8` parts that are stored in 8 bits: attention, shared_experts,
    dense_mlp; and lm_head and embed_tokens, which are kept where they are not named.
    """

    quant: QuantConfig = field(default_factory=lambda: PRESETS["default"])
    num_samples: int = 0
    seqlen: int = 512
    seed: int = 0
    held_out: float = 0.0625
    all_experts: bool = False
    coverage_target: int = 128
    choose_samples: bool = False
    candidates: int = 4
    keep: tuple[str, ...] = ()
    int8: tuple[str, ...] = ()
    device: str = "cpu"
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("num_samples", 0), ("seqlen", 2), ("seed", 0), ("coverage_target", 0), ("candidates", 1)):
            value = getattr(self, name)
            if value < low:
                raise UserError("setting out of range", item=name, found=value, expected=f"{low} or more")
        check_device(self.device)
        for name, known in (("keep", PARTS), ("int8", (*PARTS, "lm_head", "embed_tokens"))):
            unknown = [part for part in getattr(self, name) if part not in known]
            if unknown:
                raise UserError("unknown part", item=name, found=unknown[0], expected=", ".join(known))
        twice = sorted(set(self.keep) & set(self.int8))
        if twice:
            raise UserError("a part is to be kept and stored in 8 bits", item="keep", found=twice[0])
        if not 0 <= self.held_out <= 0.5:
            raise UserError("setting out of range", item="held_out", found=self.held_out, expected="0 to 0.5")

    def held_windows(self, windows: int) -> int:
        """How many windows, the last ones, are held out: at least one where there are eight, and one is fitted on."""
        return min(max(int(windows * self.held_out), int(self.held_out > 0 and windows >= 8)), windows - 1)

    @property
    def windows_to_read(self) -> int:
        """How many windows the data have to fill."""
        return self.num_samples * (self.candidates if self.choose_samples else 1)

    def deciding(self) -> dict[str, Any]:
        """The part that decides the output's bytes, as plain JSON values: the manifest's `settings`."""
        out = {k: v for k, v in asdict(self).items() if k not in {"quant", "device", "max_memory_bytes"}}
        return _plain(out) | {"quant": _plain(asdict(self.quant))}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def quant_config(preset: str, **changes: Any) -> QuantConfig:
    """The preset's `QuantConfig` with what the user set otherwise; `None` means "as the preset has it".

    Raises:
        UserError: unknown preset, or a value the config refuses.
    """
    if preset not in PRESETS:
        raise UserError("unknown preset", item="--preset", found=preset, expected=", ".join(PRESETS))
    try:
        return replace(PRESETS[preset], **{k: v for k, v in changes.items() if v is not None})
    except ValueError as error:
        raise UserError(str(error)) from None


def parse_bytes(text: str | int | None, item: str = "--max-memory") -> int | None:
    """Bytes of a size such as `4GiB`, `512M` or `1000000`; units are powers of 1024."""
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise UserError("not a size", item=item, found=repr(text), expected="for example 24GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def work_folder(work_dir: Path | str) -> Path:
    return expanded(work_dir) / "calibration"
