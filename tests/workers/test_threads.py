"""A server without worker processes: the time limit holds for threads, which go on all the same."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lazydecode.media.image import ImageMediaIO
from lazydecode.processing.flights import ItemFlights
from tests.builders import make_jpeg
from tests.server.harness import Server, data_url, image, request, text

LIMIT_S = 0.5
"""Holds while nothing but the decode that hangs can exceed it."""
WAIT_S = 120.0
SLOW = (40, 30)
"""Size of the picture whose decode hangs."""


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    model = tiny_model("qwen2_5_vl", weights=False)
    with Server(model, engine="none", media_decode_timeout=LIMIT_S) as server:
        yield server


@pytest.fixture(autouse=True)
def flights(server: Server, monkeypatch: pytest.MonkeyPatch) -> ItemFlights:
    """The server's work, for now without a limit: any of it takes long on a machine that stalls."""
    flights = server.context.renderer._flights
    assert flights.time_limit_s == LIMIT_S
    monkeypatch.setattr(flights, "time_limit_s", math.inf)
    return flights


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Lets the decode that hangs go on; at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("skips_cache", [False, True])
def test_a_decode_that_hangs_is_named_and_hurts_no_other_item(
    server: Server,
    flights: ItemFlights,
    monkeypatch: pytest.MonkeyPatch,
    go_on: threading.Event,
    skips_cache: bool,
) -> None:
    begun, ended = threading.Event(), threading.Event()
    original = ImageMediaIO._decode

    def decode(self: ImageMediaIO, data: bytes, facts: Any) -> Any:
        if facts.oriented_size == SLOW:
            begun.set()
            assert go_on.wait(WAIT_S)
            ended.set()
        return original(self, data, facts)

    monkeypatch.setattr(ImageMediaIO, "_decode", decode)
    fields = {"skip_mm_cache": skips_cache}
    good, slow = data_url(make_jpeg()), data_url(make_jpeg(SLOW, comment=str(skips_cache)))
    with ThreadPoolExecutor(1) as client:
        body = request(image(good), image(slow), text(), **fields)
        waiting = client.submit(server.render, body)
        deadline = time.monotonic() + WAIT_S
        while not begun.is_set() or len(flights) != 1:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        flights.time_limit_s = LIMIT_S
        answer = waiting.result(WAIT_S)
        flights.time_limit_s = math.inf
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["modality"], error["index"]) == ("image", 1)
    assert f"longer than the {LIMIT_S:g} s" in error["message"]
    server.wait_idle()
    assert server.context.renderer.decoded_budget.held_bytes == 0
    assert not ended.is_set()
    assert server.render(request(image(good), text(), **fields)).status_code == 200
    go_on.set()
    assert ended.wait(WAIT_S)
    assert server.render(request(image(slow), text(), **fields)).status_code == 200


def test_a_request_that_passes_the_cache_by_is_processed_off_the_ordered_worker(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = server.context.renderer.frontend.mm_processor
    assert processor is not None
    threads: list[str] = []
    original = processor.process_single

    def process(inputs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(inputs)

    monkeypatch.setattr(processor, "process_single", process)
    body = request(image(data_url(make_jpeg((64, 64)))), text())
    cached = server.render(body).json()["features"]["kwargs_data"]
    passed = server.render({**body, "skip_mm_cache": True}).json()["features"]["kwargs_data"]
    assert passed == cached
    assert len(threads) == 2
    assert all(name.startswith("lazydecode-process") for name in threads)
