"""Prometheus metrics: one registry per server, fed at the borders between stages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from lazydecode.renderers.timeline import Timeline
from lazydecode.server.counters import Counter, Histogram
from lazydecode.server.samples import Family, read_samples

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_FAST: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LAG: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
_LAG_PERIOD_S: Final = 0.02
"""A hundred samples in two seconds. A sample wakes an idle loop, which takes 0.1 ms of CPU."""


class Metrics:
    """All metrics of one server.

    What counts is called on the event loop, and cheap; what reads may be called on any thread.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "lazydecode_requests",
            "Requests answered; status 499: the client went away",
            ["route", "status"],
            registry=registry,
        )
        self.latency = Histogram(
            "lazydecode_request_seconds",
            "From the first header byte to the last byte of the answer",
            ["route"],
            bounds=_FAST,
            registry=registry,
        )
        self.stages = Histogram(
            "lazydecode_stage_seconds",
            "Stages of whole requests",
            ["stage"],
            bounds=_FAST,
            registry=registry,
        )
        self.item_stages = Histogram(
            "lazydecode_item_stage_seconds",
            "Stages of single media items",
            ["modality", "stage"],
            bounds=_FAST,
            registry=registry,
        )
        self.items = Counter(
            "lazydecode_items",
            "Media items by what the processor cache knew: hit, miss, or uncached",
            ["modality", "outcome"],
            registry=registry,
        )
        self.decodes = Counter(
            "lazydecode_decodes", "Decoder runs, failed ones too", ["modality"], registry=registry
        )
        self.fallbacks = Counter(
            "lazydecode_fallbacks",
            "Requests whose media were decoded to count their tokens: headers did not say",
            registry=registry,
        )
        self.media_bytes = Counter(
            "lazydecode_media_bytes", "Encoded bytes fetched", ["modality"], registry=registry
        )
        self.prompt_tokens = Counter(
            "lazydecode_prompt_tokens", "Prompt tokens rendered", registry=registry
        )
        self.answer_tokens = Counter(
            "lazydecode_answer_tokens", "Tokens generated", registry=registry
        )
        self.transcribed_seconds = Counter(
            "lazydecode_transcribed_seconds",
            "Duration of the recordings, or pieces of them, that were transcribed",
            registry=registry,
        )
        self.first_token = Histogram(
            "lazydecode_first_token_seconds",
            "From the first header byte to the first generated token",
            bounds=_FAST,
            registry=registry,
        )
        self.repairs = Counter(
            "lazydecode_repairs",
            "Requests sent to the engine again: cache_miss or engine_lost",
            ["reason"],
            registry=registry,
        )
        self.loop_lag = Histogram(
            "lazydecode_event_loop_lag_seconds",
            "How late a timer of the event loop fires",
            bounds=_LAG,
            registry=registry,
        )
        self._gauges: dict[str, Gauge] = {}

    def gauge(self, name: str, help_text: str, read: Callable[[], float], **labels: str) -> None:
        """Add a gauge that is read when it is asked for."""
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(f"lazydecode_{name}", help_text, sorted(labels), registry=self.registry)
            self._gauges[name] = gauge
        child = gauge.labels(**labels) if labels else gauge
        child.set_function(read)

    def observe_timeline(self, timeline: Timeline) -> None:
        """Count what one request did."""
        if timeline.fallback:
            self.fallbacks.add(1)
        for stage, seconds in timeline.seconds.items():
            self.stages.observe(seconds, stage)
        for item in timeline.items:
            modality = item.modality
            outcome = "uncached" if item.hit is None else "hit" if item.hit else "miss"
            self.items.add(1, modality, outcome)
            if item.num_bytes:
                self.media_bytes.add(item.num_bytes, modality)
            if "decode" in item.seconds and not item.shared:
                self.decodes.add(1, modality)
            for stage, seconds in item.seconds.items():
                self.item_stages.observe(seconds, modality, stage)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests.add(1, route, str(status))
        self.latency.observe(seconds, route)

    async def watch_loop(self) -> None:
        """Sample the event loop's lag until cancelled."""
        while True:
            due = time.perf_counter() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self.loop_lag.observe(max(0.0, time.perf_counter() - due))

    def read(self) -> list[Family]:
        """Return everything as plain values."""
        return read_samples(self.registry)

    def render(self) -> bytes:
        """Prometheus' text form of everything."""
        return generate_latest(self.registry)
