"""Moments against float64 sums, and the two ways of trusting them less."""

from __future__ import annotations

import pytest
import torch
from quant_samples import gaussian, layer_inputs

from glm5_quant.quant.errors import quadratic_rows, relative_error
from glm5_quant.quant.statistics import Moments, accumulate_cross


@pytest.mark.parametrize(("tokens", "k"), [(1, 5), (700, 200), (2500, 431)])
def test_moments_are_the_weighted_means_of_outer_products(tokens: int, k: int) -> None:
    x, source, weight = layer_inputs(tokens, k), layer_inputs(tokens, k, seed=1), gaussian(tokens).abs()
    moments = Moments.empty(k, gap=True)
    for part in (slice(0, 400), slice(400, None)):
        moments.add(x[part], weight[part], source[part])
    w = weight.double()
    h = (x.double() * w[:, None]).T @ x.double() / w.sum()
    c = ((source.double() - x.double()) * w[:, None]).T @ x.double() / w.sum()
    scale = float(h.diagonal().mean())
    assert float((moments.hessian_KK.double() - h).abs().max()) < 1e-5 * scale * 10
    assert moments.gap_KK is not None
    assert float((moments.gap_KK.double() - c).abs().max()) < 1e-5 * scale * 10
    assert torch.equal(moments.hessian_KK, moments.hessian_KK.T)
    assert moments.n_eff == pytest.approx(float(w.sum() ** 2 / w.square().sum()), rel=1e-6)
    assert moments.tokens == tokens


def test_bfloat16_products_change_the_gap_by_less_than_a_hundredth() -> None:
    x, source = layer_inputs(5000, 48), layer_inputs(5000, 48) + 0.1 * layer_inputs(5000, 48, seed=1)
    gaps = []
    for dtype in (torch.float32, torch.bfloat16):
        moments = Moments.empty(48, gap=True, product_dtype=dtype)
        moments.add(x, None, source)
        assert moments.gap_KK is not None
        gaps.append(moments.gap_KK)
    assert float((gaps[1] - gaps[0]).norm() / gaps[0].norm()) < 0.01


def test_bfloat16_products_change_the_moments_by_less_than_their_sampling_noise() -> None:
    x = layer_inputs(9000, 300).bfloat16()
    weight = gaussian(9000).abs()
    exact = (x.double() * weight.double()[:, None]).T @ x.double() / weight.double().sum()
    moments = Moments.empty(300, product_dtype=torch.bfloat16)
    for part in (slice(0, 5000), slice(5000, None)):
        moments.add(x[part], weight[part])
    error = float((moments.hessian_KK.double() - exact).norm() / exact.norm())
    other = Moments.empty(300)
    other.add(x[:4500], weight[:4500])
    assert error < 0.003
    assert float((other.hessian_KK.double() - exact).norm() / exact.norm()) > 3 * error
    assert torch.equal(moments.hessian_KK, moments.hessian_KK.T)


def test_merged_moments_are_those_of_all_tokens() -> None:
    x, source, weight = layer_inputs(50, 6), layer_inputs(50, 6, seed=1), gaussian(50).abs()
    first, other, whole = (Moments.empty(6, gap=True) for _ in range(3))
    for moments, part in ((first, slice(0, 20)), (other, slice(20, None)), (whole, slice(None))):
        moments.add(x[part], weight[part], source[part])
    assert not torch.allclose(first.hessian_KK, whole.hessian_KK)
    first.merge(other)
    torch.testing.assert_close(first.hessian_KK, whole.hessian_KK)
    torch.testing.assert_close(first.gap_KK, whole.gap_KK)
    assert first.n_eff == pytest.approx(whole.n_eff)
    assert first.tokens == 50
    blind = Moments.empty(6)
    blind.add(x)
    first.merge(blind)
    assert first.gap_KK is None


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_crossed_sums_are_those_of_float64(dtype: torch.dtype, near: float) -> None:
    left, x, weight = gaussian(5000, 3), layer_inputs(5000, 7), gaussian(5000).abs()
    for by in (None, weight):
        found = torch.ones(3, 7)
        accumulate_cross(found, left, x, by, dtype)
        whole = 1.0 + (left.double() * (1.0 if by is None else by.double()[:, None])).T @ x.double()
        assert float((found - whole).norm() / whole.norm()) < near


