"""The rule of "no slope", on series that are made up: a leak is found, warming up is none."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from lazydecode.bench.trend import Trend, find_trend

KB_PER_REQUEST = 1.0  # is a MB per 1,000 requests
LOOKS = 120


def run(num_requests: int = 60_000) -> np.ndarray:
    return np.linspace(num_requests / LOOKS, num_requests, LOOKS)


def noise(seed: int, size: float = 3.0) -> np.ndarray:
    """Some MB up and down: what is in flight when one looks."""
    return np.random.default_rng(seed).normal(0, size, LOOKS)


def judged(requests: np.ndarray, sizes: np.ndarray) -> Trend:
    trend = find_trend(requests.tolist(), sizes.tolist())
    assert trend is not None
    return trend


@pytest.mark.parametrize("seed", range(5))
def test_nothing_but_noise_is_flat(seed: int) -> None:
    trend = judged(run(), 600 + noise(seed))
    assert trend.verdict == "flat"
    assert trend.low < 0 < trend.high


@pytest.mark.parametrize("seed", range(5))
def test_a_kilobyte_per_request_is_found(seed: int) -> None:
    trend = judged(run(), 600 + KB_PER_REQUEST * run() / 1000 + noise(seed))
    assert trend.verdict == "grows"
    assert trend.low < KB_PER_REQUEST < trend.high
    assert trend.growth == pytest.approx(30, abs=8)


def test_a_leak_is_found_behind_a_warm_up_that_is_larger() -> None:
    warm_up = 300 * (1 - np.exp(-run() / 5000))
    assert judged(run(), 400 + warm_up + noise(1)).verdict == "flat"
    assert judged(run(), 400 + warm_up + run() / 1000 + noise(1)).verdict == "grows"


@pytest.mark.parametrize("seed", range(5))
def test_the_highest_of_ever_more_is_no_leak(seed: int) -> None:
    """A peak that is kept, as of a heap: it rises ever more seldom, and never stops for good."""
    peaks = np.maximum.accumulate(np.random.default_rng(seed).gumbel(600, 4, 60_000))
    assert judged(run(), peaks[np.linspace(499, 59_999, LOOKS).astype(int)]).verdict != "grows"


@pytest.mark.parametrize(("megabytes", "verdict"), [(5, "flat"), (50, "not decided")])
def test_one_step_late_in_the_run_is_no_leak(megabytes: float, verdict: str) -> None:
    steps = np.where(run() > 45_000, megabytes, 0.0)
    assert judged(run(), 600 + steps + noise(2, 0.5)).verdict == verdict


def test_too_much_noise_for_the_length_of_a_run_decides_nothing() -> None:
    trend = judged(run(6_000), 600 + run(6_000) * KB_PER_REQUEST / 2000 + noise(3, 10.0))
    assert trend.verdict == "not decided"


def test_too_few_requests_say_nothing() -> None:
    assert find_trend([], []) is None
    assert find_trend(run(1_999).tolist(), run(1_999).tolist()) is None
    assert find_trend([1_000.0 * n for n in range(1, 12)], [0.0] * 11) is None
    assert find_trend(run(200).tolist(), [0.0] * LOOKS, warm_up=100) == Trend(0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_slope_and_range_are_those_of_theil_and_sen(seed: int) -> None:
    x = np.linspace(2_000, 48_000, 24) + 2_000_000  # each its own part
    y = 0.3 * x / 1000 + np.random.default_rng(seed).normal(0, 5, 24)
    trend = find_trend([0.0, *x.tolist()], [0.0, *y.tolist()], warm_up=2_000_000)
    theirs = stats.theilslopes(y, x / 1000, 0.95)
    assert trend is not None
    assert trend.slope == pytest.approx(theirs.slope)
    assert trend.low == pytest.approx(theirs.low_slope, abs=0.05)
    assert trend.high == pytest.approx(theirs.high_slope, abs=0.05)
