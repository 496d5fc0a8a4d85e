"""Real transformers models of tiny size: padding, chunks, caches and folders do not change what is measured."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import byte_tokenizer, tiny, tiny_q3, uniform

from glm5_quant.eval import evaluate, to_html, to_table
from glm5_quant.eval.dialogue import Dialogue, Renderer, Turn, segments
from glm5_quant.eval.dialogue_part import cache_for
from glm5_quant.eval.drift import Reader, at_once, measure_drift
from glm5_quant.eval.loading import names_of
from glm5_quant.eval.prefix import find_prefix
from glm5_quant.eval.report_json import to_dict
from glm5_quant.eval.runner import PlainCache, Runner
from glm5_quant.eval.score import Marker
from glm5_quant.model.errors import UserError
from glm5_quant.model.loading import load
from glm5_quant.model.texts import load_tokenizer

TEXTS = ["hello", "The rate is 12.5% since May, and 48,210 is the limit.", "余额 3.5 元", "x" * 40]


@pytest.fixture(scope="module")
def q3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_q3(tmp_path_factory.mktemp("q3"))
    byte_tokenizer(folder)
    return folder


def noisy(model: Any, scale: float = 0.02) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return other


def test_a_folder_with_a_zero_head_has_perplexity_256_and_its_prefix_is_named(tmp_path: Path) -> None:
    folder = uniform(tmp_path / "u")
    byte_tokenizer(folder)
    result = evaluate(folder, [folder], TEXTS, window=16, batch_size=3, padding_side="left", names=["copy"], diagnose=0)
    assert result.exports[0].slice("all").perplexity.value == pytest.approx(256, rel=1e-6)
    assert result.settings.prefix_rule in ("bos", "tokenizer", "none")
    assert result.exports[0].size_bytes == sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert [part.name for part in result.source_slices if part.name.startswith("language")] == [
        "language:en",
        "language:zh",
    ]


def test_batch_padding_and_side_do_not_change_the_figures(q3: Path) -> None:
    source = load(q3, dtype=torch.float32)
    export, tokenizer = noisy(source), load_tokenizer(q3)
    found = [
        evaluate(
            source,
            [export],
            TEXTS,
            tokenizer=tokenizer,
            window=24,
            batch_size=size,
            padding_side=side,
            diagnose=0,
            draws=20,
        )
        for size, side in ((1, "right"), (2, "left"), (8, "right"), (8, "left"))
    ]
    figures = [(r.exports[0].slice("all").perplexity.value, r.exports[0].slice("all").kl.value) for r in found]
    for perplexity, kl in figures[1:]:
        assert perplexity == pytest.approx(figures[0][0], rel=1e-6)
        assert kl == pytest.approx(figures[0][1], rel=1e-4)
    assert len({r.exports[0].slice("all").tokens for r in found}) == 1


@pytest.mark.parametrize("model_type", ["glm4_moe", "glm_moe_dsa", "glm5_ref"])
def test_token_by_token_with_a_cache_equals_prefill(tmp_path: Path, model_type: str) -> None:
    # A random indexer scores many keys exactly 0, and top-k among ties depends on the length: keep all keys.
    dense = {"index_topk": 4096} if model_type == "glm_moe_dsa" else {}
    folder = tiny(model_type, tmp_path / model_type, **dense)
    byte_tokenizer(folder)
    model, tokenizer = load(folder, dtype=torch.float32), load_tokenizer(folder)
    dialogue = Dialogue(turns=tuple(Turn(user=f"q{i}", answer=f"the answer {i}") for i in range(4)))
    renderer = Renderer(tokenizer, find_prefix(tokenizer))
    parts = [segments(renderer, dialogue, None)]
    sums = []
    for chunk in (1, 16, 10_000):
        runner = Runner(model)
        reader = Reader(name="m", runner=runner, new_cache=lambda runner=runner: cache_for(runner, None))
        base, _ = measure_drift(reader, [], parts, 4, Marker(None), chunk=chunk)
        sums.append(base.by_turn[0][:, 2])
    assert sums[1] == pytest.approx(sums[0], rel=1e-4)
    assert sums[2] == pytest.approx(sums[0], rel=1e-4)


def test_windows_past_the_models_positions_are_refused_whatever_the_rope_settings(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    folder = tiny("llama", tmp_path / "yarn", max_position_embeddings=128, rope_parameters=yarn)
    byte_tokenizer(folder)
    with pytest.raises(UserError, match="max_position_embeddings"):
        evaluate(folder, [], ["a" * 300], window=129)
    result = evaluate(folder, [], ["a" * 300], window=128)
    assert result.source_slices[0].tokens >= 299
    assert load(folder).config.rope_parameters["rope_theta"] == 1e6


def test_different_vocabularies_cannot_be_compared(q3: Path, tmp_path: Path) -> None:
    other = tiny("llama", tmp_path / "other", vocab_size=300)
    with pytest.raises(UserError, match="different vocabularies"):
        evaluate(q3, [other], TEXTS)
    with pytest.raises(UserError, match="named twice"):
        evaluate(q3, [other, other], TEXTS)
    with pytest.raises(UserError, match="distinct name"):
        evaluate(q3, [other], TEXTS, names=["a", "b"])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["work/export"], ["export"]),
        (["plain/export", "ours/export"], ["plain", "ours"]),
        (["a/int4", "b/int8"], ["int4", "int8"]),
        (["a/w/export", "b/w/export"], ["a/w", "b/w"]),
    ],
)
def test_exports_are_named_by_the_part_of_their_paths_that_differs(paths: list[str], names: list[str]) -> None:
    assert names_of(paths, None) == names


def test_an_export_behind_a_link_has_the_name_that_was_typed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "export").mkdir(parents=True)
    (tmp_path / "plain" / "export").mkdir(parents=True)
    (tmp_path / "ours").symlink_to(tmp_path / "elsewhere")
    assert names_of([tmp_path / name / "export" for name in ("plain", "ours")], None) == ["plain", "ours"]


def test_kv_cache_variants_are_reported_beside_the_16_bit_cache(q3: Path) -> None:
    rows = [
        {"messages": [{"role": r, "content": f"{r} says {i}"} for i in range(4) for r in ("user", "assistant")]}
    ] * 3
    source = load(q3, dtype=torch.float32)
    result = evaluate(
        source,
        [noisy(source)],
        dialogues=rows,
        long_dialogue=4,
        num_dialogues=3,
        tokenizer=load_tokenizer(q3),
        kv_cache="int4",
        kv_feedback=0.3,
        chunk=8,
        draws=50,
    )
    assert [(v.weights, v.kind, v.feedback) for v in result.cache_variants] == [
        ("source", "int4", 0.0),
        ("source", "int4", 0.3),
        ("model-0", "int4", 0.0),
        ("model-0", "int4", 0.3),
    ]
    plain = result.cache_variants[0]
    assert len(plain.key_error) == 2 and all(0 < error < 0.2 for error in plain.key_error)
    assert plain.device_bytes < 0.5 * plain.bytes_16bit
    for layer in result.exports[0].layers:
        assert 0 < layer.routing_changed < 1 and sum(layer.load) == pytest.approx(1, abs=1e-4)
    page, table = to_html(result), to_table(result)
    assert "KV cache: perplexity against the source" in page and "int4, feedback 0.3" in table
    assert "Drift over 4 turns" in table and "the answers of 3 dialogues" in table
    assert 0 < plain.dialogue.slices[0].kl.value < result.exports[0].dialogue.slices[0].kl.value
    assert any(
        "stress" in part.name
        for part in evaluate(
            source, [source], TEXTS, tokenizer=load_tokenizer(q3), stress=True, draws=20, diagnose=0, window=256
        )
        .exports[0]
        .slices
    )


def test_models_that_read_at_the_same_time_give_the_very_figures_of_those_that_take_turns(q3: Path) -> None:
    rows = [{"messages": [{"role": r, "content": f"{r} {i} 5%"} for i in range(6) for r in ("user", "assistant")]}] * 3
    source = load(q3, dtype=torch.float32)
    exports = [noisy(source), noisy(source, 0.04)]
    settings = {"dialogues": rows, "long_dialogue": 6, "tokenizer": load_tokenizer(q3), "draws": 20, "chunk": 16}
    one, two = (to_dict(evaluate(source, exports, together=together, **settings)) for together in (1, 3))
    assert any(layer["routing_changed"] for layer in one["exports"][0]["layers"])
    for name in ("exports", "source_dialogue", "source_slices"):
        assert one[name] == two[name]


def test_models_read_at_the_same_time_only_where_each_is_another() -> None:
    meeting = threading.Barrier(2)
    models: list[Any] = [lambda ids, mask: torch.zeros(*ids.shape, 4) for _ in range(2)]
    readers = [Reader(name=str(i), runner=Runner(m), new_cache=PlainCache) for i, m in enumerate(models)]
    with at_once(readers, 2) as work:
        # Neither step ends before the other has begun.
        assert sorted(work([lambda: meeting.wait(60), lambda: meeting.wait(60)])) == [0, 1]
    for taken, together in (([*readers, readers[0]], 2), (readers, 1)):
        with at_once(taken, together) as work:
            assert len(set(work([threading.get_ident] * 2)) | {threading.get_ident()}) == 1


def test_one_model_at_a_time_measures_dialogues_too(q3: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": r, "content": f"{r} says {i}"} for i in range(3) for r in ("user", "assistant")]}
    ] * 2
    source = load(q3, dtype=torch.float32)
    options = {"dialogues": rows, "long_dialogue": 3, "tokenizer": load_tokenizer(q3), "draws": 20}
    export = noisy(source)
    whole = evaluate(source, [export], TEXTS, **options)
    apart = evaluate(source, [export], TEXTS, sequential=True, top_k=256, **options)
    assert apart.exports[0].dialogue.slices[0].kl.value == pytest.approx(
        whole.exports[0].dialogue.slices[0].kl.value, rel=1e-4
    )
    assert any("one at a time" in note for note in apart.notes)


def test_another_tokenizer_and_an_unread_cache_are_said(q3: Path, tmp_path: Path) -> None:
    other = tiny_q3(tmp_path / "other")
    byte_tokenizer(other, bos=False)
    result = evaluate(q3, [other], TEXTS, window=64, kv_cache="fp8", draws=20, diagnose=0)
    assert any(note.startswith("other: its tokenizer.json") for note in result.notes)
    assert any("fp8 KV cache" in note for note in result.notes)
