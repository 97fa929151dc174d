"""Counters and histograms to which adding is one call; Prometheus' client writes them.

The client's own take a lock and up to nine calls for each number: 110 calls for a request with one
picture. These are added to by one thread, the event loop's, and need no lock.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_Labels = tuple[str, ...]


class _Family(Collector):
    """One metric: a value for each combination of labels that was met; without labels there is one.

    One thread adds, any may read meanwhile: a reader copies in one step of the interpreter.

    Args:
        name: In Prometheus' text, a counter's without `_total`.
        help_text: What is counted.
        labels: Names of the labels, in the order in which values are given.
        registry: Shows it.
    """

    kind: ClassVar[str]
    """Prometheus' word for it."""

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self.name = name
        self.help_text = help_text
        self.labels = tuple(labels)
        registry.register(self)

    @abstractmethod
    def collect(self) -> Iterator[Metric]:
        """Yield the metric as it is now."""


class Counter(_Family):
    """Sums that only grow."""

    kind = "counter"

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        super().__init__(name, help_text, labels, registry=registry)
        self._sums: defaultdict[_Labels, float] = defaultdict(float)
        if not labels:
            self._sums[()] = 0.0

    def add(self, amount: float, *labels: str) -> None:
        """Add to the sum of these labels; `amount` is not negative."""
        self._sums[labels] += amount

    def collect(self) -> Iterator[Metric]:
        """Yield all sums as they are now."""
        family = CounterMetricFamily(self.name, self.help_text, labels=self.labels)
        for labels, total in dict(self._sums).items():
            family.add_metric(labels, total)
        yield family


class Histogram(_Family):
    """How many values lay within each bound, and their sum.

    Args:
        name: See `Counter`.
        help_text: What is measured.
        labels: See `Counter`.
        bounds: Largest value of each bucket, ascending; beyond the last there is one more.
        registry: Shows it.
    """

    kind = "histogram"

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        super().__init__(name, help_text, labels, registry=registry)
        self._bounds: Final = tuple(map(float, bounds))
        # Of each bucket how many values lay in it, not below; then the sum of all.
        self._cells: defaultdict[_Labels, list[float]] = defaultdict(self._new_cell)
        if not labels:
            self._cells[()] = self._new_cell()

    def observe(self, value: float, *labels: str) -> None:
        """Count a value under these labels."""
        cell = self._cells[labels]
        cell[bisect_left(self._bounds, value)] += 1
        cell[-1] += value

    def collect(self) -> Iterator[Metric]:
        """Yield all buckets as they are now."""
        names = [
            floatToGoString(bound)  # type: ignore[no-untyped-call]
            for bound in (*self._bounds, float("inf"))
        ]
        family = HistogramMetricFamily(self.name, self.help_text, labels=self.labels)
        for labels, cell in dict(self._cells).items():
            *counts, total = tuple(cell)
            within = 0.0
            buckets = []
            for name, count in zip(names, counts, strict=True):
                within += count
                buckets.append((name, within))
            family.add_metric(labels, buckets, total)
        yield family

    def _new_cell(self) -> list[float]:
        return [0.0] * (len(self._bounds) + 2)
