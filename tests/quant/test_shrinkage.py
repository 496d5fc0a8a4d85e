"""Shrinkage by the number of tokens and by how much the tokens vary: hand-computed cases, and what it saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quant_samples import gaussian, layer_inputs, moments_of
from torch import Tensor

from glm5_quant.quant.config import QuantConfig
from glm5_quant.quant.errors import relative_error
from glm5_quant.quant.grid import dequantize
from glm5_quant.quant.rounding import solve
from glm5_quant.quant.shrinkage import Noise, drawn_together, shrinkage, trusted
from glm5_quant.quant.statistics import SAMPLE_TOKENS, Moments


def of_tokens(x_TK: Tensor, weight_T: Tensor | None = None) -> tuple[Tensor, Noise]:
    """H of some tokens, and what they say of its noise."""
    moments = Moments.empty(x_TK.shape[1])
    moments.add(x_TK, weight_T)
    noise = Noise.of(moments.hessian_KK, moments, moments.sample_TK)
    assert noise is not None
    return moments.hessian_KK, noise


def heavy_tailed(tokens: int, k: int, seed: int = 0) -> Tensor:
    """Each channel is large for a few tokens, as hidden activations of gated networks are."""
    return layer_inputs(tokens, k, seed=seed) * gaussian(tokens, k, seed=seed + 1).exp()


def test_correlations_shrink_by_the_number_of_tokens_and_the_diagonal_stays() -> None:
    hessian = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
    assert torch.equal(trusted(hessian, 2.0, 1.0), torch.tensor([[2.0, 0.5], [0.5, 4.0]]))
    assert torch.equal(trusted(hessian, 1.0, 2.0), torch.tensor([[2.0, 0.5], [0.5, 4.0]]))
    assert torch.equal(trusted(hessian, 0.0, 1.0), torch.diag(torch.tensor([2.0, 4.0])))
    assert shrinkage(1536, 1536.0, 1.0) == shrinkage(1536, 768.0, 2.0) == 0.5
    stack = trusted(torch.stack([hessian, hessian]), torch.tensor([2.0, 0.0]), 1.0)
    assert torch.equal(stack[0], trusted(hessian, 2.0, 1.0))
    assert torch.equal(stack[1], trusted(hessian, 0.0, 1.0))


def test_two_channels_by_hand() -> None:
    # x = (1, 1), (1, -1), (3, 3), (3, -3): H = 5 I, no correlation; squares 1 and 9 in both channels.
    hessian, noise = of_tokens(torch.tensor([[1.0, 1.0], [1.0, -1.0], [3.0, 3.0], [3.0, -3.0]]))
    assert torch.equal(hessian, 5 * torch.eye(2))
    assert noise.correlation == 0.0
    # Mean of x^4 is 41, so that of (x^2 / 5)^2 is 1.64; less 1, by 4 tokens.
    torch.testing.assert_close(noise.diagonal_K, torch.full((2,), 0.16))
    hessian, noise = of_tokens(torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, -1.0]]))
    # The correlation 0.5 is a mean of four signs, whose variance is (1 - 0.25) / 4 = 0.1875: 0.75 of its square.
    assert noise.correlation == pytest.approx(0.75)
    assert torch.equal(noise.diagonal_K, torch.zeros(2))


def test_independent_channels_are_all_noise_and_known_ones_none() -> None:
    tokens, k = 400, 128
    _, independent = of_tokens(gaussian(tokens, k))
    assert independent.correlation > 0.9
    torch.testing.assert_close(independent.diagonal_K.mean(), torch.tensor(2.0 / tokens), rtol=0.1, atol=0.0)
    shared = gaussian(tokens, 1, seed=3) + 0.1 * gaussian(tokens, k, seed=4)
    assert of_tokens(shared)[1].correlation < 0.01


def test_tokens_without_weight_are_not_there() -> None:
    x = heavy_tailed(60, 16)
    weight = torch.cat([torch.full((40,), 2.0), torch.zeros(20)])
    for one, other in zip(of_tokens(x, weight), of_tokens(x[:40]), strict=True):
        if isinstance(one, Noise):
            assert isinstance(other, Noise)
            assert one.correlation == pytest.approx(other.correlation, rel=1e-4)
            one, other = one.diagonal_K, other.diagonal_K
        torch.testing.assert_close(one, other)


def test_the_sample_is_the_first_tokens_however_they_come_and_stands_for_all() -> None:
    k = SAMPLE_TOKENS
    x = layer_inputs(3 * SAMPLE_TOKENS, k)
    whole, parts = Moments.empty(k), Moments.empty(k)
    whole.add(x)
    for part in x.split(700):
        parts.add(part)
    assert torch.equal(whole.sample_TK, x[:SAMPLE_TOKENS])
    assert torch.equal(parts.sample_TK, whole.sample_TK)
    assert torch.equal(parts.sample_weights, torch.ones(SAMPLE_TOKENS))
    hessian, noise = of_tokens(x)
    exact = ((x.square() / hessian.diagonal()).square().mean(0) - 1) / len(x)
    torch.testing.assert_close(noise.diagonal_K.mean(), exact.mean(), rtol=0.03, atol=0.0)


def test_merged_moments_keep_the_first_sample() -> None:
    first, other, empty = (Moments.empty(4) for _ in range(3))
    first.add(layer_inputs(5, 4))
    other.add(layer_inputs(7, 4, seed=1))
    empty.merge(other)
    assert torch.equal(empty.sample_TK, other.sample_TK)
    first.merge(other)
    assert torch.equal(first.sample_TK, layer_inputs(5, 4))


def test_without_tokens_or_with_nothing_but_zeros_there_is_no_noise_to_tell() -> None:
    nothing = Moments.empty(4)
    assert Noise.of(nothing.hessian_KK, nothing, nothing.sample_TK) is None
    nothing.add(torch.zeros(3, 4))
    assert Noise.of(nothing.hessian_KK, nothing, nothing.sample_TK) is None


def test_where_there_are_plenty_of_tokens_nothing_is_told() -> None:
    moments = Moments.empty(4)
    moments.add(layer_inputs(15, 4))
    assert Noise.of(moments.hessian_KK, moments, moments.sample_TK) is not None
    moments.add(layer_inputs(1, 4, seed=1))
    assert Noise.of(moments.hessian_KK, moments, moments.sample_TK) is None


def test_a_diagonal_is_drawn_to_its_geometric_mean_by_the_share_of_noise() -> None:
    diagonal = torch.tensor([1.0, 4.0]).exp()
    # Logarithms 1 and 4: variance 2.25, of which 0.25 is noise and 2 is left; each keeps 2 / 2.25 of its distance.
    drawn = drawn_together(diagonal, torch.full((2,), 0.25))
    torch.testing.assert_close(drawn.log(), torch.tensor([2.5 - 1.5 * 8 / 9, 2.5 + 1.5 * 8 / 9]))
    assert torch.equal(drawn_together(diagonal, torch.zeros(2)), diagonal)
    noisy = drawn_together(diagonal, torch.full((2,), 9.0))
    torch.testing.assert_close(noisy.log(), torch.full((2,), 2.5))
    with_zero = drawn_together(torch.tensor([0.0, *diagonal.tolist()]), torch.full((3,), 0.25))
    assert with_zero[0] == 0.0
    torch.testing.assert_close(with_zero[1:], drawn)
    assert torch.equal(drawn_together(torch.zeros(2), torch.ones(2)), torch.zeros(2))


def test_a_drawn_diagonal_keeps_the_correlations() -> None:
    hessian = moments_of(layer_inputs(300, 16))
    noise = Noise(correlation=0.25, diagonal_K=torch.full((16,), 0.1))
    mixed = trusted(hessian, 1e9, 1.0, noise)
    torch.testing.assert_close(mixed.diagonal(), drawn_together(hessian.diagonal(), noise.diagonal_K))
    before, after = (m / m.diagonal().sqrt() / m.diagonal().sqrt()[:, None] for m in (hessian, mixed))
    expected = 0.75 * before
    expected.diagonal().fill_(1.0)
    torch.testing.assert_close(after, expected)


def test_few_heavy_tailed_tokens_cost_less_once_their_noise_is_known() -> None:
    weight, config = gaussian(48, 64), QuantConfig()
    held = moments_of(heavy_tailed(40000, 64, seed=9))
    ratios = []
    for seed in range(6):
        hessian, noise = of_tokens(heavy_tailed(64, 64, seed=20 + 10 * seed))
        solved = [solve(weight, hessian, config, n_eff=64.0, noise=one) for one in (None, noise)]
        without, known = (float(relative_error(weight, dequantize(s.codes, s.grid), held)) for s in solved)
        ratios.append(known / without)
    assert sum(ratios) / len(ratios) < 0.93
    assert max(ratios) < 1.0


def test_the_solver_uses_what_it_is_told() -> None:
    weight = gaussian(8, 40)
    hessian, noise = of_tokens(heavy_tailed(50, 40))
    plain = replace(QuantConfig(), shrink=False)
    codes = solve(weight, hessian, QuantConfig(shrink_trust=0.5), n_eff=50.0, noise=noise).codes
    assert torch.equal(codes, solve(weight, trusted(hessian, 50.0, 0.5, noise), plain).codes)
    assert torch.equal(
        solve(weight, hessian, plain, n_eff=50.0, noise=noise).codes, solve(weight, hessian, plain).codes
    )
