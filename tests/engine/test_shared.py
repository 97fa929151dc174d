"""One engine process with several front ends, each with caches and memory of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from lazydecode.engine.child import Child, SpawnedChild, attach_front_end
from lazydecode.engine.client import EngineClient
from lazydecode.engine.protocol import EngineRequest, SamplingParams
from lazydecode.errors import CacheMissError
from lazydecode.inputs import FlatField, MultiModalFieldElem, MultiModalKwargsItem, PlaceholderRange
from tests.engine.conftest import scripted_config
from tests.engine.scripted import STEP_MS


class Broker:
    """Keeps one engine process; starts it when it is asked for and gone."""

    def __init__(self) -> None:
        self.child: Child | None = None
        self._lock = threading.Lock()

    def attach(self, channel: socket.socket, memory: tuple[int, int] | None) -> int:
        with self._lock:
            if self.child is None or self.child.poll() is not None:
                self.close()
                self.child = SpawnedChild()
            attach_front_end(self.child.control, channel, memory)
            return self.child.pid

    def close(self) -> None:
        if self.child is not None:
            self.child.control.close()
            if self.child.wait(10) is None:
                self.child.kill()
                self.child.wait(10)


@pytest.fixture
def broker() -> Iterator[Broker]:
    one = Broker()
    yield one
    one.close()


def request(
    name: str, prompt: list[int], item: MultiModalKwargsItem | None, *, max_tokens: int = 3
) -> EngineRequest:
    return EngineRequest(
        name,
        prompt,
        {"image": [item]},
        {"image": ["item"]},
        {"image": [PlaceholderRange(0, 1)]},
        SamplingParams(max_tokens=max_tokens),
    )


def item(value: int) -> MultiModalKwargsItem:
    data = torch.full((200_000,), value, dtype=torch.uint8)  # goes through shared memory
    return MultiModalKwargsItem({"x": MultiModalFieldElem(data, FlatField())})


async def answer(engine: EngineClient, one: EngineRequest) -> list[int]:
    engine.submit(one)
    return [t async for output in engine.stream(one.request_id) for t in output.new_token_ids]


async def test_front_ends_of_one_engine_do_not_meet(broker: Broker) -> None:
    config = scripted_config(cache_bytes=1_000_000, shared_bytes=4_000_000)
    one, two = (EngineClient(config, broker=broker) for _ in range(2))
    await asyncio.gather(one.start(), two.start())
    assert one.pid == two.pid
    # The same id and the same hash, at once: each gets the answer to what it sent.
    answers = await asyncio.gather(
        answer(one, request("same", [5], item(40))), answer(two, request("same", [7], item(90)))
    )
    assert answers == [[45, 46, 47], [97, 98, 99]]
    assert await answer(one, request("hit", [5], None)) == [45, 46, 47]
    assert await answer(two, request("hit", [5], None)) == [95, 96, 97]
    one.clear_cache()
    with pytest.raises(CacheMissError):
        await answer(one, request("gone", [5], None))
    assert await two.cache_snapshot_async() == ["item"]
    # What runs for a front end that leaves is aborted; the other does not notice.
    slow = request("slow", [STEP_MS + 5], item(1), max_tokens=900)
    one.submit(slow)
    stream = one.stream("slow")
    await anext(stream)
    await one.close()
    await stream.aclose()
    assert await answer(two, request("after", [5], None)) == [95, 96, 97]
    # The engine dies: a new one, with an empty cache, for who is left.
    assert broker.child is not None
    pid = broker.child.pid
    restarted = asyncio.Event()
    loop = asyncio.get_running_loop()
    two.on_restart(lambda: loop.call_soon_threadsafe(restarted.set))
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await restarted.wait()
    assert await answer(two, request("again", [5], item(3))) == [8, 9, 10]
    assert two.pid not in (None, pid)
    await two.close()
