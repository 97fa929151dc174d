"""Metrics of several processes as one: plain values that can be sent, summed up and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

_LOWEST: Final = frozenset({"lazydecode_engine_up"})
"""Gauges of which the lowest value counts; all others are summed up."""
_ACCUMULATED: Final = frozenset({"counter", "histogram"})
"""Kinds that keep counting when a process is gone."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One value."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric with all its samples."""

    name: str
    kind: str
    help: str
    samples: list[Sample]


def read_samples(registry: CollectorRegistry) -> list[Family]:
    """Return what a registry holds now."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [Sample(s.name, dict(s.labels), s.value) for s in metric.samples],
        )
        for metric in registry.collect()
    ]


def sum_up(groups: Iterable[list[Family]]) -> list[Family]:
    """Return one value per name and labels over all processes."""
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for group in groups:
        for family in group:
            families.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                if key not in known:
                    known[key] = sample.value
                elif family.name in _LOWEST:
                    known[key] = min(known[key], sample.value)
                else:
                    known[key] += sample.value
    return [
        Family(
            name,
            family.kind,
            family.help,
            [Sample(n, dict(labels), value) for (n, labels), value in values[name].items()],
        )
        for name, family in families.items()
    ]


def only_accumulated(families: list[Family]) -> list[Family]:
    """Return what still counts of a process that is gone."""
    return [family for family in families if family.kind in _ACCUMULATED]


def write_samples(families: list[Family]) -> bytes:
    """Return Prometheus' text form."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(families))
    return generate_latest(registry)


class _Fixed:
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric
