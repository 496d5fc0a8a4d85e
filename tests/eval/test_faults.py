"""Planted faults on a tiny GLM-4.5-type model are found and named; a clean copy shows no drift."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import byte_tokenizer, tiny, tiny_glm

from glm5_quant.eval import evaluate, to_html, to_json, to_table
from glm5_quant.eval.model_parts import decoder_layers, experts_of, router_name
from glm5_quant.eval.routing import routing_trace
from glm5_quant.model.errors import UserError
from glm5_quant.model.loading import load
from glm5_quant.model.texts import load_tokenizer

TEXTS = [f"Account {i}: the balance is {1234 + 97 * i} and the rate {i}.{i}5%, approved." for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_glm(tmp_path_factory.mktemp("glm"), num_hidden_layers=3)
    byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def source(folder: Path) -> Any:
    return load(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)


def broken(source: Any, change: Any) -> Any:
    model = copy.deepcopy(source)
    with torch.no_grad():
        change(model)
    return model


def findings(source: Any, export: Any, tokenizer: Any) -> list[tuple[str, str]]:
    result = evaluate(source, [export], TEXTS, tokenizer=tokenizer, window=64, draws=100)
    assert result.exports[0].status == "ok"
    return [(found.kind, found.where) for found in result.exports[0].findings]


def test_an_expert_with_its_scales_times_four_is_named(source: Any, tokenizer: Any) -> None:
    def change(model: Any) -> None:
        experts_of(decoder_layers(model)[2]).down_proj[1] *= 4

    assert ("expert", "layer 2 expert 1") in findings(source, broken(source, change), tokenizer)


def test_a_router_bias_rounded_to_bfloat16_is_named(source: Any, tokenizer: Any) -> None:
    def change(model: Any) -> None:
        gate = decoder_layers(model)[1].mlp.gate
        gate.e_score_correction_bias.copy_(gate.e_score_correction_bias.bfloat16().float())

    found = evaluate(source, [broken(source, change)], TEXTS, tokenizer=tokenizer, window=64, draws=100)
    assert [(f.kind, f.where) for f in found.exports[0].findings] == [("router", "layer 1")]
    assert "rounded to bfloat16" in to_table(found)


def test_a_swapped_digit_row_of_the_head_is_named(source: Any, tokenizer: Any) -> None:
    three, seven = (tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "37")

    def change(model: Any) -> None:
        rows = model.lm_head.weight
        rows[three], rows[seven] = rows[seven].clone(), rows[three].clone()

    found = evaluate(source, [broken(source, change)], TEXTS, tokenizer=tokenizer, window=64, draws=100).exports[0]
    assert [(f.kind, f.where) for f in found.findings] == [("head", f"rows {sorted([three, seven])}")]
    assert "'3', '7'" in found.findings[0].message
    numeric, whole = found.slice("numeric"), found.slice("all")
    assert numeric.perplexity_ratio.value != 1
    bands = [part.name for part in found.slices if part.name.startswith("numeric position:")]
    assert bands == ["numeric position:0-31", "numeric position:32-127"]
    assert whole.kl.value > 0


def test_a_broken_attention_is_named_by_layer(source: Any, tokenizer: Any) -> None:
    def change(model: Any) -> None:
        decoder_layers(model)[0].self_attn.o_proj.weight.mul_(-1)

    assert findings(source, broken(source, change), tokenizer) == [("layer", "layer 0")]


@pytest.mark.parametrize("wrong", [1.0, 1e-4])
def test_a_kv_scale_wrong_in_one_layer_is_named(source: Any, tokenizer: Any, tmp_path: Path, wrong: float) -> None:
    scales = {"0": [0.01, 0.01], "1": [0.01 * wrong, 0.01], "2": [0.01, 0.01]}
    (tmp_path / "scales.json").write_text(json.dumps(scales))
    talk = [{"messages": [{"role": r, "content": text} for text in TEXTS[:4] for r in ("user", "assistant")]}]
    found = evaluate(
        source,
        [copy.deepcopy(source)],
        dialogues=talk,
        long_dialogue=4,
        tokenizer=tokenizer,
        kv_cache="fp8",
        kv_scales=str(tmp_path / "scales.json"),
        diagnose=0,
        draws=20,
    )
    named = [[(one.kind, one.where) for one in variant.findings] for variant in found.cache_variants]
    assert named == [[] if wrong == 1 else [("kv_cache", "layer 1")]] * 2
    if wrong != 1:
        assert "KV cache, layer 1: keys lost" in to_table(found)


@pytest.mark.parametrize(("last", "said"), [(1.0, True), (0.99, False)])
def test_o37_scales_of_a_kv_cache_that_are_all_exactly_1_are_warned_of(
    source: Any, tokenizer: Any, tmp_path: Path, last: float, said: bool
) -> None:
    (tmp_path / "ones.json").write_text(json.dumps({"0": [1, 1.0], "1": [1, 1], "2": [1.0, last]}))
    talk = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    settings: dict[str, Any] = {"kv_cache": "fp8", "kv_scales": str(tmp_path / "ones.json"), "long_dialogue": 1}
    warned: list[str] = []
    found = evaluate(source, [], dialogues=talk, tokenizer=tokenizer, draws=20, warn=warned.append, **settings)
    assert [line for line in found.notes if "ones.json" in line] == warned
    assert [("every scale is exactly 1.0" in line) for line in warned] == ([True] if said else [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"0": [1, 1], "2": [1, 1]}', "layer 1"),
        ('{"0": [1, 0], "1": [1, 1], "2": [1, 1]}', "layer 0"),
        ('{"all": [1, 1]}', "all"),
        ("[1, 2]", "no scales by layer"),
        ("{", "cannot be read"),
    ],
)
def test_scales_that_do_not_fit_the_model_are_refused(
    source: Any, tokenizer: Any, tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "s.json").write_text(content)
    talk = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    settings: dict[str, Any] = {"kv_cache": "fp8", "kv_scales": str(tmp_path / "s.json"), "long_dialogue": 1}
    with pytest.raises(UserError, match=said):
        evaluate(source, [], dialogues=talk, tokenizer=tokenizer, **settings)


def test_a_clean_copy_shows_no_drift_and_nothing_to_act_on(source: Any, tokenizer: Any) -> None:
    result = evaluate(
        source, [copy.deepcopy(source)], TEXTS, tokenizer=tokenizer, window=64, gates="kl<1e-9,flips<1e-9"
    )
    export = result.exports[0]
    assert export.findings == ()
    assert export.slice("all").kl.value == 0
    assert export.equivalence.verdict == "equivalent"
    assert (export.equivalence.low, export.equivalence.high) == (0, 0)
    assert [layer.routing_changed for layer in export.layers] == [None, 0, 0]
    assert [layer.local_error for layer in export.layers] == [0, 0, 0]
    assert result.gates_passed
    assert result.noise_kl is not None and 0 <= abs(result.noise_kl) < 1e-6


def test_rerouted_tokens_are_counted_by_layer(source: Any, tokenizer: Any) -> None:
    def change(model: Any) -> None:
        decoder_layers(model)[2].mlp.gate.e_score_correction_bias[0] = -10.0

    export = evaluate(source, [broken(source, change)], TEXTS, tokenizer=tokenizer, window=64, draws=50).exports[0]
    layers = {layer.layer: layer for layer in export.layers}
    assert layers[0].routing_changed is None and layers[1].routing_changed == 0
    assert layers[2].load[0] == 0
    # Two of four experts are taken, so the share of tokens that had expert 0 is twice its load.
    assert layers[2].routing_changed == pytest.approx(2 * layers[2].source_load[0], abs=1e-4)
    assert sum(layers[2].source_load) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_trace_shows_what_each_token_was_routed_to_in_every_model(
    folder: Path, source: Any, tokenizer: Any, sequential: bool
) -> None:
    def change(model: Any) -> None:
        decoder_layers(model)[2].mlp.gate.e_score_correction_bias[0] = -10.0

    settings: dict[str, Any] = {"window": 64, "draws": 20, "diagnose": 0, "sequential": sequential}
    found = evaluate(folder, [broken(source, change)], TEXTS[:2], prompts=["rate 5%", "x"], names=["cut"], **settings)
    assert sorted((trace.model, trace.prompt) for trace in found.traces) == [
        ("cut", "rate 5%"), ("cut", "x"), ("source", "rate 5%"), ("source", "x"),
    ]  # fmt: skip
    by_model = {trace.model: trace for trace in found.traces if trace.prompt == "rate 5%"}
    one, other = by_model["source"], by_model["cut"]
    assert "".join(one.tokens).endswith("rate 5%")
    assert [layer.layer for layer in one.layers] == [1, 2]
    assert one.layers[0] == other.layers[0]
    assert all(0 not in experts for experts in other.layers[1].experts)
    for layer in one.layers:
        assert len(layer.experts) == len(one.tokens)
        assert all(weights[0] >= weights[1] > 0 for weights in layer.weights)


def test_a_trace_names_experts_best_first_with_the_weights_the_layer_was_given(source: Any, tokenizer: Any) -> None:
    ids = torch.tensor([tokenizer.encode("rate 5%")])
    given = []
    experts = experts_of(decoder_layers(source)[1])
    assert experts is not None
    handle = experts.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
    with torch.inference_mode():
        source(input_ids=ids, use_cache=False)
    handle.remove()
    args, kwargs = given[0]
    index, weight = (value if torch.is_tensor(value) else None for value in [*args, *kwargs.values()][1:3])
    traced = routing_trace(source, tokenizer, "rate 5%").layers[0]
    for token in range(ids.shape[1]):
        pairs = sorted(zip(weight[token].tolist(), index[token].tolist(), strict=True), reverse=True)
        assert list(traced.experts[token]) == [expert for _, expert in pairs]
        assert list(traced.weights[token]) == pytest.approx([value for value, _ in pairs], abs=1e-6)


def test_a_model_without_experts_has_no_trace_and_it_is_said(tmp_path: Path) -> None:
    dense = tiny("llama", tmp_path / "dense")
    byte_tokenizer(dense)
    found = evaluate(dense, [], TEXTS[:1], prompts=["hi"], window=64, draws=20)
    assert found.traces == ()
    assert any("no routing to trace" in note for note in found.notes)


def test_routers_of_dense_layers_are_none(source: Any) -> None:
    assert router_name(decoder_layers(source)[0]) is None
    assert router_name(decoder_layers(source)[1]) == "mlp.gate"


def test_a_rotated_stream_is_not_compared_part_by_part_but_said_to_be(source: Any, tokenizer: Any) -> None:
    def change(model: Any) -> None:
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.flip(1))

    result = evaluate(source, [broken(source, change)], TEXTS[:3], tokenizer=tokenizer, window=64, draws=50)
    assert any("rotated" in note for note in result.notes)
    assert result.exports[0].findings == ()


def test_parts_are_not_compared_with_a_source_that_gives_nan(source: Any, tokenizer: Any) -> None:
    def change(model: Any) -> None:
        decoder_layers(model)[1].self_attn.o_proj.weight[0, 0] = float("nan")

    result = evaluate(broken(source, change), [source], TEXTS, tokenizer=tokenizer, window=64, draws=20)
    assert result.status == "invalid" and result.noise_kl is None
    assert result.exports[0].layers == ()
    assert "nan" not in to_table(result).lower().replace("finance", "")


def test_a_folder_that_gives_nan_is_invalid_in_every_report(folder: Path, source: Any, tokenizer: Any) -> None:
    def change(model: Any) -> None:
        decoder_layers(model)[1].self_attn.o_proj.weight[0, 0] = float("nan")

    result = evaluate(folder, [broken(source, change)], TEXTS, names=["patched"], window=64, gates="kl<9")
    assert (result.status, result.gates_passed) == ("invalid", False)
    assert json.loads(to_json(result))["exports"][0]["invalid"]["position"] == result.exports[0].invalid.position
    assert "Invalid" in to_html(result)
