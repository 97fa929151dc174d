"""Run by a test in a process of its own, with numba's workqueue layer: `MODEL` is the argument.

Requests and the warm-up go through the fused kernel together, and what entered it is printed as
JSON. Then the kernel is entered past the lock, which ends the process by SIGABRT: what the first
part would have come to.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import numba
import numpy as np

from lazydecode.config import Settings
from lazydecode.models import kimi_fused
from lazydecode.models.loading import load_model_frontend
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.loading import build_context
from tests.builders import make_jpeg
from tests.builders_video import make_mp4
from tests.origin import wait_until
from tests.renderers.test_renderer import make_request
from tests.server.harness import data_url, image, video

NUM_REQUESTS = 3


class Entries:
    """Counts who enters the kernel, and how many are in it at most."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.most = 0
        self._inside = 0
        self._guard = threading.Lock()
        self._pause = threading.Event()
        self._enter = kimi_fused.enter_kernel

    def __call__(self, *args: Any) -> None:
        with self._guard:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self.threads.append(threading.current_thread().name)
        self._pause.wait(0.02)  # long enough for another to come
        self._enter(*args)
        with self._guard:
            self._inside -= 1


async def serve(model: str) -> None:
    """Answer requests, each with two pictures and a video of three chunks, beside the warm-up."""
    settings = Settings(
        engine="none", fused_preprocessing=True, raw_pixels=False, processing_threads=4
    )
    renderer = build_context(load_model_frontend(model, settings), settings).renderer

    async def render(number: int) -> None:
        pictures = [image(data_url(make_jpeg((200 + number, 150 + side)))) for side in range(2)]
        clip = make_mp4(9, 10, (112 + 28 * number, 84))
        request = make_request(pictures[0], video(data_url(clip, "video/mp4")), pictures[1])
        async with renderer.open(request, timeline=Timeline()) as rendered:
            await rendered.render(with_payload=True)

    entries = Entries()
    setattr(kimi_fused, "enter_kernel", entries)  # noqa: B010  # a function, to mypy
    renderer.warm_up.start()
    await asyncio.gather(*(render(number) for number in range(NUM_REQUESTS)))
    await wait_until(lambda: not renderer.warm_up.is_running)
    await renderer.close()
    found = {
        "layer": numba.threading_layer(),
        "threads": entries.threads,
        "most": entries.most,
    }
    print(json.dumps(found), flush=True)  # noqa: T201  # what the test reads


def enter_past_the_lock() -> None:
    """Two threads inside the kernel at once."""
    images = np.zeros((8, 3, 1400, 1400), np.uint8)
    table = np.zeros((3, 256), np.float32)
    together = threading.Barrier(2)

    def enter() -> None:
        patches = np.empty((8 * 100 * 100, 3, 14, 14), np.float32)
        for _ in range(50):
            together.wait()
            kimi_fused.enter_kernel(images, table, patches)

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
    enter_past_the_lock()