def test_moments_make_again_what_they_forgot() -> None:
    moments = Moments.empty(8)
    moments.add(layer_inputs(50, 8))
    before = moments.hessian_KK
    moments.forget()
    assert moments.hessian_KK is not before
    assert torch.equal(moments.hessian_KK, before)


def test_without_weights_every_token_counts_once() -> None:
    x = layer_inputs(50, 8)
    moments = Moments.empty(8)
    moments.add(x)
    torch.testing.assert_close(moments.hessian_KK, x.T @ x / 50)
    assert moments.n_eff == 50
    assert moments.gap_KK is None


def test_a_source_followed_over_the_last_tokens_only_gives_the_gap_of_those() -> None:
    x, source, weight = layer_inputs(30, 6), layer_inputs(30, 6, seed=1), gaussian(30).abs()
    moments = Moments.empty(6, gap=True)
    moments.add(x[:10], weight[:10], source[:0])
    moments.add(x[10:], weight[10:], source[18:])
    assert moments.gap_KK is not None
    exact = ((source - x)[18:] * weight[18:, None]).T @ x[18:] / weight[18:].sum()
    torch.testing.assert_close(moments.gap_KK, exact)
    torch.testing.assert_close(moments.hessian_KK, (x * weight[:, None]).T @ x / weight.sum())


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    x = layer_inputs(3000, 16).bfloat16()
    moments = Moments.empty(16)
    moments.add(x)
    exact = x.double().T @ x.double() / 3000
    assert float((moments.hessian_KK - exact).abs().max() / exact.abs().max()) < 1e-6


def test_two_equal_weights_and_one_of_zero_are_two_effective_tokens() -> None:
    moments = Moments.empty(2)
    moments.add(torch.ones(3, 2), torch.tensor([0.5, 0.5, 0.0]))
    assert moments.n_eff == 2.0


def test_nothing_seen_is_zero_tokens_and_a_zero_h() -> None:
    moments = Moments.empty(4, gap=True)
    moments.add(torch.empty(0, 4), torch.empty(0), torch.empty(0, 4))
    assert moments.n_eff == 0.0
    assert torch.equal(moments.hessian_KK, torch.zeros(4, 4))


def test_moments_do_not_depend_on_the_number_of_threads() -> None:
    x = layer_inputs(2048, 448)
    sums = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            moments = Moments.empty(448, gap=True)
            moments.add(x, None, x)
        finally:
            torch.set_num_threads(1)
        sums.append(moments)
    assert torch.equal(sums[0].sum_KK, sums[1].sum_KK)
    assert torch.equal(sums[0].gap_sum_KK, sums[1].gap_sum_KK)


def test_inputs_of_the_wrong_width_or_without_their_source_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 5\), expected \[T, 4\]"):
        Moments.empty(4).add(torch.ones(3, 5))
    with pytest.raises(ValueError, match="source_TK"):
        Moments.empty(4, gap=True).add(torch.ones(3, 4))


def test_quadratic_forms_are_output_errors() -> None:
    weight, other, x = gaussian(5, 12), gaussian(5, 12, seed=1), layer_inputs(90, 12)
    hessian = x.T @ x / 90
    outputs = (x @ (weight - other).T).square().mean(0)
    torch.testing.assert_close(quadratic_rows(weight - other, hessian), outputs, rtol=1e-4, atol=1e-5)
    whole = (x @ weight.T).square().mean(0).sum()
    torch.testing.assert_close(relative_error(weight, other, hessian), outputs.sum() / whole, rtol=1e-4, atol=1e-6)
