"""Metrics of several processes, summed up."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lazydecode.server.samples import (
    Family,
    only_accumulated,
    read_samples,
    sum_up,
    write_samples,
)


def process(requests: int, seconds: float, held: int, up: int) -> list[Family]:
    registry = CollectorRegistry()
    counter = Counter("lazydecode_requests", "Answered", ["route"], registry=registry)
    counter.labels("chat").inc(requests)
    counter.labels(f"only-{requests}").inc()
    Histogram("lazydecode_seconds", "Took", buckets=(0.1, 1), registry=registry).observe(seconds)
    Gauge("lazydecode_held_bytes", "Held", registry=registry).set(held)
    Gauge("lazydecode_engine_up", "Up", registry=registry).set(up)
    return read_samples(registry)


def test_one_process_is_written_as_its_own_registry_would() -> None:
    registry = CollectorRegistry()
    Counter("lazydecode_requests", "Answered", ["route"], registry=registry).labels("a").inc(3)
    Histogram("lazydecode_seconds", "Took", buckets=(0.1, 1), registry=registry).observe(0.5)
    Gauge("lazydecode_held_bytes", "Held", registry=registry).set(7)
    assert write_samples(sum_up([read_samples(registry)])) == generate_latest(registry)


def test_counters_histograms_and_gauges_add_up_and_the_lowest_engine_counts() -> None:
    groups = [process(3, 0.05, 100, 1), process(4, 0.5, 10, 0)]
    # As they arrive from another process.
    groups = msgspec.json.decode(msgspec.json.encode(groups), type=list[list[Family]])
    written = write_samples(sum_up(groups)).decode().splitlines()
    for line in (
        'lazydecode_requests_total{route="chat"} 7.0',
        'lazydecode_requests_total{route="only-3"} 1.0',
        'lazydecode_requests_total{route="only-4"} 1.0',
        'lazydecode_seconds_bucket{le="0.1"} 1.0',
        'lazydecode_seconds_bucket{le="+Inf"} 2.0',
        "lazydecode_seconds_sum 0.55",
        "lazydecode_held_bytes 110.0",
        "lazydecode_engine_up 0.0",
    ):
        assert line in written


def test_of_a_process_that_is_gone_only_counts_remain() -> None:
    gone = only_accumulated(process(3, 0.05, 100, 0))
    written = write_samples(sum_up([gone, process(4, 0.5, 10, 1)])).decode().splitlines()
    assert 'lazydecode_requests_total{route="chat"} 7.0' in written
    assert "lazydecode_held_bytes 10.0" in written
    assert "lazydecode_engine_up 1.0" in written
