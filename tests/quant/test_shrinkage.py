"""The strength of shrinkage chosen on held-out tokens is the one that really has the least held-out error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quant_samples import gaussian, layer_inputs, moments_of

from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.errors import relative_error
from glm5_quant.quant.factor import order_columns
from glm5_quant.quant.grid import dequantize
from glm5_quant.quant.rounding import solve
from glm5_quant.quant.shrinkage import PROBES, TRUSTS, Evidence, _predicted, _probes, choose_trust, trusted
from glm5_quant.quant.statistics import shrink


def documents(count: int, k: int, seed: int) -> torch.Tensor:
    """Tokens of one document resemble each other, so 32 of them are worth far fewer independent ones."""
    topic = layer_inputs(count, k, seed=seed).repeat_interleave(32, 0)
    return 0.7 * topic + 0.5 * layer_inputs(32 * count, k, seed=seed + 1)


def test_trust_2_is_the_rule_for_independent_tokens() -> None:
    hessian = moments_of(layer_inputs(300, 40))
    assert torch.equal(trusted(hessian, 300.0, 2.0), shrink(hessian, 300.0))
    assert torch.equal(trusted(hessian, 300.0, 0.5), shrink(hessian, 75.0))
    weight = gaussian(8, 40)
    config = QuantConfig()
    assert torch.equal(
        solve(weight, hessian, config, n_eff=300.0, trust=2.0).codes,
        solve(weight, shrink(hessian, 300.0), config).codes,
    )


@pytest.mark.parametrize("count", [6, 40, 300])
def test_the_chosen_strength_has_nearly_the_least_held_out_error(count: int) -> None:
    weight, x = gaussian(48, 128), documents(count, 128, seed=0)
    hessian, held, check = (moments_of(t) for t in (x, documents(300, 128, seed=7), documents(300, 128, seed=70)))
    config = replace(QuantConfig(), shrink=False)
    errors = {}
    for trust in TRUSTS:
        solved = solve(weight, trusted(hessian, len(x), trust), config)
        errors[trust] = float(relative_error(weight, dequantize(solved.codes, solved.grid), check))
    chosen = choose_trust([Evidence(hessian, float(len(x)), held)])
    assert errors[chosen] < 1.02 * min(errors.values())
    assert errors[chosen] <= errors[2.0]


def test_the_probes_have_the_moments_of_the_held_out_tokens_and_the_prediction_is_their_trace() -> None:
    hessian, held = moments_of(layer_inputs(200, 48)), moments_of(layer_inputs(900, 48, seed=3))
    probes = _probes(held)
    assert probes.shape == (48, PROBES)
    power = probes.square().mean(1) * held.diagonal().mean()
    torch.testing.assert_close(power, held.diagonal(), rtol=0.6, atol=0.0)
    order = order_columns(trusted(hessian, 200.0, 0.5)[None], 0.01)
    inverse = torch.linalg.inv(order.unit_EKK[0].double())
    position = order.order_EK[0]
    exact = torch.trace(inverse @ held[position][:, position].double() @ inverse.T) / held.diagonal().sum()
    assert _predicted(Evidence(hessian, 200.0, held), probes, 0.5, 0.01) == pytest.approx(float(exact), rel=0.15)


def test_without_evidence_the_default_is_taken_and_empty_experts_have_no_say() -> None:
    hessian, held = moments_of(layer_inputs(200, 48)), moments_of(layer_inputs(900, 48, seed=3))
    nothing = torch.zeros(48, 48)
    assert choose_trust([]) == 1.0
    assert choose_trust([Evidence(hessian, 200.0, nothing), Evidence(nothing, 0.0, held)]) == 1.0
    one = [Evidence(hessian, 200.0, held)]
    assert choose_trust(one) == choose_trust([*one, Evidence(nothing, 0.0, held)])
