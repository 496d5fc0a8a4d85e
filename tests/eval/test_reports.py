from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from support_stubs import Bigram, CharTokenizer, random_bigram, uniform

from glm5_quant.eval import evaluate, to_html, to_json, to_markdown, to_table
from glm5_quant.eval.report_plots import number_turn_chart
from glm5_quant.eval.result import EvalResult, LayerResult
from glm5_quant.eval.statistics import Estimate
from glm5_quant.eval.svg import Series, bars, label, lines, ticks
from glm5_quant.eval.table import number, with_interval


@pytest.fixture(scope="module")
def result() -> EvalResult:
    source = random_bigram(0)
    exports = [random_bigram(1, noise_of=source), random_bigram(2, noise_of=source, noise=1.0)]
    texts = [[(7 * i + j) % 32 for j in range(60)] for i in range(12)]
    return evaluate(source, exports, texts, names=["int4 <fine>", "int3|rough"], gates="kl<0.1", window=32)


def test_every_report_shows_the_figures_of_the_one_result(result: EvalResult) -> None:
    kl = with_interval(result.exports[1].slice("all").kl)
    for report in (to_table(result), to_markdown(result), to_html(result)):
        assert kl in report
        assert with_interval(result.source_slices[0].perplexity) in report
        assert "FAILED" in report and "passed" in report
        assert f"{result.settings.scored_tokens} tokens scored" in report
    found = json.loads(to_json(result))
    assert found["schema_version"] == 1
    assert found["exports"][1]["slices"][0]["kl"]["value"] == result.exports[1].slice("all").kl.value
    assert found["gates_passed"] is False


def test_values_carry_their_interval_and_missing_ones_are_a_dash() -> None:
    assert with_interval(Estimate(value=0.1234, low=0.12, high=0.13)) == "0.1234 ± 0.0066"
    assert with_interval(Estimate(value=0.5, low=0.49, high=0.51), percent=True) == "50.0% ± 1%"
    assert with_interval(Estimate(value=3.5, low=1.3, high=5.7), percent=True) == "350.0% ± 220%"
    assert with_interval(Estimate(value=1297.0, low=11.5, high=144984.0)) == "1297 [11.5, 1.450e+05]"
    assert with_interval(Estimate(value=0.01, low=0.002, high=0.05), percent=True) == "1.00% [0.20%, 5.00%]"
    assert with_interval(Estimate(value=2.0)) == "2"
    assert with_interval(Estimate(value=None)) == "-"
    assert (number(0.0), number(None), number(1e-7), number(0.00123, True)) == ("0", "-", "1.000e-07", "0.12%")


