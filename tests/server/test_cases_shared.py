"""Many requests for the same items at once, and more requests than memory."""

from __future__ import annotations

import ctypes
import gc
import http.client
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from lazydecode.media import ImageMediaIO
from lazydecode.server.exchange import Exchange
from lazydecode.server.straight_body import StraightBody
from tests.builders import make_jpeg
from tests.origin import Gate, Origin
from tests.server.harness import Server, data_url, image, request, text
from tests.server.test_cases_load import CLOSE, at_once

NUM_REQUESTS = 64
PATH = "/v1/chat/completions/render"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """One for all threads: each new one costs as much as a request."""
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=0)
    with httpx.Client(timeout=120, limits=limits) as opened:
        yield opened


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def count_calls(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modality of each call of the model's processor from here on."""
    processor = server.context.frontend.mm_processor
    assert processor is not None
    calls: list[str] = []
    process = processor.family.process

    def counted(modality: str, *args: Any, **options: Any) -> Any:
        calls.append(modality)
        return process(modality, *args, **options)

    monkeypatch.setattr(processor.family, "process", counted)
    return calls


def url_of(server: Server) -> str:
    return f"{server.url}{PATH}"


def num_waiting(server: Server) -> list[int]:
    here = server.context.renderer._connector._loops.get(server.loop)
    return [] if here is None else [f.num_waiting for f in here.flights._flights.values()]


def test_one_unseen_item_for_many_is_fetched_decoded_and_processed_once(
    render_server: Server,
    shared_origin: Origin,
    client: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first to ask hangs up while the others wait for what it began."""
    gate = Gate()
    path = f"/single/{os.urandom(4).hex()}"
    url = shared_origin.serve(path, make_jpeg((400, 300)), gate=gate, headers=CLOSE)
    body = request(image(url), text())
    before, calls = render_server.decodes(), count_calls(render_server, monkeypatch)
    leader = http.client.HTTPConnection("127.0.0.1", render_server.port)
    leader.request("POST", PATH, json.dumps(body))
    gate.wait_arrived()
    answers: list[int] = []

    def ask(_: int) -> int:
        return client.post(url_of(render_server), json=body).status_code

    rest = threading.Thread(target=lambda: answers.extend(at_once(NUM_REQUESTS - 1, ask)))
    rest.start()
    wait_for(lambda: num_waiting(render_server) == [NUM_REQUESTS])
    leader.close()
    wait_for(lambda: num_waiting(render_server) == [NUM_REQUESTS - 1])
    gate.open()
    rest.join(120)
    assert answers == [200] * (NUM_REQUESTS - 1)
    assert shared_origin.hits(path) == 1
    assert render_server.decodes() == before + 1
    assert calls == ["image"]


def test_a_shared_failure_names_each_requests_own_item(
    render_server: Server, shared_origin: Origin, client: httpx.Client
) -> None:
    path = f"/single/{os.urandom(4).hex()}"
    gate = Gate()
    url = shared_origin.serve(path, make_jpeg((400, 300))[:-4000], gate=gate, headers=CLOSE)
    good = image(data_url(make_jpeg() + os.urandom(8)))
    errors: dict[int, dict[str, Any]] = {}

    def send(number: int) -> int:
        body = request(*[good] * (number % 4), image(url), text())
        response = client.post(url_of(render_server), json=body)
        errors[number] = response.json()["error"]
        return response.status_code

    opener = threading.Thread(
        target=lambda: (wait_for(lambda: num_waiting(render_server) == [32]), gate.open())
    )
    opener.start()
    assert at_once(32, send) == [422] * 32
    opener.join()
    for number, error in errors.items():
        assert (error["modality"], error["index"]) == ("image", number % 4)
        assert f"image media at index {number % 4}" in error["message"]
    assert shared_origin.hits(path) == 1


def test_a_decoder_that_ran_in_vain_is_counted(render_server: Server) -> None:
    before = render_server.decodes()
    good, bad = make_jpeg() + os.urandom(8), make_jpeg((400, 300))[:-4000] + os.urandom(8)
    parts = [image(data_url(data)) for data in (good, bad)]
    assert render_server.render(request(*parts, text())).status_code == 422
    assert render_server.decodes() == before + 2
    assert render_server.render(request(parts[0], text())).status_code == 200
    assert render_server.decodes() == before + 2


def test_a_decode_is_counted_although_who_began_it_hung_up(
    render_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = ImageMediaIO._decode
    begun, gate = threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        begun.set()
        assert gate.wait(120)
        return original(*args)

    monkeypatch.setattr(ImageMediaIO, "_decode", held)
    before, flights = render_server.decodes(), render_server.context.renderer._flights
    body = request(image(data_url(make_jpeg() + os.urandom(8))), text())
    leader = http.client.HTTPConnection("127.0.0.1", render_server.port)
    leader.request("POST", PATH, json.dumps(body))
    assert begun.wait(120)
    (flight,) = flights._flights.values()
    answers: list[int] = []
    other = threading.Thread(target=lambda: answers.append(render_server.render(body).status_code))
    other.start()
    try:
        wait_for(lambda: flight.num_waiting == 2)
        leader.close()
        wait_for(lambda: flight.num_waiting == 1)
    finally:
        gate.set()
    other.join(120)
    assert answers == [200]
    assert render_server.decodes() == before + 1


@pytest.fixture(scope="module")
def tight_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """Has memory for the pixels of one request and a bit, and a cache of a few items."""
    with Server(
        tiny_model("qwen2_5_vl", weights=False),
        engine="none",
        max_decoded_mb=2.0,
        max_encoded_mb=1.0,
        mm_processor_cache_gb=1 / 1024,
        max_budget_wait=120.0,
    ) as server:
        yield server


def watch_budgets(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most bytes that each budget held from here on, seen whenever something is taken."""
    renderer = server.context.renderer
    peaks = {"encoded": 0, "decoded": 0}
    for name, budget in (
        ("encoded", renderer.encoded_budget),
        ("decoded", renderer.decoded_budget),
    ):
        give_back = budget._give_back

        def noted(
            nbytes: int, name: str = name, budget: Any = budget, call: Any = give_back
        ) -> None:
            peaks[name] = max(peaks[name], budget.held_bytes)
            call(nbytes)

        monkeypatch.setattr(budget, "_give_back", noted)
    return peaks


def test_a_crowd_with_more_pictures_than_memory_is_served_within_the_budget(
    tight_server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty requests of 28 pictures; all at once they would decode to 28 MB, where 2 fit."""
    peaks = watch_budgets(tight_server, monkeypatch)
    before = tight_server.decodes()

    def send(number: int) -> int:
        pictures = [image(data_url(make_jpeg((112, 112)) + os.urandom(4))) for _ in range(28)]
        body = request(*pictures, text())
        return client.post(url_of(tight_server), json=body).status_code

    assert at_once(20, send) == [200] * 20
    assert tight_server.decodes() == before + 20 * 28
    renderer = tight_server.context.renderer
    assert 1_000_000 < peaks["decoded"] <= renderer.decoded_budget.capacity
    assert 0 < peaks["encoded"] <= renderer.encoded_budget.capacity
    assert renderer.decoded_budget.held_bytes == renderer.encoded_budget.held_bytes == 0


def test_what_was_refused_is_gone_without_the_collector(
    tight_server: Server, client: httpx.Client
) -> None:
    """Its memory counts as given back then: no error may keep request and pictures alive."""
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            # More than comes with the head: the rest of the body is read another way.
            broken = image(data_url(make_jpeg()[:-200] + os.urandom(400_000)))
            body = request(broken, text("x" * number))
            assert client.post(url_of(tight_server), json=body).status_code == 422
        # The answer is out before the last frames are left.
        wait_for(
            lambda: not any(type(kept) in (Exchange, StraightBody) for kept in gc.get_objects())
        )
    finally:
        gc.enable()


def settled_rss() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def test_memory_has_no_slope(tight_server: Server, client: httpx.Client) -> None:
    """Rounds of hits, misses, corrupt pictures and text, each with the same number of each."""
    known = image(data_url(make_jpeg()))

    def one(number: int) -> None:
        parts = {
            0: [known],
            1: [image(data_url(make_jpeg((160, 120)) + os.urandom(8)))],
            2: [image(data_url(make_jpeg()[:-200] + os.urandom(8)))],
            3: [],
        }[number % 4]
        body = request(*parts, text("x" * number))
        status = client.post(url_of(tight_server), json=body).status_code
        assert status == (422 if number % 4 == 2 else 200)

    sizes: list[int] = []
    slope = math.inf  # bytes per round of 20; a kept picture would be 5 x 57,600
    while slope > 200_000:
        for number in range(20):
            one(number)
        sizes.append(settled_rss())
        if len(sizes) >= 7:
            # The first rounds fill the caches, and let libraries allocate what they keep, as
            # other threads of this process do now and then. What is leaked grows in any four.
            slope = float(np.polyfit(range(4), sizes[-4:], 1)[0])
        assert len(sizes) < 30, sizes
