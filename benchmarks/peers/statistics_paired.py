"""Bootstrap over windows: intervals of a mean and of the ratio of two paired means. Seeded, 2,000 draws."""

import numpy as np

DRAWS = 2000


def draws(windows: int, seed: int = 0) -> np.ndarray:
    """[DRAWS, windows] window numbers drawn with replacement; the same for every figure, so that pairs stay pairs."""
    return np.random.default_rng(seed).integers(0, windows, (DRAWS, windows))


def interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the mean."""
    means = np.asarray(values)[draws(len(values))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def ratio(numerator: list[float], denominator: list[float]) -> tuple[float, float, float]:
    """(ratio of the means, low, high): 95% interval over paired draws of windows."""
    top, bottom = np.asarray(numerator), np.asarray(denominator)
    picked = draws(len(top))
    low, high = np.percentile(top[picked].mean(1) / bottom[picked].mean(1), [2.5, 97.5])
    return float(top.mean() / bottom.mean()), float(low), float(high)


def ratio_of_rates(top_sum, top_count, bottom_sum, bottom_count) -> tuple[float, float, float]:
    """As `ratio`, for rates whose counts differ between windows (numeric positions)."""
    arrays = [np.asarray(values) for values in (top_sum, top_count, bottom_sum, bottom_count)]
    picked = draws(len(arrays[0]))
    sums = [values[picked].sum(1) for values in arrays]
    low, high = np.percentile((sums[0] / sums[1]) / (sums[2] / sums[3]), [2.5, 97.5])
    totals = [values.sum() for values in arrays]
    return float((totals[0] / totals[1]) / (totals[2] / totals[3])), float(low), float(high)
