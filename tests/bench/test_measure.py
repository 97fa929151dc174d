from __future__ import annotations

import gc
import time

import pytest

from lazydecode.bench.measure import measure, percentile
from lazydecode.bench.server_process import difference, histogram_percentile


def test_contestants_take_turns_and_the_order_moves_on() -> None:
    calls: list[str] = []

    def slow(name: str) -> None:
        time.sleep(0.006)
        calls.append(name)

    measure({name: lambda name=name: slow(name) for name in "abc"}, rounds=3)  # type: ignore[misc]
    assert "".join(calls) == "aaabbbccc" + "abc" + "bca" + "cab"


def test_short_calls_are_repeated_and_the_collector_is_restored() -> None:
    found = measure({"nothing": lambda: None}, rounds=2)
    assert found["nothing"].calls_per_round > 100
    assert gc.isenabled()


def test_rounds_end_when_the_time_is_up_but_three_are_run() -> None:
    found = measure({"slow": lambda: time.sleep(0.006)}, rounds=50, max_s=0.0)
    assert found["slow"].rounds == 3


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([], 0.5, 0), ([3], 0.99, 3), ([1, 2, 3, 4], 0.5, 2.5), ([4, 1, 3, 2], 1.0, 4)],
)
def test_percentiles_are_interpolated(
    values: list[float], fraction: float, expected: float
) -> None:
    assert percentile(values, fraction) == expected


def test_a_histogram_is_read_between_two_looks() -> None:
    before = {("lag_bucket", 'le="0.1"'): 5.0, ("lag_bucket", 'le="+Inf"'): 5.0}
    after = {
        ("lag_bucket", 'le="0.1"'): 5.0,
        ("lag_bucket", 'le="0.5"'): 9.0,
        ("lag_bucket", 'le="+Inf"'): 10.0,
    }
    after[("lag_bucket", 'le="0.1"')] = 8.0
    before[("lag_bucket", 'le="0.5"')] = 5.0
    assert histogram_percentile(before, after, "lag", 0.5) == 0.1
    assert histogram_percentile(before, after, "lag", 0.8) == 0.5
    assert histogram_percentile(before, before, "lag", 0.5) is None
    assert histogram_percentile({}, {}, "lag", 0.5) is None


def test_a_counter_grows_over_all_its_labels() -> None:
    before = {("decodes", 'm="image"'): 2.0}
    after = {("decodes", 'm="image"'): 3.0, ("decodes", 'm="video"'): 4.0}
    assert difference(before, after, "decodes") == 5.0
    assert difference({}, {}, "decodes") is None
