from __future__ import annotations

import numpy as np
import pytest

from glm5_quant.eval.statistics import equivalence, estimate, resample
from glm5_quant.eval.tally import Histogram


def mean(totals: np.ndarray) -> np.ndarray:
    return totals[..., 1] / totals[..., 0]


def clusters(values: np.ndarray) -> np.ndarray:
    return np.stack([np.ones(len(values)), values], axis=1)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        found = estimate(clusters(generator.normal(1.0, 2.0, size=40)), mean, draws=400, seed=seed)
        hits += found.low <= 1.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.98


def test_clusters_not_tokens_decide_the_width() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=20)
    one = estimate(clusters(values), mean)
    heavy = estimate(clusters(values) * 1000, mean)
    assert one.high - one.low == pytest.approx(heavy.high - heavy.low, rel=1e-9)


def test_the_same_seed_gives_the_same_interval_and_draws_are_paired() -> None:
    sums = clusters(np.arange(30.0))
    assert estimate(sums, mean, seed=3) == estimate(sums, mean, seed=3) != estimate(sums, mean, seed=4)
    assert np.array_equal(resample(sums, seed=3) * 2, resample(sums * 2, seed=3))


def test_one_cluster_has_a_value_but_no_interval_and_none_has_neither() -> None:
    assert estimate(clusters(np.array([2.0])), mean).value == 2.0
    assert estimate(clusters(np.array([2.0])), mean).low is None
    assert estimate(np.zeros((0, 2)), mean).value is None
    assert estimate(np.array([[0.0, 0.0]]), mean).value is None


def test_no_drift_is_claimed_only_inside_the_margin() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.01, size=100)
    noise -= noise.mean()
    said = {
        shift: equivalence(clusters(noise + shift), mean, quantity="x", margin=0.01).verdict
        for shift in (0.0, 0.0095, 0.05)
    }
    assert said == {0.0: "equivalent", 0.0095: "different", 0.05: "different"}
    wide = generator.normal(0, 1, size=10)
    assert equivalence(clusters(wide - wide.mean()), mean, quantity="x", margin=0.01).verdict == "undecided"
    assert equivalence(clusters(np.zeros(1)), mean, quantity="x", margin=0.01).verdict == "undecided"
    assert equivalence(clusters(np.zeros(5)), mean, quantity="x", margin=0.01).verdict == "equivalent"


def test_percentiles_of_the_histogram_lie_within_its_stated_error() -> None:
    generator = np.random.default_rng(0)
    values = generator.lognormal(-4, 2, size=20000)
    histogram = Histogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    for share in (0.5, 0.9, 0.99, 0.999):
        assert histogram.percentile(share) == pytest.approx(np.quantile(values, share), rel=0.02)
    assert histogram.largest == values.max()
    zeros = Histogram()
    zeros.add(np.zeros(10))
    assert zeros.percentile(0.99) == 0
    assert np.isnan(Histogram().percentile(0.5))
