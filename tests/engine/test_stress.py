"""Hundreds of requests, aborts, misses and kills: all are answered, and the mirrors agree."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from lazydecode.cache import MultiModalProcessorSenderCache
from lazydecode.engine.client import EngineClient
from lazydecode.engine.protocol import EngineRequest, SamplingParams
from lazydecode.errors import CacheMissError, EngineDeadError, EngineError, ValidationError
from lazydecode.inputs import FlatField, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange
from tests.engine.conftest import scripted_config
from tests.engine.scripted import DIE, FAIL, STEP_MS

REPEATS = int(os.environ.get("LAZYDECODE_TEST_REPEATS", "1"))
ENTRY_BYTES = 2000
NUM_ITEMS = 40
CACHE_BYTES = 12 * ENTRY_BYTES


def item(number: int) -> MultiModalKwargsItem:
    # Different sizes, so that evictions come at odd moments; a few are larger than the cache,
    # and some go through shared memory.
    size = {0: CACHE_BYTES + 1, 1: 150_000}.get(number % 13, 500 + 97 * (number % 20))
    data = torch.full((size,), 1 + number % 200, dtype=torch.uint8)
    return MultiModalKwargsItem({"x": MultiModalFieldElem(data, FlatField())})


@dataclass
class FrontEnd:
    """What the server does around an engine: one ordered worker, a sender cache, repairs."""

    engine: EngineClient
    cache: MultiModalProcessorSenderCache
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    misses: int = 0
    losses: int = 0

    def __post_init__(self) -> None:
        self.engine.on_restart(lambda: self.worker.submit(self.clear) and None)

    def clear(self) -> None:
        self.cache.clear_cache()
        self.engine.clear_cache()

    def invalidate(self, hashes: list[str]) -> None:
        self.cache.invalidate(hashes)
        self.engine.invalidate_cache(hashes)

    def submit(self, request_id: str, prompt: list[int], numbers: list[int], resumed: int) -> None:
        """Phase 2 and the hand-over, as one job of the ordered worker."""
        hashes = [f"item-{number}" for number in numbers]
        for mm_hash in hashes:
            self.cache.touch_sender_cache_item(mm_hash)
        sent = []
        for number, mm_hash in zip(numbers, hashes, strict=True):
            known = self.cache.is_cached_item(mm_hash)
            given = None if known else (item(number), [])
            sent.append(self.cache.get_and_update_item(given, mm_hash)[0])
        self.engine.submit(
            EngineRequest(
                request_id,
                prompt,
                {"image": sent} if numbers else {},
                {"image": hashes} if numbers else {},
                {"image": [PlaceholderRange(n, 1) for n in range(len(numbers))]} if numbers else {},
                SamplingParams(max_tokens=len(prompt) - resumed),
                resumed,
            )
        )

    async def on_worker(self, job: Callable[..., None], *args: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self.worker, job, *args)

    async def generate(self, name: str, prompt: list[int], numbers: list[int]) -> list[int]:
        """One answer, over misses and lost processes."""
        got: list[int] = []
        for attempt in range(50):
            request_id = f"{name}-{attempt}"
            submitting = asyncio.ensure_future(
                self.on_worker(self.submit, request_id, prompt + got, numbers, len(got))
            )
            try:
                await asyncio.shield(submitting)
                async for output in self.engine.stream(request_id):
                    got += output.new_token_ids
                return got
            except CacheMissError as exc:
                self.misses += 1
                await self.on_worker(self.invalidate, exc.hashes)
            except EngineDeadError:
                self.losses += 1
            except asyncio.CancelledError:
                await asyncio.wait([submitting])
                self.engine.abort(request_id)
                raise
        raise AssertionError(f"{name} was never answered")


def expected(prompt: list[int], numbers: list[int]) -> list[int]:
    total = sum(1 + number % 200 for number in numbers) or 1
    first = prompt[-1] + total
    return [first + step for step in range(len(prompt))]


@pytest.mark.stress
@pytest.mark.parametrize("forced_apart", [False, True])
@pytest.mark.parametrize("seed", range(REPEATS))
async def test_a_storm_with_kills_leaves_equal_mirrors_and_nothing_else(
    seed: int, forced_apart: bool
) -> None:
    engine = EngineClient(scripted_config(cache_bytes=CACHE_BYTES, shared_bytes=4 * 2**20))
    await engine.start()
    front_end = FrontEnd(engine, MultiModalProcessorSenderCache(capacity_bytes=CACHE_BYTES))
    rng = random.Random(seed)
    counts = {"answered": 0, "cancelled": 0, "refused": 0, "failed": 0}

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * 1.5)
        name = f"s{seed}-r{number}"
        numbers = [rng.randrange(NUM_ITEMS) for _ in range(rng.randrange(4))]
        prompt = [rng.randrange(1000) for _ in range(4 + rng.randrange(5))]
        fate = rng.random()
        if fate < 0.05:
            with pytest.raises(ValidationError):
                await front_end.generate(name, prompt + [1] * 1000, numbers)
            counts["refused"] += 1
        elif fate < 0.1:
            with pytest.raises(EngineError, match="failed on this request"):
                await front_end.generate(name, [FAIL, *prompt], numbers)
            counts["failed"] += 1
        elif fate < 0.35:
            task = asyncio.create_task(
                front_end.generate(name, [STEP_MS + rng.randrange(4), *prompt], numbers)
            )
            await asyncio.sleep(rng.random() * 0.2)
            task.cancel()
            await asyncio.wait([task])
            counts["cancelled"] += task.cancelled()
        else:
            assert await front_end.generate(name, prompt, numbers) == expected(prompt, numbers)
            counts["answered"] += 1

    async def kill() -> None:
        """Kill the process from outside once, and from inside once, in the midst of it."""
        await asyncio.sleep(0.5)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        await front_end.on_worker(
            engine.submit, EngineRequest(f"s{seed}-poison", [DIE], sampling=SamplingParams())
        )
        with pytest.raises(EngineDeadError):
            async for _ in engine.stream(f"s{seed}-poison"):
                pass

    async def diverge() -> None:
        """Force the mirrors apart."""
        await asyncio.sleep(0.7)
        await front_end.on_worker(engine.clear_cache)

    try:
        async with asyncio.timeout(200), asyncio.TaskGroup() as group:
            group.create_task(kill())
            if forced_apart:
                group.create_task(diverge())
            for number in range(400):
                group.create_task(one(number))
        assert counts["answered"] > 200
        assert counts["refused"] and counts["failed"] and counts["cancelled"]
        assert front_end.losses > 0
        assert engine._streams == engine._streams_by_wire_id == {}
        assert engine._snapshots == {}
        if forced_apart:
            # What one side alone still holds is older than all that was used since, so it is
            # the first to be evicted.
            assert front_end.misses > 0
            for number in range(NUM_ITEMS):
                await front_end.generate(f"s{seed}-fill-{number}", [1, 2], [number])
        snapshot = await engine.cache_snapshot_async()
        assert snapshot == front_end.cache.snapshot()
        assert len(snapshot) > 5
        process = engine._process
        assert process is not None
        assert process.arena is not None
        await front_end.on_worker(front_end.clear)
        assert await engine.cache_snapshot_async() == front_end.cache.snapshot() == []
        async with asyncio.timeout(120):
            while process.arena.lent_bytes:
                await asyncio.sleep(0.01)
    finally:
        await engine.close()
        front_end.worker.shutdown()
