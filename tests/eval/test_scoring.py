from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from support_stubs import Bigram, CharTokenizer, bigram, cycle, random_bigram, uniform

from glm5_quant.eval import divergence, evaluate, to_json, to_markdown, to_table
from glm5_quant.eval.divergence import TokenScores
from glm5_quant.eval.result import EvalResult
from glm5_quant.model.errors import UserError


def only(result: EvalResult, name: str = "all"):
    found = result.exports[0].slice(name)
    assert found is not None
    return found


@pytest.mark.parametrize("window", [3, 8, 50])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_zero_head_gives_exactly_the_vocabulary_size_whatever_window_batch_or_padding(
    window: int, batch_size: int, side: str
) -> None:
    texts = [[i % 256 for i in range(length)] for length in (5, 50, 2, 17)]
    for stride in (1, None):
        result = evaluate(
            uniform(), [uniform()], texts, window=window, stride=stride, batch_size=batch_size, padding_side=side
        )
        figures = only(result)
        assert figures.tokens == 5 + 50 + 2 + 17 - 4
        assert figures.source_perplexity.value == pytest.approx(256, rel=1e-6)
        assert figures.perplexity.value == pytest.approx(256, rel=1e-6)
        assert figures.kl.value == 0


def test_windows_weigh_by_their_tokens_so_nine_of_1_and_one_of_10_give_exp_1_9() -> None:
    model = bigram({(1, 1): 1.0, (2, 3): 10.0})
    result = evaluate(model, [model], [[1] * 10, [2, 3]], window=16)
    assert only(result).tokens == 10
    assert only(result).perplexity.value == pytest.approx(math.exp(1.9), rel=1e-6)
    assert "10 tokens scored" in to_table(result)


def test_a_certain_cycle_has_perplexity_one_so_logits_are_shifted_rightly() -> None:
    text = [i % 8 for i in range(100)]
    result = evaluate(cycle(), [cycle()], [text], window=16)
    assert only(result).perplexity.value == pytest.approx(1.0, abs=1e-9)
    assert only(result).kl.value == 0
    assert only(result).accuracy.value == 1
    assert (result.settings.unit, result.settings.window, result.settings.stride) == ("token", 16, 15)
    assert (result.settings.prefix, result.settings.prefix_rule) == ("", "none")


