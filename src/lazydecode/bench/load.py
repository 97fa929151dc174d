"""The load client: so many requests, so many at a time."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from lazydecode.bench.measure import percentile

_POLL_S: Final = 0.1
_TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class LoadResult:
    """What the client saw."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds to the first token of a stream, or to the whole answer, of good requests."""
    totals: list[float] = field(default_factory=list)
    """Seconds to the last byte."""
    num_bytes: int = 0
    """Of all answers."""
    errors: dict[str, int] = field(default_factory=dict)
    """What went wrong -> how often."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: rates and percentiles."""
        good = len(self.latencies)
        return {
            "requests": good + sum(self.errors.values()),
            "errors": self.errors,
            "seconds": self.seconds,
            "requests_per_s": good / self.seconds if self.seconds else 0.0,
            "answer_bytes": self.num_bytes // max(1, good),
            "latency_ms": _spread(self.latencies),
            "total_ms": _spread(self.totals),
        }


async def run_load(
    url: str,
    bodies: Sequence[bytes],
    concurrency: int,
    *,
    headers: dict[str, str] | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> LoadResult:
    """Send all `bodies` to `url`, `concurrency` at a time; errors are counted, not raised."""
    result = LoadResult()
    waiting = iter(bodies)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        headers={"content-type": "application/json", **(headers or {})},
    ) as session:

        async def work() -> None:
            for body in waiting:
                await _send(session, url, body, result)
                on_done()

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(min(concurrency, len(bodies)))))
        result.seconds = time.perf_counter() - started
    return result


async def _send(session: aiohttp.ClientSession, url: str, body: bytes, result: LoadResult) -> None:
    started = time.perf_counter()
    first = None
    size = 0
    try:
        async with session.post(url, data=body) as response:
            streams = response.content_type == "text/event-stream"
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if first is None and streams and b'"content"' in chunk:
                    first = time.perf_counter()
            status = response.status
    except (aiohttp.ClientError, TimeoutError) as exc:
        _count(result, type(exc).__name__)
        return
    if status != 200:
        _count(result, f"status {status}")
        return
    ended = time.perf_counter()
    result.num_bytes += size
    result.latencies.append((first or ended) - started)
    result.totals.append(ended - started)


def _count(result: LoadResult, what: str) -> None:
    result.errors[what] = result.errors.get(what, 0) + 1


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {
        "mean": sum(seconds) / len(seconds) * 1e3,
        **{f"p{n}": percentile(seconds, n / 100) * 1e3 for n in (50, 95, 99)},
        "max": max(seconds) * 1e3,
    }


class HealthPoll:
    """Asks `/health` all the while, on a thread: how long the server's loop keeps others waiting.

    The client's own load is in it, too; the server's own measure of its lag is the better one
    where there is one.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-health", daemon=True)
        self._seconds: list[float] = []

    def __enter__(self) -> HealthPoll:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def to_dict(self) -> dict[str, float]:
        """The JSON form, in ms."""
        return _spread(self._seconds)

    def _run(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        while not self._stop.wait(_POLL_S):
            started = time.perf_counter()
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection.close()
                continue
            self._seconds.append(time.perf_counter() - started)
        connection.close()
