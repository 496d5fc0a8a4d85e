from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_stubs import Bigram, CharTokenizer, random_bigram, uniform

from glm5_quant.eval import evaluate
from glm5_quant.eval.gates import QUANTITIES, decide, parse_gates
from glm5_quant.eval.report_tables import gate_table
from glm5_quant.eval.statistics import Estimate
from glm5_quant.model.errors import UserError


def test_gates_are_read_with_signs_and_percentages() -> None:
    gates = parse_gates("kl<0.05, numeric<0.5%,flips>=1e-3")
    assert [(gate.quantity, gate.sign, gate.limit) for gate in gates] == [
        ("kl", "<", 0.05),
        ("numeric", "<", 0.005),
        ("flips", ">=", 0.001),
    ]
    assert parse_gates("") == ()


@pytest.mark.parametrize("text", ["kl=1", "nothing<1", "kl<nan", "kl<", "kl<1e", "kl<1 numeric<2"])
def test_a_gate_that_cannot_be_read_is_refused_before_any_work(text: str) -> None:
    with pytest.raises(UserError, match="cannot read this gate"):
        parse_gates(text)


def test_what_was_not_measured_does_not_pass() -> None:
    # Without a tokenizer no token is numeric.
    result = evaluate(
        random_bigram(0), [random_bigram(1)], [list(range(32))], gates="numeric<8%,kl<10,kl>10,perplexity<1000%"
    )
    assert [(gate.passed, gate.reason) for gate in result.gates] == [
        (False, "not measured"),
        (True, ""),
        (False, ""),
        (True, ""),
    ]


def test_each_gate_reads_its_own_figure() -> None:
    def part(name: str, kl: float, flips: float) -> SimpleNamespace:
        ratio = Estimate(value=1.0 + kl / 2)
        return SimpleNamespace(name=name, kl=Estimate(value=kl), flips=Estimate(value=flips), perplexity_ratio=ratio)

    spoken = SimpleNamespace(relative_growth=Estimate(value=0.07), slices=[part("all", 9, 9), part("critical", 9, 0.6)])
    export: Any = SimpleNamespace(
        name="a", status="ok", dialogue=spoken, slices=[part("all", 0.5, 0.2), part("numeric", 0.3, 0.4)]
    )
    names = ("kl", "numeric_kl", "numeric", "critical", "flips", "perplexity", "growth")
    values = (0.5, 0.3, 0.4, 0.6, 0.2, 0.25, 0.07)
    assert set(names) == set(QUANTITIES)
    limits = [f"{name}<={value}" for name, value in zip(names, values, strict=True)]
    found = decide(parse_gates(",".join(limits)), [export])
    assert [(gate.value, gate.passed) for gate in found] == [(value, True) for value in values]
    assert not any(gate.passed for gate in decide(parse_gates(",".join(limits).replace("<=", "<")), [export]))
    assert not any(gate.passed for gate in decide(parse_gates("kl<1"), [export], sound=False))
    export.slices[0].kl, export.dialogue = Estimate(value=float("nan")), None
    assert [gate.reason for gate in decide(parse_gates("kl<1,growth<1"), [export])] == ["not measured"] * 2
    export.status = "invalid"
    assert not any(gate.passed for gate in decide(parse_gates("flips<1"), [export]))


def test_a_value_stands_in_the_unit_of_its_limit() -> None:
    """0.97 beside a limit of 8% would read as passed."""
    result = evaluate(random_bigram(0), [random_bigram(1)], [list(range(32))], gates="flips<8%,flips<0.08", draws=20)
    table = gate_table(result)
    value = result.gates[0].value
    assert table is not None and value is not None and 0.08 < value < 8
    assert [row[2] for row in table.rows] == [f"{100 * value:.4g}%", f"{value:.4g}"]


@pytest.mark.parametrize(("gate", "option"), [("growth<8%", "long-dialogue"), ("kl<1,critical<1%", "critical-words")])
def test_a_gate_on_what_will_not_be_measured_is_refused_before_any_model_runs(gate: str, option: str) -> None:
    source = random_bigram(0)
    with pytest.raises(UserError, match=f"this will not be measured.*--{option}"):
        evaluate(source, [source], [list(range(32))], gates=gate)
    assert source.calls == 0


def test_a_list_of_gates_without_a_gate_is_refused() -> None:
    with pytest.raises(UserError, match="no gate in it"):
        parse_gates(" , ")


def test_no_gate_passes_where_the_source_turns_out_broken_halfway() -> None:
    table = random_bigram(0).log_table.clone()
    table[30] = torch.nan
    texts = [[1, 2, 3, 4, 5] * 8, [6, 30, 2]]
    result = evaluate(Bigram(table), [random_bigram(0)], texts, window=8, gates="kl<100", draws=20)
    assert result.status == "invalid" and result.exports[0].slice("all") is not None
    assert [(gate.value, gate.passed, gate.reason) for gate in result.gates] == [(None, False, "the result is invalid")]
    assert not result.gates_passed


def test_one_turn_has_no_growth_so_a_gate_on_it_does_not_pass() -> None:
    tokenizer = CharTokenizer()
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b 5"}]}] * 3
    source, export = uniform(len(tokenizer)), random_bigram(1, len(tokenizer))
    result = evaluate(
        source, [export], dialogues=rows, long_dialogue=1, tokenizer=tokenizer, draws=20, gates="growth<1%"
    )
    found = result.exports[0].dialogue
    assert found is not None and found.ratio_at["1"].value not in (None, 1.0)
    assert (found.growth.value, found.relative_growth.value, found.source_growth.value) == (None, None, None)
    assert [(gate.passed, gate.reason) for gate in result.gates] == [(False, "not measured")]