@pytest.mark.parametrize(
    "options", [{"window": 6}, {"window": 9, "stride": 2}, {"batch_size": 3}, {"padding_side": "left"}]
)
@pytest.mark.parametrize("rows_at_once", [7, 1000])
def test_kl_nll_flips_and_accuracy_equal_sums_made_by_hand(
    options: dict[str, object], rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", 32 * rows_at_once)
    source = random_bigram(0)
    export = random_bigram(1, noise_of=source)
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 32, size=n).tolist() for n in (5, 50, 30)]
    result = evaluate(source, [export], texts, **options)
    log_p, log_q = source.log_table, export.log_table
    pairs = [(a, b) for text in texts for a, b in itertools.pairwise(text)]
    nll = -np.mean([float(log_q[a, b]) for a, b in pairs])
    kl = np.mean([float((log_p[a].exp() * (log_p[a] - log_q[a])).sum()) for a, _ in pairs])
    flips = np.mean([int(log_p[a].argmax() != log_q[a].argmax()) for a, _ in pairs])
    lost = np.mean([int(log_p[a].argmax() == b and log_q[a].argmax() != b) for a, b in pairs])
    found = only(result)
    assert found.perplexity.value == pytest.approx(math.exp(nll), rel=1e-6)
    assert found.kl.value == pytest.approx(kl, rel=1e-5)
    spread = sorted(float((log_p[a].exp() * (log_p[a] - log_q[a])).sum()) for a, _ in pairs)
    percentiles = result.exports[0].kl_percentiles["all"]
    assert percentiles["p50"] == pytest.approx(spread[len(spread) // 2], rel=0.03)
    assert percentiles["max"] == pytest.approx(spread[-1], rel=1e-4)
    assert found.flips.value == pytest.approx(flips)
    assert found.lost.value == pytest.approx(lost)
    assert found.kl.low < found.kl.value < found.kl.high


def test_one_source_pass_and_one_pass_per_export_is_all_that_runs() -> None:
    source, exports = random_bigram(0), [random_bigram(seed) for seed in (1, 2, 3)]
    evaluate(source, exports, [list(range(32)) * 4], window=17, diagnose=0)
    assert source.calls == 8
    assert [export.calls for export in exports] == [8, 8, 8]


@pytest.mark.parametrize("figure", ["nll_source", "nll", "kl"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_figure_that_is_not_finite_makes_a_token_bad(figure: str, value: float) -> None:
    whole, ids = {name: np.ones(4) for name in ("nll_source", "nll", "kl")}, np.zeros(4, dtype=np.int64)
    assert TokenScores(targets=ids, top1_source=ids, top1=ids, **whole).first_bad() is None
    whole[figure][2] = value
    assert TokenScores(targets=ids, top1_source=ids, top1=ids, **whole).first_bad() == 2


def broken_at(token: int) -> Bigram:
    table = random_bigram(0).log_table.clone()
    table[token] = float("nan")
    return Bigram(table)


@pytest.mark.parametrize(("limit", "total"), [(8, 4), (3, 3), (None, None)])
def test_progress_counts_up_to_the_windows_that_the_texts_give(limit: int | None, total: int | None) -> None:
    seen = []
    texts = [[i % 256 for i in range(length)] for length in (20, 12, 1)]
    settings = {"window": 11, "num_windows": limit, "diagnose": 0, "draws": 20, "batch_size": 3}
    found = evaluate(uniform(), [], texts, progress=lambda *step: seen.append(step), **settings)
    assert {step[2] for step in seen} == {total}
    assert [step[:2] for step in seen][-1] == ("windows", total or 4)
    # The last text has no token to score, and is met only where windows are wanted beyond the others'.
    assert found.settings.windows == (total or 4) and found.settings.skipped_empty == (limit != 3)


def test_nan_makes_the_result_invalid_names_the_first_bad_position_and_passes_no_gate() -> None:
    text = [1, 2, 3, 4, 5, 6, 30, 7, 8]
    result = evaluate(random_bigram(0), [broken_at(30), random_bigram(1)], [[1, 2], text], window=4, gates="kl<100")
    assert result.status == "invalid"
    bad, good = result.exports
    assert (bad.status, good.status) == ("invalid", "ok")
    assert bad.invalid is not None
    assert (bad.invalid.document, bad.invalid.position) == (1, 7)
    assert [gate.passed for gate in result.gates] == [False, True]
    assert not result.gates_passed
    document = to_json(result)
    assert "NaN" not in document and "Infinity" not in document
    assert json.loads(document)["status"] == "invalid"
    assert "position 7" in to_table(result)
    assert "invalid" in to_markdown(result)


def test_a_source_that_gives_nan_makes_the_whole_result_invalid() -> None:
    result = evaluate(broken_at(3), [random_bigram(1)], [[1, 2, 3, 4]], gates="kl<100")
    assert result.status == "invalid"
    assert result.invalid is not None and result.invalid.position == 3
    assert not result.gates_passed
    json.loads(to_json(result))


def test_nothing_scorable_is_an_error_and_a_tokenizer_without_bos_works() -> None:
    tokenizer = CharTokenizer()
    model = uniform(len(tokenizer))
    with pytest.raises(UserError, match="nothing to score"):
        evaluate(model, [model], ["", "a"], tokenizer=tokenizer)
    result = evaluate(model, [model], ["", "a", "normal"], tokenizer=tokenizer)
    assert result.settings.skipped_empty == 2
    assert only(result).tokens == 5


def test_digit_tokens_are_reported_apart() -> None:
    tokenizer = CharTokenizer()
    source = uniform(len(tokenizer))
    logits = torch.zeros(len(tokenizer), len(tokenizer))
    logits[tokenizer.get_vocab()["="], tokenizer.get_vocab()["9"]] = 3.0
    result = evaluate(source, [Bigram(logits)], ["a=1 b=2 c=3 and no more"], tokenizer=tokenizer)
    numeric = only(result, "numeric")
    assert numeric.tokens == 3
    assert numeric.flips.value == 1
    assert only(result).flips.value == pytest.approx(3 / 22)
    assert numeric.kl.value > 5 * only(result).kl.value


def test_positions_files_and_languages_are_reported_apart() -> None:
    source, export = random_bigram(0), random_bigram(1)
    text = list(range(32)) * 20
    result = evaluate(source, [export], [text], window=600)
    names = [part.name for part in result.exports[0].slices]
    assert names[0] == "all"
    assert [name for name in names if name.startswith("position:")] == [
        "position:0-31",
        "position:32-127",
        "position:128-511",
        "position:512-1023",
    ]
    assert sum(part.tokens for part in result.exports[0].slices if part.name.startswith("position:")) == 639


def test_the_kept_answers_of_the_source_spare_its_second_pass(tmp_path) -> None:
    source, first, second = random_bigram(0), random_bigram(1), random_bigram(2)
    text = [list(range(32)) * 4]
    options = {"window": 17, "source_cache": str(tmp_path / "kept"), "top_k": 32, "diagnose": 0}
    whole = evaluate(source, [first, second], text, window=17, diagnose=0)
    calls = source.calls
    one = evaluate(source, [first], text, **options)
    assert source.calls == 2 * calls
    two = evaluate(source, [second], text, **options)
    assert source.calls == 2 * calls
    for kept, direct in zip((one.exports[0], two.exports[0]), whole.exports, strict=True):
        assert kept.slice("all").kl.value == pytest.approx(direct.slice("all").kl.value, rel=1e-5)
        assert kept.slice("all").perplexity == direct.slice("all").perplexity
    with pytest.raises(UserError, match="for another run"):
        evaluate(source, [second], [list(range(31, -1, -1)) * 4], **options)


def test_a_short_top_k_gives_a_lower_bound_of_the_divergence(tmp_path) -> None:
    source, export, text = random_bigram(0), random_bigram(1), [list(range(32)) * 4]
    whole = only(evaluate(source, [export], text)).kl.value
    found = [
        only(evaluate(source, [export], text, source_cache=str(tmp_path / str(k)), top_k=k)).kl.value
        for k in (2, 8, 31)
    ]
    assert found[0] < found[1] < found[2] <= whole * (1 + 1e-6)


def test_one_model_at_a_time_gives_the_figures_of_all_at_once() -> None:
    source, exports, text = random_bigram(0), [random_bigram(1), random_bigram(2)], [list(range(32)) * 4]
    together = evaluate(source, exports, text, window=17)
    apart = evaluate(source, exports, text, window=17, sequential=True, top_k=32)
    for one, other in zip(together.exports, apart.exports, strict=True):
        assert one.slice("all").kl.value == pytest.approx(other.slice("all").kl.value, rel=1e-5)
    assert apart.settings.source_cache_top_k == 32


def test_a_source_alone_gives_its_perplexity() -> None:
    result = evaluate(uniform(), [], [list(range(40))])
    assert result.source_slices[0].perplexity.value == pytest.approx(256, rel=1e-6)
    assert "256" in to_table(result)


def test_logits_of_a_window_are_dropped_before_the_next_one_is_read() -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched(Bigram):
        def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            held.append(sum(ref() is not None for ref in alive))
            found = super().__call__(ids, mask)
            alive.append(weakref.ref(found))
            return found

    held: list[int] = []
    models = [Watched(random_bigram(seed).log_table) for seed in range(3)]
    evaluate(models[0], models[1:], [list(range(32)) * 8], window=17, diagnose=0, draws=20)
    assert len(held) == 48
    assert max(held) <= 1


def test_peak_memory_of_tensors_is_the_same_for_a_text_eight_times_as_long() -> None:
    import gc

    class Weighing(Bigram):
        def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]  # no FakeTensor
            seen.append(sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))
            return super().__call__(ids, mask)

    peaks = []
    for repeats in (4, 32):
        seen: list[int] = []
        gc.collect()
        models = [Weighing(random_bigram(seed).log_table) for seed in range(3)]
        result = evaluate(models[0], models[1:], [list(range(32)) * repeats], window=17, diagnose=0, draws=20)
        assert result.source_slices[0].tokens == 32 * repeats - 1
        peaks.append(max(seen))
    assert peaks[1] <= peaks[0]
