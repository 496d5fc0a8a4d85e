"""Exports that correct the stream on purpose: nothing sound in them is named, and a fault planted in them is."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import rewrite, tiny_glm
from support_paths import shared

from glm5_quant.calibrate import Settings, calibrate
from glm5_quant.eval import evaluate
from glm5_quant.eval.findings import HARM, suspects
from glm5_quant.eval.layer_errors import part_errors
from glm5_quant.eval.model_parts import decoder_layers, experts_of
from glm5_quant.eval.substitution import stream_shares
from glm5_quant.model.exporting import export
from glm5_quant.model.loading import load
from glm5_quant.model.texts import load_tokenizer
from glm5_quant.model.tiny import folder as glm5_tiny
from glm5_quant.model.tiny.corpus import calibration_dialogues, evaluation_dialogues, export_jsonl

pytestmark = pytest.mark.slow


def _tiny(scratch: Path) -> tuple[Path, Path, list[Any]]:
    export_jsonl(scratch / "text.jsonl", calibration_dialogues())
    return glm5_tiny(), scratch / "text.jsonl", list(evaluation_dialogues(4, 20))


def _stories(scratch: Path) -> tuple[Path, Path, list[Any]]:
    packed = shared("data/tinystories-sample/tinystories_train_head.txt.gz").read_bytes()
    stories = gzip.decompress(packed).decode()
    (scratch / "text.txt").write_text(stories[:-8000])
    return shared("models/stories260k-glm4moe"), scratch / "text.txt", [stories[-8000:]]


@pytest.fixture(scope="module", params=[_tiny, _stories], ids=["glm5-tiny", "stories260k-glm4moe"])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Any]]:
    """Source, its export by the default preset, held-out texts."""
    scratch = tmp_path_factory.mktemp("export")
    make: Callable[[Path], tuple[Path, Path, list[Any]]] = request.param
    model, data, texts = make(scratch)
    calibrate(model, data, work_dir=scratch / "work", settings=Settings(num_samples=64, seqlen=512))
    export(model, scratch / "work" / "calibration", scratch / "export")
    return model, scratch / "export", texts


def _findings(model: Path, quantized: Path, texts: list[Any]) -> list[tuple[str, str]]:
    result = evaluate(model, [quantized], texts, window=256, num_windows=2, draws=20, dtype="float32")
    return [(found.kind, found.where) for found in result.exports[0].findings]


def test_nothing_is_named_in_an_export_by_the_default_preset_though_parts_differ_on_purpose(
    made: tuple[Path, Path, list[Any]],
) -> None:
    source, quantized = (load(place, dtype=torch.float32) for place in made[:2])
    text = "Once upon a time there was a balance of 1,250.00 EUR." * 8
    windows = [torch.tensor([load_tokenizer(made[0]).encode(text)])]
    if made[0] == glm5_tiny():  # those of stories260k-glm4moe differ too little in some calibrations
        assert suspects(part_errors(source, quantized, windows)), "no part differs: this test would show nothing"
    assert _findings(*made) == []


@pytest.mark.parametrize("expert", [0, 3])
def test_an_expert_of_such_an_export_whose_scales_are_four_times_too_large_is_named(
    made: tuple[Path, Path, list[Any]], expert: int, tmp_path: Path
) -> None:
    model, quantized, texts = made
    broken = shutil.copytree(quantized, tmp_path / "broken")
    layer = {"glm5_ref": 0}.get(json.loads((model / "config.json").read_text())["model_type"], 1)
    name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight_scale"
    rewrite(broken, name, lambda scale: scale.mul_(4))
    named = [where for kind, where in _findings(model, broken, texts) if kind == "expert"]
    assert named == [f"layer {layer} expert {expert}"]


def test_a_source_part_that_changes_nothing_takes_no_share_and_one_that_mends_all_takes_the_whole(
    tmp_path: Path,
) -> None:
    source = load(tiny_glm(tmp_path, num_hidden_layers=3), dtype=torch.float32)
    ids = [torch.arange(40)[None] % source.config.vocab_size]
    number = next(number for number, layer in enumerate(decoder_layers(source)) if experts_of(layer) is not None)
    used = next(iter(sorted(part_errors(source, source, ids).experts)))
    assert stream_shares(source, source, ids, [used, (number, None)]) == {used: 0.0, (number, None): 0.0}
    broken = copy.deepcopy(source)
    experts: Any = experts_of(decoder_layers(broken)[number])
    experts.down_proj.data[used[1]] *= 1.25
    found = stream_shares(source, broken, ids, [used, (number, None)])
    assert found[used] == pytest.approx(1.0, abs=1e-6)
    assert found[number, None] == pytest.approx(1.0, abs=1e-6)
    assert found[used] > HARM
