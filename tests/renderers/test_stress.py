"""Two thousand requests of every kind, many at once: nothing is left, the mirrors are equal."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lazydecode.config import Settings
from lazydecode.engine.client import EngineClient
from lazydecode.engine.protocol import SamplingParams
from lazydecode.errors import LazyDecodeError
from lazydecode.models.loading import ModelFrontend
from lazydecode.renderers.base import BaseRenderer, RenderRequest
from lazydecode.renderers.chat import parse_messages
from lazydecode.renderers.messages import ChatMessage
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.detokenize import Detokenizer
from lazydecode.server.generation import Generation
from lazydecode.server.loading import build_context
from lazydecode.server.metrics import Metrics
from tests.builders import make_jpeg
from tests.engine.conftest import scripted_config
from tests.origin import wait_until
from tests.server.harness import data_url, image, request, text

NUM_REQUESTS = int(os.environ.get("LAZYDECODE_TEST_REPEATS", "2000"))
CONCURRENCY = 24
CACHE_BYTES = 120_000
"""About six of the pictures: evictions all the time."""


class Load:
    """Makes requests at random and runs them, some of them cancelled at a random moment."""

    def __init__(self, renderer: BaseRenderer, engine: EngineClient, seed: int) -> None:
        self.random = random.Random(seed)
        self.renderer = renderer
        self.engine = engine
        self.metrics = Metrics()
        self.outcomes: Counter[str] = Counter()
        pictures = [make_jpeg(size=(56, 56)) + bytes([n]) for n in range(12)]
        self.good = [data_url(picture) for picture in pictures]
        self.bad = [data_url(picture[:400] + bytes([n])) for n, picture in enumerate(pictures)]

    def make_request(self, number: int) -> RenderRequest:
        parts: list[dict[str, Any]] = [text(f"request {number}")]
        for _ in range(self.random.choice([0, 1, 1, 2, 3])):
            corrupt = self.random.random() < 0.08
            parts.append(image(self.random.choice(self.bad if corrupt else self.good)))
        self.random.shuffle(parts)
        body = msgspec.json.encode(request(*parts)["messages"])
        messages = msgspec.json.decode(body, type=list[ChatMessage])
        return RenderRequest(f"stress-{number}", parse_messages(messages))

    async def run(self, render_request: RenderRequest) -> str:
        async with self.renderer.open(render_request, timeline=Timeline()) as rendered:
            generation = Generation(
                self.engine,
                rendered,
                SamplingParams(max_tokens=2),
                Detokenizer(lambda ids: "x" * len(ids)),
                self.metrics,
            )
            text_of_answer = "".join([delta.text async for delta in generation.deltas()])
            assert text_of_answer == "xx"
        return "answered"

    async def run_one(self, number: int) -> None:
        task = asyncio.create_task(self.run(self.make_request(number)))
        if self.random.random() < 0.2:
            await asyncio.sleep(self.random.random() * 0.03)
            for _ in range(self.random.choice([1, 1, 2])):
                task.cancel()
                await asyncio.sleep(0)
        try:
            self.outcomes[await task] += 1
        except asyncio.CancelledError:
            self.outcomes["cancelled"] += 1
        except LazyDecodeError as exc:
            assert exc.status == 422, exc
            self.outcomes["refused"] += 1

    async def run_all(self, count: int, *, forgetting: float = 0.0) -> None:
        numbers = iter(range(count))

        async def worker() -> None:
            for number in numbers:
                await self.run_one(number)
                if self.random.random() < forgetting:
                    # Someone empties the engine's cache behind our back.
                    self.engine.clear_cache()

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(worker())


@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nothing_is_left_and_the_mirrors_are_equal(
    load_frontend: Callable[..., ModelFrontend],
) -> None:
    gib = CACHE_BYTES / 2**30
    settings = Settings(mm_processor_cache_gb=gib, max_decoded_mb=0.2)
    frontend = load_frontend(mm_processor_cache_gb=gib)
    context = build_context(frontend, settings)
    renderer = context.renderer
    engine = EngineClient(scripted_config(cache_bytes=int(gib * 2**30), max_model_len=100_000))
    engine.on_restart(lambda: renderer.forget_engine(engine.clear_cache))
    await engine.start()
    try:
        load = Load(renderer, engine, seed=NUM_REQUESTS)
        await load.run_all(NUM_REQUESTS)
        assert sum(load.outcomes.values()) == NUM_REQUESTS
        for outcome in ("answered", "refused", "cancelled"):
            assert load.outcomes[outcome] > 0, load.outcomes
        await wait_until(lambda: len(renderer._flights) == 0)
        assert renderer.decoded_budget.held_bytes == 0
        assert renderer.encoded_budget.held_bytes == 0
        assert renderer.decoded_budget.num_waiting == 0
        assert not engine._streams
        assert not engine._streams_by_wire_id
        cache = renderer.sender_cache
        assert cache is not None
        assert len(cache) > 0
        assert cache.snapshot() == await engine.cache_snapshot_async()
        assert (
            load.metrics.registry.get_sample_value(
                "lazydecode_repairs_total", {"reason": "cache_miss"}
            )
            is None
        )
        # Now the engine forgets everything now and then, and every request is still answered.
        await load.run_all(200, forgetting=0.1)
        assert sum(load.outcomes.values()) == NUM_REQUESTS + 200
        assert not engine._streams
    finally:
        await renderer.close()
        await engine.close()
