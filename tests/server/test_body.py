from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from lazydecode.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    RequestTooLargeError,
)
from lazydecode.media.budget import ByteBudget
from lazydecode.media.known_texts import KnownTexts
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server import arriving
from lazydecode.server import body as body_module
from lazydecode.server.body import ReadBody, RequestTurns, parse_body, read_body, read_parsed
from lazydecode.server.payload_cut import PayloadFinder


class Client:
    """Plays the other end: hands out chunks, and counts how many were taken."""

    def __init__(self, chunks: Iterable[bytes], *, length: int | None = None) -> None:
        self._chunks = list(chunks)
        self.num_taken = 0
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        self.scope: dict[str, Any] = {"type": "http", "headers": headers}

    async def receive(self) -> Message:
        if self.num_taken == len(self._chunks):
            return {"type": "http.disconnect"}
        chunk = self._chunks[self.num_taken]
        self.num_taken += 1
        more = self.num_taken < len(self._chunks)
        return {"type": "http.request", "body": chunk, "more_body": more}


@pytest.mark.parametrize("length", [None, 11, 3, 500])
async def test_chunks_become_one_buffer_whatever_length_was_stated(length: int | None) -> None:
    client = Client([b"hello ", b"", b"world"], length=length)
    assert await read_body(client.scope, client.receive, max_bytes=1000) == b"hello world"


async def test_an_announced_size_over_the_limit_is_refused_before_reading() -> None:
    client = Client([b"x"], length=1001)
    with pytest.raises(RequestTooLargeError) as caught:
        await read_body(client.scope, client.receive, max_bytes=1000)
    assert caught.value.status == 413
    assert client.num_taken == 0


async def test_an_unannounced_size_over_the_limit_stops_the_reading() -> None:
    client = Client([b"x" * 600] * 10)
    with pytest.raises(RequestTooLargeError):
        await read_body(client.scope, client.receive, max_bytes=1000)
    assert client.num_taken == 2


async def test_a_client_that_leaves_in_the_body_is_noticed() -> None:
    client = Client([])
    with pytest.raises(ClientDisconnect):
        await read_body(client.scope, client.receive, max_bytes=1000)


@pytest.mark.parametrize("pause_s", [60.0, 0.02])
async def test_a_body_that_stalls_or_trickles_is_given_up(pause_s: float) -> None:
    client = Client([b"x"] * 1000, length=1000)

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        return await client.receive()

    async with asyncio.timeout(120):
        with pytest.raises(RequestTimeoutError, match="did not arrive in time") as caught:
            await read_body(client.scope, receive, max_bytes=1000, max_stall_s=0.2)
    assert caught.value.status == 408
    assert client.num_taken < 20


async def test_a_body_that_stalls_keeps_no_memory_for_what_has_not_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arriving, "_BRISK_GRACE_S", 0.05)
    mib = 1024 * 1024
    budget = ByteBudget(10 * mib)
    goes_on = asyncio.Event()
    client = Client([bytes(mib), bytes(3 * mib)], length=4 * mib)

    async def receive() -> Message:
        if client.num_taken:
            await goes_on.wait()
        return await client.receive()

    async def read(hold: EncodedHold) -> memoryview:
        return await read_body(client.scope, receive, max_bytes=8 * mib, hold=hold)

    async with EncodedHold(budget) as hold, EncodedHold(budget) as other:
        stalled = asyncio.create_task(read(hold))
        await asyncio.sleep(0)
        assert budget.held_bytes == 7 * mib  # the body and what is decoded of it
        async with asyncio.timeout(120):
            await other.require(5 * mib)  # waits for its turn, and gets it
        assert budget.held_bytes == (7 * mib) // 4 + 5 * mib
        other.release()
        goes_on.set()
        assert len(await stalled) == 4 * mib
        assert budget.held_bytes == 7 * mib
    assert budget.held_bytes == 0


async def test_a_body_that_stalled_and_goes_on_while_memory_is_short_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arriving, "_BRISK_GRACE_S", 0.0)
    mib = 1024 * 1024
    budget = ByteBudget(10 * mib)
    client = Client([bytes(mib), bytes(3 * mib)], length=4 * mib)

    async with EncodedHold(budget) as hold, EncodedHold(budget) as other:

        async def receive() -> Message:
            if client.num_taken:
                await other.require(8 * mib)
            return await client.receive()

        async with asyncio.timeout(120):
            with pytest.raises(OverloadedError):  # two that wait for each other wait for ever
                await read_body(client.scope, receive, max_bytes=8 * mib, hold=hold)
    assert budget.held_bytes == 0


