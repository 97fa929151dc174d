"""The timelines of the last requests: kept, laid out as spans, written as a trace or a page."""

from __future__ import annotations

import html
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lazydecode.renderers.timeline import ITEM_STAGES, ItemTimeline, Timeline

_COLOURS: Final = ("#4878a8", "#d08030", "#509050", "#b04848", "#8068a8", "#807040", "#409898")
_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Timeline</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; max-width: 75em }}
h2 {{ font-size: 1em; margin: 1.5em 0 .3em }}
.row {{ display: flex; height: 1.5em; align-items: center }}
.name {{ width: 14em; flex: none; overflow: hidden; white-space: nowrap }}
.lane {{ position: relative; flex: auto; height: 1em; background: #8882 }}
.lane i {{ position: absolute; height: 100%; min-width: 2px }}
</style>
<h1>The last requests</h1>
<p>Newest first, of this process. <a href="timeline.json">JSON</a>,
<a href="timeline.json?form=trace">trace events</a> (Perfetto, chrome://tracing).</p>
{requests}
</html>
"""


@dataclass(frozen=True, slots=True)
class Span:
    """One stage on the clock of its request."""

    lane: str
    """`request`, or the item, as in `image 0`."""
    stage: str
    start_s: float
    """After the request's start."""
    seconds: float


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What is kept of a request."""

    request_id: str
    route: str
    status: int
    seconds: float
    timeline: Timeline
    ended: float = field(default_factory=time.time)
    """Unix time."""

    def spans(self) -> list[Span]:
        """Return all stages where they lay in the request.

        A stage ends when it was noted. Threads tell of an item's stages afterwards, several at
        once: those are put one before the other, in their order.
        """
        timeline = self.timeline
        spans = [
            Span("request", stage, timeline.noted[stage] - seconds - timeline.started, seconds)
            for stage, seconds in timeline.seconds.items()
        ]
        for item in timeline.items:
            spans += _item_spans(item, timeline.started)
        return [Span(span.lane, span.stage, max(0.0, span.start_s), span.seconds) for span in spans]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, durations in milliseconds."""
        spans = [
            {
                "lane": span.lane,
                "stage": span.stage,
                "start_ms": _ms(span.start_s),
                "duration_ms": _ms(span.seconds),
            }
            for span in self.spans()
        ]
        return {
            "request_id": self.request_id,
            "route": self.route,
            "status": self.status,
            "ended": self.ended,
            "total_ms": _ms(self.seconds),
            "items": [item.to_dict() for item in self.timeline.items],
            "spans": spans,
        }


class RecentRequests:
    """The last requests, oldest first. For one event loop.

    Args:
        capacity: Requests that are kept; 0: none.
    """

    def __init__(self, capacity: int) -> None:
        self._requests: deque[FinishedRequest] = deque(maxlen=capacity)

    def add(self, request: FinishedRequest) -> None:
        """Keep a request; the oldest makes room."""
        self._requests.append(request)

    def __iter__(self) -> Iterator[FinishedRequest]:
        return iter(tuple(self._requests))


def trace_events(requests: Sequence[FinishedRequest]) -> dict[str, Any]:
    """Return the requests in the Trace Event Format, a lane for each request and item.

    Source:
        The format that Perfetto and chrome://tracing read; times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for number, request in enumerate(requests):
        began_us = (request.ended - request.seconds) * 1e6
        common = {"ph": "X", "pid": os.getpid(), "cat": request.route}
        lanes = {"request": 0}
        whole = {"name": request.request_id, "ts": began_us, "dur": request.seconds * 1e6}
        events.append({**common, **whole, "tid": 100 * number, "args": {"status": request.status}})
        for span in request.spans():
            lane = lanes.setdefault(span.lane, len(lanes))
            events.append(
                {
                    **common,
                    "name": span.stage,
                    "ts": began_us + span.start_s * 1e6,
                    "dur": span.seconds * 1e6,
                    "tid": 100 * number + lane,
                    "args": {"request": request.request_id, "of": span.lane},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_page(requests: Sequence[FinishedRequest]) -> str:
    """Return the requests as an HTML page, newest first."""
    parts = [_request_part(request) for request in reversed(requests)]
    return _PAGE.format(requests="\n".join(parts) or "<p>There was none yet.</p>")


def _request_part(request: FinishedRequest) -> str:
    clock = time.strftime("%H:%M:%S", time.gmtime(request.ended))
    name = html.escape(request.request_id)
    head = f"{clock} UTC, {request.route}, {request.status}, {_ms(request.seconds):g} ms, {name}"
    hits = {_lane(item): item.hit for item in request.timeline.items}
    lanes: dict[str, list[Span]] = {}
    for span in request.spans():
        lanes.setdefault(span.lane, []).append(span)
    rows = []
    for lane, spans in lanes.items():
        bars = "".join(_bar(span, request.seconds, at) for at, span in enumerate(spans))
        hit = hits.get(lane)
        label = lane if hit is None else f"{lane}, {'hit' if hit else 'miss'}"
        rows.append(
            f'<div class="row"><span class="name">{html.escape(label)}</span>'
            f'<span class="lane">{bars}</span></div>'
        )
    return f"<h2>{head}</h2>\n" + "\n".join(rows)


def _bar(span: Span, total_s: float, number: int) -> str:
    scale = 100 / max(total_s, 1e-9)
    left = min(100.0, span.start_s * scale)
    width = min(100.0 - left, span.seconds * scale)
    title = f"{span.stage}: {_ms(span.seconds):g} ms from {_ms(span.start_s):g} ms"
    colour = _COLOURS[number % len(_COLOURS)]
    return (
        f'<i style="left:{left:.2f}%;width:{width:.2f}%;background:{colour}" title="{title}"></i>'
    )


def _item_spans(item: ItemTimeline, began: float) -> list[Span]:
    spans: list[Span] = []
    latest = float("inf")
    for stage in reversed(ITEM_STAGES):
        if stage in item.seconds:
            seconds = item.seconds[stage]
            start = min(item.noted[stage], latest) - seconds
            spans.append(Span(_lane(item), stage, start - began, seconds))
            latest = start
    return spans[::-1]


def _lane(item: ItemTimeline) -> str:
    return f"{item.modality} {item.index}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
