"""Memory under a crowd of requests, and over a long time, of a server with small budgets."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lazydecode.bench.load import run_load
from lazydecode.bench.media import encode_clip, encode_picture
from lazydecode.bench.record import new_record
from lazydecode.bench.scenarios import RENDER, image_part, request_body, video_part
from lazydecode.bench.serve import wait_for_processes
from lazydecode.bench.server_process import MemoryWatch, free_port, own_command, started_server

ENCODED_MB: Final = 256
DECODED_MB: Final = 256
CACHE_MB: Final = 64
_SETTLING: Final = 0.3
"""Part of the soak that counts as warm-up: caches fill, allocators keep what they will keep."""
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
    soak_batch: int = 40
    """Requests between two looks at the memory."""


def run_endurance(options: EnduranceOptions, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure, and return the record.

    Raises:
        RuntimeError: If the server does not start.
    """
    settings = {
        "requests": options.requests,
        "images": options.images,
        "size": list(options.size),
        "soak_s": options.soak_s,
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
        asyncio.run(run_load(url, list(_mix(8, seed=1)), 4))
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
        record["soak"] = _soak(server.rss, url, options, progress)
    return record


def _soak(
    rss: Callable[[], int], url: str, options: EnduranceOptions, progress: Progress
) -> dict[str, Any]:
    times: list[float] = []
    sizes: list[float] = []
    errors: dict[str, int] = {}
    started = time.monotonic()
    number, count = 2, 0
    while (elapsed := time.monotonic() - started) < options.soak_s:
        progress(f"soak: {elapsed:.0f} of {options.soak_s:.0f} s, {count} requests")
        result = asyncio.run(run_load(url, list(_mix(options.soak_batch, seed=number)), 8))
        for what, times_seen in result.errors.items():
            errors[what] = errors.get(what, 0) + times_seen
        number, count = number + 1, count + options.soak_batch
        times.append(time.monotonic() - started)
        sizes.append(rss() / 1e6)
    settled = max(1, int(len(sizes) * _SETTLING))
    kept = sizes[settled:]
    slope = float(np.polyfit(times[settled:], kept, 1)[0]) * 3600 if len(kept) > 2 else None
    return {
        "seconds": time.monotonic() - started,
        "requests": count,
        "errors": errors,
        "rss_mb": sizes,
        "slope_mb_per_hour": slope,
        "spread_mb": max(kept) - min(kept) if kept else None,
    }


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


def _mix(count: int, seed: int) -> Iterator[bytes]:
    """Known and new images, a new clip, a broken image, and text."""
    for number in range(count):
        mark = f"{seed}-{number}".encode()
        match number % 5:
            case 0:
                parts = [image_part(_picture())]
            case 1:
                parts = [image_part(_picture() + mark)]
            case 2:
                parts = [video_part(_clip() + _free(mark))]
            case 3:
                parts = [image_part(_picture()[:-2000] + mark)]
            case _:
                parts = []
        yield request_body(parts, "tensors", number)


@functools.cache
def _picture() -> bytes:
    return encode_picture((640, 480), seed=1)


@functools.cache
def _clip() -> bytes:
    return encode_clip(1.0, (320, 240))


def _free(content: bytes) -> bytes:
    """A box that players skip."""
    return (8 + len(content)).to_bytes(4, "big") + b"free" + content


def _pixels(size: tuple[int, int]) -> int:
    return size[0] * size[1] * 3
