"""The client that looks at nothing of an answer but its status and its end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from lazydecode.bench.lean_client import measure_rate


@asynccontextmanager
async def origin(answer: Callable[[bytes, bytes], list[bytes]]) -> AsyncIterator[str]:
    """Answers each body (head, body) with pieces; an empty one closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                for piece in answer(head, await reader.readexactly(length)):
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/render"


async def test_each_body_is_sent_once_and_large_answers_are_read_to_their_end() -> None:
    seen: list[int] = []

    def answer(head: bytes, body: bytes) -> list[bytes]:
        assert head.startswith(b"POST /render HTTP/1.1\r\n")
        assert b"\r\nx-key: 7\r\n" in head
        seen.append(json.loads(body))
        size = 1_000_000
        return [b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: %d\r\n\r\nab" % size, bytes(size - 2)]

    bodies = [json.dumps(number).encode() for number in range(7)]
    async with origin(answer) as url:
        assert await measure_rate(url, bodies, 3, headers={"x-key": "7"}) > 0
    assert sorted(seen) == list(range(7))


async def test_a_rate_is_that_of_the_time_in_which_all_connections_are_busy() -> None:
    # Two connections, whose first answers and last ones come late, and the others at once.
    num_bodies = 40

    def answer(head: bytes, body: bytes) -> list[bytes]:
        if int(body) < 2 or int(body) >= num_bodies - 2:
            time.sleep(0.5)
        return [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"]

    bodies = [b"%d" % number for number in range(num_bodies)]
    async with origin(answer) as url:
        started = time.monotonic()
        rate = await measure_rate(url, bodies, 2)
        assert time.monotonic() - started > 1
        # As many in a second as it took all would be 40 at most.
        assert rate > num_bodies
        assert await measure_rate(url, bodies[:4], 2) < 8


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", b""],
    ],
)
async def test_a_wrong_answer_is_no_answer(pieces: list[bytes]) -> None:
    async with origin(lambda head, body: pieces) as url:
        with pytest.raises(RuntimeError, match=r"an answer begins|was lost"):
            await measure_rate(url, [b"1"], 1)
