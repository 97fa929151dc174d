"""Memory under a crowd of requests, and over a long time, of a server with small budgets."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from lazydecode.bench.footprint import Footprint, measure_footprint
from lazydecode.bench.load import run_load
from lazydecode.bench.media import encode_clip, encode_picture
from lazydecode.bench.record import new_record
from lazydecode.bench.scenarios import RENDER, image_part, request_body, video_part
from lazydecode.bench.serve import wait_for_processes
from lazydecode.bench.server_process import (
    MemoryWatch,
    ServerUnderTest,
    free_port,
    own_command,
    started_server,
)
from lazydecode.bench.trend import WARM_UP_REQUESTS, find_trend

ENCODED_MB: Final = 256
DECODED_MB: Final = 256
CACHE_MB: Final = 64
_LOOKS: Final = 120
"""At the memory, in the time of a soak; it takes some ms per process, and fills the record."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EnduranceOptions:
    """What is run, and how much of it."""

    model: str
    requests: int = 200
    """Of the crowd, all at once."""
    images: int = 28
    """In each of them."""
    size: tuple[int, int] = (320, 240)
    """Of each image."""
    soak_s: float = 3600.0
    soak_requests: int | None = None
    """Instead of a time."""
    soak_batch: int = 40
    """Requests after which nothing is under way for a moment: only then memory is looked at."""
    soak_rate: float | None = None
    """Requests per second at most, so that a long run leaves something to others."""
    soak_size: tuple[int, int] = (640, 480)
    """Of its pictures; its clips have half of each side."""
    warm_up_requests: int = WARM_UP_REQUESTS


