"""The closer look at a few windows: layers, routers and head part by part, and the noise floor of the source itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm5_quant.eval.dialogue_part import DialoguePart
from glm5_quant.eval.divergence import compare, score_source
from glm5_quant.eval.findings import part_findings, suspects
from glm5_quant.eval.layer_errors import PartErrors, part_errors
from glm5_quant.eval.loading import is_folder
from glm5_quant.eval.model_parts import decoder_layers
from glm5_quant.eval.result import Finding
from glm5_quant.eval.runner import Runner
from glm5_quant.eval.session import Session
from glm5_quant.eval.substitution import stream_shares
from glm5_quant.eval.text_part import TextPart
from glm5_quant.model.sidecar import open_sidecar


@dataclass
class Diagnosis:
    """What was found, by export index; `noise_kl` is the KL of the source against itself at another batch size."""

    errors: dict[int, PartErrors] = field(default_factory=dict)
    findings: dict[int, tuple[Finding, ...]] = field(default_factory=dict)
    noise_kl: float | None = None


def diagnose(session: Session, text: TextPart | None, talk: DialoguePart | None) -> Diagnosis:
    """Look at `diagnose` windows of the text, or of the first dialogue where there is no text."""
    found = Diagnosis()
    count = session.config.diagnose
    if not count:
        return found
    if session.source is None:
        session.notes.append("layers were not compared part by part: models were held one at a time")
        return found
    part = text if text is not None else talk
    if part is not None and part.base is not None and part.base.invalid is not None:
        return found  # compared with a broken source every part looks broken
    windows = [torch.from_numpy(ids[None]) for ids in islice(_windows(session, text, talk), count)]
    found.noise_kl = noise_floor(session.source, windows)
    for index in range(len(session.names)):
        runner = session.export(index)
        broken = text is not None and text.passes[index].invalid is not None
        if broken or not decoder_layers(session.source.model) or not decoder_layers(runner.model):
            continue
        refitted = _refitted_routers(session.export_models[index])
        if refitted:
            layers = ", ".join(str(layer) for layer in refitted)
            session.notes.append(f"{runner.name}: calibration fitted the routers of layers {layers} again")
        errors = part_errors(session.source.model, runner.model, windows, refitted)
        if not errors.same_basis:
            session.notes.append(f"{runner.name}: layers were not compared part by part: its hidden states are rotated")
        found.errors[index] = errors
        shares = stream_shares(session.source.model, runner.model, windows, suspects(errors))
        found.findings[index] = part_findings(errors, shares, session.tokenizer)
    return found


def _refitted_routers(model: Any) -> list[int]:
    """Layers whose router an export folder says was fitted again to the quantized stream."""
    opened = open_sidecar(Path(model)) if is_folder(model) else None
    return opened[0].refitted_routers if opened else []


def _windows(session: Session, text: TextPart | None, talk: DialoguePart | None) -> Iterator[np.ndarray]:
    if text is not None:
        yield from (window.ids for batch in text.batches() for window in batch.windows)
    elif talk is not None:
        for parts in talk.segments:
            ids = [token for piece in parts[0].pieces for token in piece.ids]
            yield np.asarray(ids[: session.config.window], dtype=np.int64)


def noise_floor(source: Runner, windows: list[torch.Tensor]) -> float | None:
    """Mean KL of the source against itself when the same window is run twice in one batch: float noise, nothing else.

    A divergence near this figure says nothing about an export.
    """
    values = []
    for ids in windows:
        positions = torch.arange(1, ids.shape[1])
        rows = torch.zeros_like(positions)
        scores = score_source(source.logits(ids), ids[0, 1:], rows, positions)
        values.append(compare(scores, source.logits(ids.repeat(2, 1)), rows, positions).kl)
    return float(np.concatenate(values).mean()) if values else None