async def test_a_slow_connection_has_time_for_a_large_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client([b"x" * 32 * 1024] * 5)
    now = 0.0
    monkeypatch.setattr(arriving, "time", SimpleNamespace(monotonic=lambda: now))

    async def receive() -> Message:
        nonlocal now
        now += 0.9  # 4.5 s in all
        return await client.receive()

    whole = await read_body(client.scope, receive, max_bytes=10**6, max_stall_s=3.0)
    assert len(whole) == 5 * 32 * 1024


async def test_small_and_large_bodies_parse_alike() -> None:
    with ThreadPoolExecutor(1) as executor:
        for size in (10, 200_000):
            whole = json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()
            client = Client([whole[:7], whole[7:]])
            request, conversation = await read_parsed(
                client.scope,
                client.receive,
                partial(parse_body, texts=KnownTexts(1)),
                max_bytes=10**6,
                executor=executor,
                turns=RequestTurns(),
                finder=PayloadFinder(),
            )
            assert conversation.messages == [{"role": "user", "content": "x" * size}]
            assert request.messages == []


PAYLOAD = base64.b64encode(bytes(range(256)) * 2000).decode()
URL = f"data:image/png;base64,{PAYLOAD}"
PICTURE = f'"image_url", "image_url": {{"url": "{URL}"}}'


@pytest.mark.parametrize(
    ("part", "is_thread"),
    [
        (PICTURE, False),
        (PICTURE.replace("/", "\\/"), True),
        (PICTURE.replace("image/", "image\\/"), True),
        (f'"text", "text": "{URL}"', True),
        (f"{PICTURE}, ", True),
    ],
    ids=["plain", "escaped", "escaped-head", "text", "invalid"],
)
async def test_what_has_to_be_parsed_as_a_whole_is_a_threads_work(
    part: str, is_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    decode = body_module.decode_request

    def decode_request(given: bytes | memoryview) -> Any:
        if len(given) > 64 * 1024:
            threads.add(threading.get_ident())
        return decode(given)

    monkeypatch.setattr(body_module, "decode_request", decode_request)
    parts = f'[{{"type": {PICTURE}}}, {{"type": {part}}}]'
    body = f'{{"messages": [{{"role": "user", "content": {parts}}}]}}'
    client = Client([body.encode()])
    outcome: Any
    with ThreadPoolExecutor(1) as executor:
        try:
            outcome = await read_parsed(
                client.scope,
                client.receive,
                partial(parse_body, texts=KnownTexts(1)),
                max_bytes=10**7,
                executor=executor,
                turns=RequestTurns(),
                finder=PayloadFinder(),
            )
        except InvalidRequestError as exc:
            outcome = str(exc)
    assert (threading.get_ident() in threads, bool(threads)) == (False, is_thread)
    try:
        truth: Any = parse_body(ReadBody(memoryview(body.encode())), KnownTexts(1))
    except InvalidRequestError as exc:
        truth = str(exc)
    assert outcome == truth


@pytest.mark.parametrize(("part", "at_once"), [('"text", "text": "x"', 4), (PICTURE, 1)])
async def test_requests_that_have_arrived_go_on_in_turns(part: str, at_once: int) -> None:
    body = f'{{"messages": [{{"role": "user", "content": [{{"type": {part}}}]}}]}}'.encode()
    turns = RequestTurns()
    parsed: list[int] = []

    async def answer(number: int) -> None:
        client = Client([body])
        await read_parsed(
            client.scope,
            client.receive,
            partial(parse_body, texts=KnownTexts(1)),
            max_bytes=10**7,
            executor=executor,
            turns=turns,
            finder=PayloadFinder(),
        )
        parsed.append(number)

    with ThreadPoolExecutor(1) as executor:
        tasks = [asyncio.create_task(answer(number)) for number in range(14)]
        tasks[6].cancel()  # before it began
        most = 0
        while len(parsed) < 12:
            if len(parsed) == at_once:
                tasks[9].cancel()  # while it waits
            before = len(parsed)
            await asyncio.sleep(0)
            most = max(most, len(parsed) - before)
    assert most == at_once
    assert parsed == [number for number in range(14) if number not in (6, 9)]


async def test_an_empty_body_says_what_is_expected() -> None:
    client = Client([b""])
    with ThreadPoolExecutor(1) as executor, pytest.raises(InvalidRequestError, match="empty"):
        await read_parsed(
            client.scope,
            client.receive,
            lambda body: body,
            max_bytes=10,
            executor=executor,
            turns=RequestTurns(),
        )
