"""Small calibrations for tests: `small(...)` runs one in about a second and returns its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support_models import byte_tokenizer

from glm5_quant.calibrate.report import CalibrationReport
from glm5_quant.calibrate.run import calibrate
from glm5_quant.calibrate.settings import Settings, quant_config

WORDS = "the limit of the account is not more than 12.5% of 80,000 and not less than 700; "


def sample_text(folder: Path, repeat: int = 60, name: str = "sample.txt") -> Path:
    """A text file with numbers, long enough for a few windows of bytes."""
    path = folder / name
    path.write_text("".join(f"{i}: {WORDS}" for i in range(repeat)), encoding="utf-8")
    return path


def small(model: Path, work: Path, **options: Any) -> CalibrationReport:
    """Calibrate on 8 windows of 64 bytes. `quant` may hold changes to the default preset."""
    if not (model / "tokenizer.json").exists():
        byte_tokenizer(model)
    work.mkdir(parents=True, exist_ok=True)
    dataset = options.pop("dataset", None) or sample_text(work)
    quant = quant_config(options.pop("preset", "default"), **options.pop("quant", {}))
    run = {k: options.pop(k) for k in ("resume", "overwrite", "progress", "should_stop") if k in options}
    settings = Settings(**({"num_samples": 8, "seqlen": 64, "quant": quant} | options))
    return calibrate(model, dataset, work_dir=work, settings=settings, **run)
