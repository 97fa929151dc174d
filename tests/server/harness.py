"""A real server for tests: uvicorn on a loop in a thread, with its parts in reach."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import openai
import uvicorn
import uvloop

from lazydecode.config import Settings
from lazydecode.server.app import create_app
from lazydecode.server.http_protocol import BodyTurns, UncopiedBodies
from lazydecode.server.loading import load_context

_T = TypeVar("_T")
START_S = 120.0
"""Longest start: the engine's process imports torch and transformers anew."""


class Server:
    """Serves a model until the `with` block ends. Tests may look at `context`."""

    def __init__(self, model: Path, **settings: Any) -> None:
        # Without warm-up: tests count what decoders and processors do.
        options = {"port": 0, "warmup": False, **settings}
        self.context = load_context(str(model), Settings(**options))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                create_app(self.context),
                log_config=None,
                access_log=False,
                http=partial(UncopiedBodies, turns=BodyTurns()),  # type: ignore[arg-type]
                loop="none",
                timeout_graceful_shutdown=5,
            )
        )
        self._thread = threading.Thread(target=self._run, name="test-server", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        while not self._uvicorn.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            self._failure = serving.exception() or RuntimeError("the server did not start")
        self._started.set()
        await asyncio.wait((serving,))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(START_S)
        if self._failure is not None:
            raise self._failure
        self._start_all_threads()
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(60)
        self._listener.close()
        assert not self._thread.is_alive()

    def _start_all_threads(self) -> None:
        """Make every pool create its threads now: a test must not seem to leave them behind."""
        renderer = self.context.renderer
        pools: list[tuple[Executor, int]] = [
            (renderer.executor, renderer.executor.max_workers),
            (renderer.executor.quick, 4),
            (renderer._mm_executor, 1),
            (renderer.prompts._threads, 2),
            (renderer._processing, self.context.settings.processing_threads),
        ]
        for pool, size in pools:
            barrier = threading.Barrier(size)
            for job in [pool.submit(barrier.wait) for _ in range(size)]:
                job.result(60)

    def call(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the server's loop."""

        async def run() -> _T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    # -- clients

    def openai(self) -> openai.OpenAI:
        """OpenAI's own client, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send JSON (or raw bytes) and return the answer."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(f"{self.url}{path}", timeout=180, **content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=180, **options)

    def render(self, body: Any, **options: Any) -> httpx.Response:
        return self.post("/v1/chat/completions/render", body, **options)

    # -- what it did

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Return when nothing is done for requests any more, and all of them are counted.

        An answer arrives a moment before that. After a failure, what was good beside it is still
        processed, for whoever comes next.
        """
        deadline = time.monotonic() + timeout_s

        def inside() -> tuple[int, int]:
            return self.context.queue.num_inside, len(self.context.renderer._flights)

        while any(inside()) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert inside() == (0, 0)
        self.call(lambda: None)  # A request leaves the queue and is counted in one turn.

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the server's metrics; 0 if it does not exist yet."""
        value = self.context.metrics.registry.get_sample_value(f"lazydecode_{name}", labels)
        return 0.0 if value is None else value

    def decodes(self, modality: str = "image") -> int:
        """Decoder runs so far, as the metrics count them, of requests that have ended."""
        self.wait_idle()
        return int(self.metric("decodes_total", modality=modality))


def data_url(data: bytes, media_type: str = "image/jpeg") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image(url: str | None, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None if url is None else {"url": url}, **fields}


def video(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **fields}


def text(value: str = "x") -> dict[str, Any]:
    return {"type": "text", "text": value}


def request(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A chat request of one user message."""
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}
