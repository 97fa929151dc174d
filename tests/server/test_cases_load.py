"""The cases about concurrency and memory, through the server."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lazydecode.media.image import ImageMediaIO
from tests.builders import make_jpeg
from tests.origin import Gate, Origin
from tests.server import cases
from tests.server.harness import Server, data_url, image, request, text

CLOSE = {"Connection": "close"}


def at_once(count: int, send: Callable[[int], int]) -> list[int]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(send, range(count)))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_health_answers_while_large_pictures_are_decoded(render_server: Server) -> None:
    limit_ms = cases.REQUESTS["r6-health-during-decode"]["expected"]["health_p95_ms"]
    # For a while, as others may have the cores; who blocks the loop blocks it every time.
    found_ms: list[float] = []
    deadline = time.monotonic() + 300
    while (last_ms := health_p95_ms(render_server)) >= limit_ms:
        found_ms.append(last_ms)
        assert time.monotonic() < deadline, found_ms
        time.sleep(1)


def health_p95_ms(render_server: Server) -> float:
    """How long `/health` takes while eight large pictures are decoded."""
    slow = cases.read("k6_slow_36mp.png")
    # Made before the clock runs: this process is the client as well, under the same lock.
    bodies = [
        httpx.Request(
            "POST", "http://x", json=request(image(data_url(slow + os.urandom(4))))
        ).content
        for _ in range(8)
    ]
    latencies: list[float] = []
    done = threading.Event()

    def poll() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", render_server.port)
        while not done.is_set():
            started = time.perf_counter()
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            latencies.append(time.perf_counter() - started)
            time.sleep(0.02)
        connection.close()

    poller = threading.Thread(target=poll)
    poller.start()
    path = "/v1/chat/completions/render"
    try:
        statuses = at_once(8, lambda n: render_server.post(path, bodies[n]).status_code)
    finally:
        done.set()
        poller.join()
    assert statuses == [200] * 8
    latencies.sort()
    return latencies[int(len(latencies) * 0.95)] * 1000


def test_many_tokenize_at_once(render_server: Server) -> None:
    picture = image(cases.as_data_url("k6_burst/02.png"))

    def send(number: int) -> int:
        parts = [text(f"word {number} " * 50)] + ([picture] if number % 2 else [])
        return render_server.render(request(*parts)).status_code

    assert at_once(64, send) == [200] * 64


def test_a_second_client_gets_its_answer_when_the_first_hangs_up(
    render_server: Server, shared_origin: Origin
) -> None:
    gate = Gate()
    picture = make_jpeg() + os.urandom(8)
    url = shared_origin.serve("/shared.jpg", picture, gate=gate, headers=CLOSE)
    body = request(image(url), text())
    statuses: list[int] = []
    leaving = http.client.HTTPConnection("127.0.0.1", render_server.port)
    leaving.request("POST", "/v1/chat/completions/render", json.dumps(body))
    gate.wait_arrived()
    staying = threading.Thread(
        target=lambda: statuses.append(render_server.render(body).status_code)
    )
    staying.start()
    flights = render_server.context.renderer._connector._loops[render_server.loop].flights
    wait_for(lambda: [flight.num_waiting for flight in flights._flights.values()] == [2])
    leaving.close()
    wait_for(lambda: [flight.num_waiting for flight in flights._flights.values()] == [1])
    gate.open()
    staying.join(60)
    assert statuses == [200]
    assert shared_origin.hits("/shared.jpg") == 1


def test_one_unseen_picture_for_many_is_decoded_once(render_server: Server) -> None:
    body = request(image(data_url(make_jpeg(size=(400, 300)) + os.urandom(8))), text())
    before = render_server.decodes()
    assert at_once(32, lambda _: render_server.render(body).status_code) == [200] * 32
    assert render_server.decodes() == before + 1


def test_pictures_of_every_channel_count_go_together(render_server: Server) -> None:
    names = cases.REQUESTS["r6-mixed-channels"]["request"]["parts"]
    response = render_server.render(request(*(image(cases.as_data_url(n)) for n in names)))
    assert response.status_code == 200
    assert len(response.json()["features"]["kwargs_data"]["image"]) == len(names)


def test_a_request_past_its_time_limit_is_a_504(
    deadline_server: Server, shared_origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the time goes into fetching, and the decode takes all of it again.
    original: Any = ImageMediaIO._decode
    gate, fetching = threading.Event(), Gate()

    def slow(*args: Any) -> Any:
        assert gate.wait(120)
        return original(*args)

    monkeypatch.setattr(ImageMediaIO, "_decode", slow)
    picture = make_jpeg() + os.urandom(8)
    url = shared_origin.serve("/late.jpg", picture, gate=fetching, headers=CLOSE)
    threading.Timer(0.4, fetching.open).start()
    started = time.monotonic()
    try:
        response = deadline_server.render(request(image(url), text()))
        assert response.status_code == 504
        assert response.json()["error"]["retryable"] is True
        assert time.monotonic() - started < 25  # the fetch alone would have 30 s
        # A fetch that never ends is cut off just so.
        stalled = shared_origin.stall("/stalled.jpg")
        assert deadline_server.render(request(image(stalled))).status_code == 504
    finally:
        gate.set()
    renderer = deadline_server.context.renderer
    deadline = time.monotonic() + 120
    while renderer.decoded_budget.held_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert renderer.decoded_budget.held_bytes == 0


def test_downloads_that_are_larger_than_memory_wait_for_their_turn(
    small_memory_server: Server, shared_origin: Origin
) -> None:
    """Nobody knows a download's size before it comes: forty of 0.4 MB, where 2 MB fit."""
    renderer = small_memory_server.context.renderer
    urls = [
        shared_origin.serve(
            f"/memory/{n}", make_jpeg() + os.urandom(8) + bytes(400_000), headers=CLOSE
        )
        for n in range(40)
    ]

    def send(number: int) -> int:
        parts = [image(url) for url in urls[number * 4 : number * 4 + 4]]
        return small_memory_server.render(request(*parts, text())).status_code

    assert at_once(10, send) == [200] * 10
    small_memory_server.wait_idle()
    assert renderer.encoded_budget.held_bytes == 0


def test_bodies_that_are_larger_than_memory_wait_for_their_turn(
    small_memory_server: Server,
) -> None:
    def send(number: int) -> int:
        picture = make_jpeg() + os.urandom(8) + bytes(700_000)
        return small_memory_server.render(request(image(data_url(picture)), text())).status_code

    assert at_once(10, send) == [200] * 10
    small_memory_server.wait_idle()
    assert small_memory_server.context.renderer.encoded_budget.held_bytes == 0
