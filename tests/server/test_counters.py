"""Our counters and histograms against Prometheus' client's."""

from __future__ import annotations

import random
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client import (
    CollectorRegistry,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)

from lazydecode.server.counters import Counter, Histogram

BOUNDS = (0.001, 0.01, 0.25, 1, 30)


@pytest.fixture(autouse=True)
def _without_times_of_creation() -> Iterator[None]:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    yield
    enable_created_metrics()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_the_clients_own(seed: int) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = Counter("t_requests", 'Asked, "so"\nto say', ["route", "status"], registry=ours)
    seconds = Histogram("t_seconds", "Took", ["route"], bounds=BOUNDS, registry=ours)
    client_counter = prometheus_client.Counter(
        "t_requests", 'Asked, "so"\nto say', ["route", "status"], registry=theirs
    )
    client_seconds = prometheus_client.Histogram(
        "t_seconds", "Took", ["route"], buckets=BOUNDS, registry=theirs
    )
    randomly = random.Random(seed)
    for _ in range(100):
        route, status = randomly.choice("ab\n"), randomly.choice(["200", "422"])
        amount = randomly.choice([1, 2.5, 1 << 40])
        counter.add(amount, route, status)
        client_counter.labels(route, status).inc(amount)
        value = randomly.choice([*BOUNDS, 0.0, 31.0, randomly.expovariate(1)])
        seconds.observe(value, route)
        client_seconds.labels(route).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_without_labels_there_is_a_value_from_the_start_with_labels_none() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    for name, labels in (("t_one", []), ("t_many", ["route"])):
        Counter(name, "Some", labels, registry=ours)
        Histogram(f"{name}_seconds", "Took", labels, bounds=BOUNDS, registry=ours)
        prometheus_client.Counter(name, "Some", labels, registry=theirs)
        prometheus_client.Histogram(
            f"{name}_seconds", "Took", labels, buckets=BOUNDS, registry=theirs
        )
    assert ours.get_sample_value("t_one_total") == 0.0
    assert ours.get_sample_value("t_one_seconds_bucket", {"le": "+Inf"}) == 0.0
    assert ours.get_sample_value("t_many_total", {"route": "a"}) is None
    assert generate_latest(ours) == generate_latest(theirs)