def run_endurance(options: EnduranceOptions, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure, and return the record.

    Raises:
        RuntimeError: If the server does not start.
        FileNotFoundError: If this system does not tell what processes share.
    """
    settings = {
        "requests": options.requests,
        "images": options.images,
        "size": list(options.size),
        "soak_s": options.soak_s,
        "soak_rate": options.soak_rate,
        "soak_size": list(options.soak_size),
        "budgets_mb": {"encoded": ENCODED_MB, "decoded": DECODED_MB, "cache": CACHE_MB},
    }
    record = new_record("endurance", settings)
    flags = (
        *("--max-encoded-mb", str(ENCODED_MB), "--max-decoded-mb", str(DECODED_MB)),
        *("--mm-processor-cache-gb", str(CACHE_MB / 1024)),
        *("--max-budget-wait", "3600", "--max-waiting-requests", str(2 * options.requests)),
    )
    port = free_port()
    progress("starting the server")
    with started_server(
        own_command(options.model, port, engine="none", flags=flags), port
    ) as server:
        url = server.url + RENDER
        wait_for_processes(server)  # so that their own memory is no growth
        progress("warming up")
        asyncio.run(run_load(url, list(_mix(8, options.soak_size, seed=1)), 4))
        progress(f"{options.requests} requests of {options.images} images at once: building")
        bodies = _crowd(options)
        before = server.rss()
        progress(f"{options.requests} requests of {options.images} images at once")
        with MemoryWatch(server) as memory:
            crowd = asyncio.run(run_load(url, bodies, options.requests))
        record["crowd"] = {
            **crowd.to_dict(),
            "body_mb": sum(map(len, bodies)) / 1e6,
            "decoded_mb": options.requests * options.images * _pixels(options.size) / 1e6,
            "rss_before_mb": before / 1e6,
            "growth_mb": (memory.peak - before) / 1e6,
        }
        del bodies
        record["soak"] = soak(server, options, progress)
    return record


def soak(
    server: ServerUnderTest, options: EnduranceOptions, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Send mixed requests for a long time, and return what the memory did.

    Raises:
        FileNotFoundError: If this system does not tell what processes share.
    """
    looks = _Looks()
    errors: dict[str, int] = {}
    started = time.monotonic()
    count, next_look = 0, 0.0

    def part_done() -> float:
        if options.soak_requests is not None:
            return count / options.soak_requests
        return (time.monotonic() - started) / options.soak_s

    while part_done() < 1:
        progress(f"soak: {100 * part_done():.0f} %, {count} requests")
        # A seed of its own for each batch: what is to be new is new.
        bodies = list(_mix(options.soak_batch, options.soak_size, seed=2 + count))
        result = asyncio.run(run_load(server.url + RENDER, bodies, 8))
        for what, times_seen in result.errors.items():
            errors[what] = errors.get(what, 0) + times_seen
        count += options.soak_batch
        if part_done() >= next_look:
            next_look += 1 / _LOOKS
            looks.add(count, time.monotonic() - started, server)
        if options.soak_rate is not None:
            time.sleep(max(0.0, count / options.soak_rate - (time.monotonic() - started)))
    return {
        "seconds": time.monotonic() - started,
        "requests": count,
        "errors": errors,
        "warm_up_requests": options.warm_up_requests,
        **looks.to_dict(options.warm_up_requests),
    }


class _Looks:
    """What the memory was, each time that somebody looked."""

    def __init__(self) -> None:
        self._requests: list[int] = []
        self._seconds: list[float] = []
        self._rss: list[int] = []
        self._footprints: list[Footprint] = []

    def add(self, requests: int, seconds: float, server: ServerUnderTest) -> None:
        self._requests.append(requests)
        self._seconds.append(seconds)
        self._rss.append(server.rss())
        self._footprints.append(measure_footprint(server.tree()))

    def to_dict(self, warm_up: int) -> dict[str, Any]:
        """The JSON form, in MB; processes that came later have None before."""
        names = dict.fromkeys(name for seen in self._footprints for name in seen.processes)
        series = {
            "anonymous": [seen.anonymous for seen in self._footprints],
            "shared": [seen.shared for seen in self._footprints],
            "file": [seen.file for seen in self._footprints],
            "rss": self._rss,
        }
        of_processes = {
            name: [
                seen.processes[name].anonymous if name in seen.processes else None
                for seen in self._footprints
            ]
            for name in names
        }
        return {
            "looks": {
                "requests": self._requests,
                "seconds": [round(seconds, 1) for seconds in self._seconds],
                "mb": {kind: _in_mb(sizes) for kind, sizes in series.items()},
                "anonymous_mb": {name: _in_mb(sizes) for name, sizes in of_processes.items()},
            },
            "trend": self._trend([seen.own for seen in self._footprints], warm_up),
            "trends": {
                kind: self._trend(series[kind], warm_up) for kind in ("anonymous", "shared")
            },
        }

    def _trend(self, sizes: list[int], warm_up: int) -> dict[str, Any] | None:
        trend = find_trend(self._requests, [size / 1e6 for size in sizes], warm_up=warm_up)
        if trend is None:
            return None
        return {
            "slope_mb_per_1000": round(trend.slope, 3),
            "range": [round(trend.low, 3), round(trend.high, 3)],
            "growth_mb": round(trend.growth, 2),
            "verdict": trend.verdict,
        }


def _in_mb(sizes: list[Any]) -> list[float | None]:
    return [None if size is None else round(size / 1e6, 2) for size in sizes]


def _crowd(options: EnduranceOptions) -> list[bytes]:
    """Bodies whose images are all different: one picture with another number behind its end."""
    picture = encode_picture(options.size)
    return [
        request_body(
            [image_part(picture + f"{number}-{at}".encode()) for at in range(options.images)],
            "none" if number % 2 else "tensors",
            number,
        )
        for number in range(options.requests)
    ]


def _mix(count: int, size: tuple[int, int], seed: int) -> Iterator[bytes]:
    """Known and new images, a new clip, a broken image, and text."""
    picture, clip = _picture(size), _clip((size[0] // 2, size[1] // 2))
    broken = picture[: len(picture) * 19 // 20]
    for number in range(count):
        mark = f"{seed}-{number}".encode()
        match number % 5:
            case 0:
                parts = [image_part(picture)]
            case 1:
                parts = [image_part(picture + mark)]
            case 2:
                parts = [video_part(clip + _free(mark))]
            case 3:
                parts = [image_part(broken + mark)]
            case _:
                parts = []
        yield request_body(parts, "tensors", number)


@functools.cache
def _picture(size: tuple[int, int]) -> bytes:
    return encode_picture(size, seed=1)


@functools.cache
def _clip(size: tuple[int, int]) -> bytes:
    return encode_clip(1.0, size)


def _free(content: bytes) -> bytes:
    """A box that players skip."""
    return (8 + len(content)).to_bytes(4, "big") + b"free" + content


def _pixels(size: tuple[int, int]) -> int:
    return size[0] * size[1] * 3
