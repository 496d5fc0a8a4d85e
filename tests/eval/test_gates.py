from __future__ import annotations

import pytest
from support_stubs import random_bigram

from glm5_quant.eval import evaluate
from glm5_quant.eval.gates import parse_gates
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
    result = evaluate(
        random_bigram(0), [random_bigram(1)], [list(range(32))], gates="growth<8%,kl<10,kl>10,perplexity<1000%"
    )
    assert [(gate.passed, gate.reason) for gate in result.gates] == [
        (False, "not measured"),
        (True, ""),
        (False, ""),
        (True, ""),
    ]
