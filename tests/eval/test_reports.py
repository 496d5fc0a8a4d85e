from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from support_stubs import random_bigram

from glm5_quant.eval import evaluate, to_html, to_json, to_markdown, to_table
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
    from dataclasses import replace

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
