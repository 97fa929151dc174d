"""When what happened to a request and to each of its media items.

Stages are measured at the borders between parts, by context managers and by timestamps that
the parts hand back; the parts' own logic knows nothing of it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final

logger = logging.getLogger(__name__)

HEADERS_FALL_SHORT: Final = "headers do not say how many tokens the media take: they are decoded"
"""Why a request for ids alone decodes its media."""
ITEM_STAGES: Final = ("fetch", "digest", "lookup", "decode_wait", "decode", "cut", "process")
"""Stages of one item, in order. `decode_wait` is the time its decode stood in the queue; `cut`
takes a piece out of a recording that was decoded before."""
REQUEST_STAGES: Final = ("parse", "queue", "template", "budget", "phase1", "phase2", "engine")
"""Stages of a whole request, in order; some overlap with stages of items."""


@dataclass(slots=True)
class ItemTimeline:
    """What happened to one item."""

    modality: str
    index: int
    num_bytes: int = 0
    """Encoded bytes; 0 if nothing was fetched."""
    hit: bool | None = None
    """Whether the processor cache held it; None if that was not asked."""
    shared: bool = False
    """Whether another item or request paid for a stage that this one waited for."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> duration. A stage that did not happen, as the decode of a hit, is absent."""
    noted: dict[str, float] = field(default_factory=dict)
    """Stage -> when it was last told of, by `time.perf_counter`."""

    def add(self, stage: str, seconds: float) -> None:
        """Add to a stage's duration."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.noted[stage] = time.perf_counter()

    def to_dict(self) -> dict[str, Any]:
        """JSON form, durations in milliseconds."""
        return {
            "modality": self.modality,
            "index": self.index,
            "bytes": self.num_bytes,
            "hit": self.hit,
            "shared": self.shared,
            **{f"{stage}_ms": _ms(value) for stage, value in self.seconds.items()},
        }


@dataclass(slots=True)
class Timeline:
    """What happened to one request. Written by the request's own task and its pool jobs."""

    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    items: list[ItemTimeline] = field(default_factory=list)
    """In message order."""
    noted: dict[str, float] = field(default_factory=dict)
    """Stage -> when it was last told of, by `time.perf_counter`."""
    fallback: str = ""
    """What was done the long way, and why; empty if nothing was."""

    def stage(self, name: str) -> _Stage:
        """Add the time inside the block to stage `name`, also if it raises."""
        return _Stage(self, name)

    def add(self, name: str, seconds: float, *, now: float | None = None) -> None:
        """Add to a stage's duration; `now` is the time, if it was just asked for."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.noted[name] = time.perf_counter() if now is None else now

    def fall_back(self, request_id: str, why: str) -> None:
        """Note that something is done the long way, here and in the log."""
        self.fallback = why
        logger.info("request %s: %s", request_id, why)

    def item(self, modality: str, index: int) -> ItemTimeline:
        """Return an item's timeline, made on first use."""
        for item in self.items:
            if (item.modality, item.index) == (modality, index):
                return item
        item = ItemTimeline(modality, index)
        self.items.append(item)
        return item

    def record_item(
        self,
        modality: str,
        index: int,
        stage: str,
        seconds: float,
        *,
        hit: bool | None = None,
        shared: bool = False,
    ) -> None:
        """Note one stage of one item: the form in which processing tells of it."""
        item = self.item(modality, index)
        item.add(stage, seconds)
        item.shared = item.shared or shared
        if hit is not None:
            item.hit = hit

    def add_piece(self, index: int, piece: Timeline) -> None:
        """Add what happened to one piece of a recording, which counts as item `index`."""
        for stage, seconds in piece.seconds.items():
            self.add(stage, seconds)
        for own in piece.items:
            item = self.item(own.modality, index)
            # A piece that is asked for twice, for its language first, was a miss if it ever was.
            item.hit = own.hit if item.hit is None else bool(item.hit and own.hit)
            item.shared = item.shared or own.shared
            for stage, seconds in own.seconds.items():
                item.add(stage, seconds)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, durations in milliseconds."""
        said = {"fallback": self.fallback} if self.fallback else {}
        return {
            "total_ms": _ms(time.perf_counter() - self.started),
            "stages": {f"{name}_ms": _ms(value) for name, value in self.seconds.items()},
            "items": [item.to_dict() for item in self.items],
            **said,
        }

    def server_timing(self) -> str:
        """Value of a `Server-Timing` header: request stages, then `image0-decode` and so on."""
        entries = [f"{name};dur={_ms(value)}" for name, value in self.seconds.items()]
        if self.fallback:
            entries.append(f'fallback;desc="{self.fallback}"')
        for item in self.items:
            name = f"{item.modality}{item.index}"
            if item.hit is not None:
                entries.append(f'{name};desc="{"hit" if item.hit else "miss"}"')
            entries += [f"{name}-{stage};dur={_ms(value)}" for stage, value in item.seconds.items()]
        entries.append(f"total;dur={_ms(time.perf_counter() - self.started)}")
        return ", ".join(entries)


class _Stage:
    """Measures one block. Not by a generator: each request has several."""

    __slots__ = ("_name", "_started", "_timeline")

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self._timeline.add(self._name, now - self._started, now=now)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
