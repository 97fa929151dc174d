"""Whether memory grows with every request, or has only not been used before.

A server warms up for long: each size of item, each pool and each place in a cache is used for a
first time, and the most that it ever needed at once rises ever more seldom. A leak does not stop:
it takes as much in the second half of a run as in the first. So the second half decides. There
its slope is estimated by Theil and Sen's median, which single steps do not move, over medians of
equal parts, which peaks do not move; and it is known only within a range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np

MAX_SLOPE: Final = 0.5
"""MB per 1,000 requests that still count as flat: half of the smallest leak that is to be found."""
WARM_UP_REQUESTS: Final = 2_000
"""At least so many are left out, however short a run is."""
_PARTS: Final = 24
_MIN_PARTS: Final = 10
"""With fewer the range is as wide as everything that was seen."""
_NORMAL_95: Final = 1.96

Verdict = Literal["flat", "grows", "not decided"]


@dataclass(frozen=True, slots=True)
class Trend:
    """MB per 1,000 requests, once warm, and the range that holds it 19 times of 20."""

    slope: float
    low: float
    high: float
    growth: float
    """MB, from the first part that counts to the last."""

    @property
    def verdict(self) -> Verdict:
        """What can be said: a range with the bound inside decides nothing."""
        if self.high <= MAX_SLOPE:
            return "flat"
        return "grows" if self.low > MAX_SLOPE else "not decided"


def find_trend(
    requests: Sequence[float], sizes: Sequence[float], *, warm_up: float = WARM_UP_REQUESTS
) -> Trend | None:
    """Return how memory grows with requests in the second half of a run.

    Args:
        requests: How many had been answered at each look, rising.
        sizes: MB at each look.
        warm_up: Requests that do not count, if they are more than half.

    Returns:
        None if the run is too short to say anything.

    Source:
        P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", Journal of the
        American Statistical Association 63 (1968).
    """
    if not requests:
        return None
    begin = max(warm_up, requests[-1] / 2)
    counted = [(n / 1000, size) for n, size in zip(requests, sizes, strict=True) if n >= begin]
    num_parts = min(_PARTS, len(counted))
    if num_parts < _MIN_PARTS:
        return None
    bounds = np.linspace(0, len(counted), num_parts + 1).astype(int)
    parts = [np.median(counted[first:end], axis=0) for first, end in pairwise(bounds)]
    x, y = np.array(parts).T
    first, second = np.triu_indices(num_parts, 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    # Kendall's statistic of as many points without a trend has this deviation.
    deviation = math.sqrt(num_parts * (num_parts - 1) * (2 * num_parts + 5) / 18)
    beyond = (len(slopes) - _NORMAL_95 * deviation) / 2
    lowest = max(0, math.floor(beyond))
    return Trend(
        slope=float(np.median(slopes)),
        low=float(slopes[lowest]),
        high=float(slopes[len(slopes) - 1 - lowest]),
        growth=float(y[-1] - y[0]),
    )