class Checker(HTMLParser):
    """Collects tags, and every place a browser would fetch something from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br", "line", "path", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_page_is_whole_escaped_and_fetches_nothing(result: EvalResult) -> None:
    page = to_html(result, title="A & B")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.fetched == []
    assert "script" not in checker.tags and "svg" in checker.tags
    assert "int4 &lt;fine&gt;" in page and "int4 <fine>" not in page
    assert "url(http" not in page and "@import" not in page
    assert 'name="viewport"' in page and "@media print" in page
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", page.lower())


def test_markdown_keeps_its_columns_when_a_name_holds_a_bar(result: EvalResult) -> None:
    rows = [line for line in to_markdown(result).splitlines() if line.startswith("| perplexity per token")]
    assert len(re.split(r"(?<!\\)\|", rows[0])) == 6
    assert "int3\\|rough" in to_markdown(result)


def test_terminal_columns_line_up_with_wide_characters() -> None:
    source = random_bigram(0)
    texts = [[i % 32 for i in range(40)]] * 8
    table = to_table(evaluate(source, [random_bigram(1)], texts, names=["模型"], draws=20, diagnose=0))
    lines_ = [line for line in table.splitlines() if line.startswith(("  perplexity", "  KL"))]
    assert len({sum(2 if ord(c) > 0x2E7F else 1 for c in line) for line in lines_}) == 1


def test_layers_and_routing_are_tabled(result: EvalResult) -> None:
    layer = LayerResult(
        layer=3,
        local_error=0.1,
        stream_error=0.2,
        routing_changed=0.05,
        worst_expert=2,
        worst_expert_error=0.3,
        source_load=(0.5, 0.5),
        load=(0.4, 0.6),
    )
    with_layers = replace(result, exports=(replace(result.exports[0], layers=(layer, replace(layer, layer=4))),))
    table = to_table(with_layers)
    assert "5.00%" in table and "2 (0.3)" in table
    assert "Error by layer" in to_html(with_layers) and "Coverage" in to_html(with_layers)


def test_ticks_are_round_and_cover_the_range() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.98, 1.37)[0] <= 0.98 and ticks(0.98, 1.37)[-1] >= 1.37
    assert len(ticks(5, 5)) >= 2
    assert [label(v) for v in (0, 0.1 + 0.2, 200, 1e-5, 123456)] == ["0", "0.3", "200", "1e-5", "1e5"]


def test_charts_place_points_where_the_axis_says_and_nothing_without_data() -> None:
    drawn = lines([Series(name="a", points=[(0, 0), (10, 10)], colour=0, bars=[(10, 9, 10)])], "x", "y", level=5)
    assert "M62.0,226.0L468.0,12.0" in drawn
    assert lines([Series(name="a", points=[], colour=0)], "x", "y") == ""
    assert bars(["a"], [("s", 0, [None])], "y") == ""
    assert bars(["a", "b"], [("s", 0, [1.0, None])], "y").count("<title>") == 1
    pair = [("s", 0, [1.0]), ("s, numbers", 0, [2.0])]
    assert [bars(["a"], pair, "y", hollow=names).count('fill="#fff"') for names in ((), ["s, numbers"])] == [0, 2]


@pytest.mark.parametrize(("highest", "widest"), [(0.012, "0.0075"), (-0.0075, "-0.008"), (22500.0, "25000")])
def test_the_name_of_the_y_axis_stands_left_of_the_widest_tick_label(highest: float, widest: str) -> None:
    charts = [lines([Series(name="a", points=[(0, 0.0), (1, highest)], colour=0)], "x", "y")]
    charts += [bars(["a"], [("s", 0, [highest])], "y")] if highest > 0 else []
    for drawn in charts:
        _name_is_left_of(drawn, widest)


def _name_is_left_of(drawn: str, widest: str) -> None:
    found = {text: float(x) for x, text in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="end">([^<]*)', drawn)}
    name_at = re.search(r'class="name" transform="translate\((\d+)', drawn)
    assert name_at is not None
    # 8.27 px is a digit's width in the widest of the page's fonts at 13 px, 4.14 a point's.
    width = sum(4.14 if letter == "." else 8.27 for letter in widest)
    assert found[widest] - width > float(name_at[1]) + 4
    assert f'class="grid" x1="{found[widest] + 6:.1f}"' in drawn


def test_markdown_shows_a_prefix_that_looks_like_a_tag_and_code_that_holds_backticks() -> None:
    tokenizer = CharTokenizer(bos="<s>")
    model = uniform(len(tokenizer))
    found = evaluate(model, [model], ["abc def"], tokenizer=tokenizer, names=["a<b>&c"], draws=20, diagnose=0)
    page = to_markdown(replace(found, command="glm5-quant eval --trace 'a `b`'"))
    assert "prefix &lt;s&gt; (bos)" in page and "<s>" not in page
    assert "a&lt;b&gt;&amp;c" in page
    assert "`` glm5-quant eval --trace 'a `b`' ``" in page


def test_names_with_half_a_character_or_a_line_break_spoil_no_report() -> None:
    found = evaluate(uniform(8), [uniform(8)], [[1, 2, 3]], names=["mod\udce8le\n\x1b[31m"], draws=20, diagnose=0)
    for report in (to_table(found), to_markdown(found), to_html(found), to_json(found)):
        report.encode()
    assert json.loads(to_json(found))["exports"][0]["name"] == "mod\udce8le\n\x1b[31m"
    for report in (to_table(found), to_markdown(found)):
        assert "mod\ufffdle\ufffd\ufffd[31m" in report and "\x1b" not in report


def test_charts_of_one_page_are_cut_each_to_its_own_area() -> None:
    def clip(highest: float) -> tuple[str, str]:
        drawn = lines([Series(name="s", points=[(1, 0.0), (2, highest)], colour=0)], "x", "y")
        area = re.search(r'<clipPath id="([^"]+)"><rect x="([^"]+)"', drawn)
        assert area is not None and f'clip-path="url(#{area[1]})"' in drawn
        return area[1], area[2]

    small, large = clip(0.5), clip(12345.678)
    assert small[1] != large[1] and small[0] != large[0]
    assert clip(0.4) == small


def test_a_divergence_below_zero_by_float_noise_is_a_bar_of_no_height() -> None:
    drawn = bars(["g"], [("s", 0, [-1e-3]), ("t", 1, [0.01])], "y")
    heights = re.findall(r'height="(-?[\d.]+)" fill="#', drawn)
    assert float(heights[0]) == 0 and float(heights[1]) > 100


def test_figures_that_are_not_finite_are_a_dash() -> None:
    assert (number(float("nan")), number(float("inf"), True)) == ("-", "-")


def test_numbers_by_turn_are_averaged_over_tokens_and_not_over_turns() -> None:
    tokenizer = CharTokenizer()
    source = uniform(len(tokenizer))
    logits = torch.zeros(len(tokenizer), len(tokenizer))
    logits[tokenizer.get_vocab()["="], tokenizer.get_vocab()["9"]] = 3.0
    # The digit behind "=" differs: one of one in turn 1, none of nine in turn 2.
    spoken = [("user", "q"), ("assistant", "=1"), ("user", "q"), ("assistant", "123456789")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in spoken]}]
    found = evaluate(source, [Bigram(logits)], dialogues=rows, long_dialogue=2, tokenizer=tokenizer, draws=20)
    points = found.exports[0].dialogue.points
    assert [(point.numeric_tokens, point.numeric_flips) for point in points] == [(1, 1.0), (9, 0.0)]
    # One of ten digits is 10%; the mean of 100% and 0% would be 50%.
    labels = re.findall(r'text-anchor="end">([^<]*)', number_turn_chart(found)[1])
    assert labels[0] == "10" and "50" not in labels
