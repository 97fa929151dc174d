"""uvicorn's protocol without its copies, on a connection that is played."""

import asyncio
from collections import deque
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from lazydecode.server.body import read_body
from lazydecode.server.http_protocol import BodyTurns, UncopiedBodies


class Transport(asyncio.Transport):
    """Takes what is written, and lets reading be paused."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_read = True
        self.is_closed = False
        self.reader: asyncio.BufferedProtocol | None = None
        """Who has the connection for itself."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.reader = protocol if isinstance(protocol, asyncio.BufferedProtocol) else None

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


def connect(app: ASGIApp, turns: BodyTurns) -> tuple[Any, Transport]:
    """Return a protocol and the transport it is connected to."""
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    config.load()
    protocol: Any = UncopiedBodies(
        config, ServerState(), {}, asyncio.get_running_loop(), turns=turns
    )
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.parametrize("at_once", [1, 3])
async def test_pieces_of_a_body_arrive_whole_and_one_alone_is_not_copied(at_once: int) -> None:
    received: list[Message] = []
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            received.append(await receive())
            more = received[-1]["more_body"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        done.set()

    protocol, transport = connect(app, BodyTurns())
    protocol.data_received(b"POST / HTTP/1.1\r\ncontent-length: 300000\r\n\r\n")
    pieces = [bytes([number]) * 100_000 for number in range(3)]
    for number in range(0, 3, at_once):
        for piece in pieces[number : number + at_once]:
            protocol.on_body(piece)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    protocol.on_message_complete()
    await asyncio.wait_for(done.wait(), 10)
    assert b"".join(message["body"] for message in received) == b"".join(pieces)
    if at_once == 1:
        assert all(
            message["body"] is piece for message, piece in zip(received, pieces, strict=False)
        )
    assert transport.written.startswith(b"HTTP/1.1 204")
    protocol.timeout_keep_alive_task.cancel()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await answer(send, b"%d %b" % (len(body), body[-5:]))


@pytest.mark.parametrize("fields", [b"", b"expect: 100-continue\r\n", b"connection: close\r\n"])
async def test_a_body_that_came_with_its_head_is_taken_whole(fields: bytes) -> None:
    protocol, transport = connect(echo, BodyTurns())
    request = b"POST / HTTP/1.1\r\n" + fields + b"content-length: 20000\r\n\r\n"
    for number in range(1 if fields else 3):  # on one connection
        protocol.data_received(request + bytes(19_999) + b"%d" % number)
        await finish(protocol)
        assert transport.written.endswith(b"\r\n\r\n20000 \0\0\0\0%d" % number)
    assert transport.is_closed == (b"close" in fields)


async def test_a_body_that_came_with_its_head_is_not_copied() -> None:
    bodies: list[memoryview] = []
    seen: list[bytes | memoryview] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        bodies.append(await read_body(scope, receive, max_bytes=30_000, on_chunk=seen.append))
        await answer(send, b"x")

    protocol, _ = connect(app, BodyTurns())
    data = b"POST / HTTP/1.1\r\ncontent-length: 20000\r\n\r\n" + bytes(19_999) + b"!"
    protocol.data_received(data)
    await finish(protocol)
    assert bodies == [data[-20_000:]]
    assert bodies[0].obj is data
    assert seen == bodies


@pytest.mark.parametrize("cut", [10, 70, 20_000, 20_070, 20_100])
async def test_requests_that_arrive_together_are_told_apart(cut: int) -> None:
    protocol, transport = connect(echo, BodyTurns())
    request = b"POST / HTTP/1.1\r\nx: %d\r\ncontent-length: 20000\r\n\r\n" + bytes(19_999) + b"!"
    chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n4e20\r\n%b\r\n0\r\n\r\n"
    data = (request % 1) + (request % 2) + chunked % (bytes(19_999) + b"?") + request % 3
    for piece in (data[:cut], data[cut:]):
        protocol.data_received(piece)
    await finish(protocol)
    bodies = transport.written.split(b"\r\n\r\n")[1:]
    assert [body[:11][-1:] for body in bodies] == [b"!", b"!", b"?", b"!"]
    assert protocol.pipeline == deque()


@pytest.mark.parametrize("name", [b"Upgrade", b"uPgRaDe"])
@pytest.mark.parametrize("cut", [None, 20, 45, 60, "body"])
@pytest.mark.parametrize("size", [20, 300_000])
async def test_a_wish_for_another_protocol_is_passed_over(
    name: bytes, cut: int | str | None, size: int
) -> None:
    protocol, transport = connect(echo, BodyTurns())
    wish = b"Connection: Upgrade, HTTP2-Settings\r\n%b: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n" % name
    head = b"\r\nPOST / HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (wish * 2, size)
    body = b"\r\nupgrade: h2c" + bytes(size - 14)
    at = len(head) if cut == "body" else cut
    for _ in range(2):  # on one connection
        transport.writes.clear()
        for piece in [(head + body)[:at], (head + body)[at:] if at else b""]:
            protocol.data_received(piece)
        await finish(protocol)
        assert transport.written.endswith(b"\r\n\r\n%d %b" % (size, body[-5:]))
        assert not transport.is_closed


@pytest.mark.parametrize("cut", [None, 30, 90, 120, 20_000])
@pytest.mark.parametrize("protocol_name", [b"h2c", b"websocket"])
async def test_what_follows_a_wish_is_its_request_s_body_and_then_the_next_request(
    cut: int | None, protocol_name: bytes
) -> None:
    protocol, transport = connect(echo, BodyTurns())
    wish = b"Connection: Upgrade\r\nUpgrade: %b\r\n" % protocol_name
    hidden = b"GET /hidden HTTP/1.1\r\n\r\n"
    data = (
        b"GET / HTTP/1.1\r\n%b\r\n" % wish
        + b"POST / HTTP/1.1\r\n%btransfer-encoding: chunked\r\n\r\n" % wish
        + b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
        + b"POST / HTTP/1.1\r\n%bcontent-length: 20000\r\n\r\n" % wish
        + hidden
        + bytes(20_000 - len(hidden))
        + b"GET / HTTP/1.1\r\n%b\r\n" % wish
    )
    for piece in [data[:cut], data[cut:] if cut else b""]:
        protocol.data_received(piece)
    await finish(protocol)
    told = [answer[answer.index(b"\r\n\r\n") :] for answer in transport.written.split(b"HTTP/")[1:]]
    empty = b"\r\n\r\n0 "
    chunked = b"\r\n\r\n%d %b" % (len(hidden), hidden[-5:])
    assert told == [empty, chunked, b"\r\n\r\n20000 \0\0\0\0\0", empty]
    assert protocol.pipeline == deque()
    assert not transport.is_closed


async def test_a_wish_after_a_body_that_nobody_read_is_passed_over() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (echo(scope, receive, send) if scope["path"] == "/" else answer(send, b"x"))

    protocol, transport = connect(app, BodyTurns())
    protocol.data_received(b"POST /no HTTP/1.1\r\ncontent-length: 30000\r\n\r\n")
    await finish(protocol)
    protocol.data_received(bytes(30_000))
    wish = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    protocol.data_received(b"POST / HTTP/1.1\r\n%bcontent-length: 5\r\n\r\nabcde" % wish)
    await finish(protocol)
    assert transport.written.endswith(b"\r\n\r\n5 abcde")


async def test_a_wish_does_not_make_a_wrong_head_right() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.disconnect"

    protocol, transport = connect(app, BodyTurns())
    wish = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    protocol.data_received(b"POST / HTTP/1.1\r\n%btransfer-encoding: gzip\r\n\r\n" % wish)
    assert transport.written.startswith(b"HTTP/1.1 400")
    assert transport.is_closed
    protocol.connection_lost(None)
    await finish(protocol)


async def test_bodies_of_many_connections_are_read_in_turns() -> None:
    read: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        read.append(body)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    turns = BodyTurns(2)
    connections = [connect(app, turns) for _ in range(7)]
    for protocol, transport in connections:
        protocol.data_received(b"POST / HTTP/1.1\r\ncontent-length: 30000\r\n\r\n" + bytes(10_000))
        assert not transport.is_read  # though less than uvicorn lets add up
    most = 0
    for _ in range(100):
        await asyncio.sleep(0)
        reading = [p for p, transport in connections if transport.is_read and p.cycle.more_body]
        most = max(most, len(reading))
        for protocol in reading:
            protocol.data_received(bytes(10_000))
    assert read == [bytes(30_000)] * 7
    assert most == 2
    for protocol, transport in connections:
        assert transport.written.startswith(b"HTTP/1.1 204")
        assert transport.is_read  # a next request, or the end of the connection, is noticed
        protocol.timeout_keep_alive_task.cancel()


async def test_large_answers_of_many_connections_are_written_in_turns() -> None:
    piece = bytes(range(200)) * 500

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        length = [(b"content-length", b"%d" % (4 * len(piece)))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        for number in range(4):
            await send({"type": "http.response.body", "body": piece, "more_body": number < 3})

    turns = BodyTurns(2)
    connections = [connect(app, turns) for _ in range(7)]
    for protocol, _ in connections:
        protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")

    def num_written() -> int:
        return sum(len(transport.written) // len(piece) for _, transport in connections)

    await asyncio.sleep(0)
    await asyncio.sleep(0)
    steps = [num_written()]
    while steps[-1] < 28:
        await asyncio.sleep(0)
        steps.append(num_written())
    # The first pieces are the connections' own, and those of the turns that were free then.
    assert steps[0] <= 7 + 2
    assert max(after - before for before, after in pairwise(steps)) == 2
    for protocol, transport in connections:
        await finish(protocol)
        assert transport.written.endswith(b"\r\n\r\n" + 4 * piece)


async def test_an_answer_goes_on_when_its_turn_has_come_and_the_connection_is_not_full() -> None:
    turns = BodyTurns(1)
    protocol, _ = connect(echo, turns)
    flow = protocol.flow
    turns.ask(lambda: None)
    flow.has_written(1000)
    assert not flow.write_paused  # small ones never wait
    flow.has_written(100_000)
    flow.pause_writing()
    flow.resume_writing()
    assert flow.write_paused
    await asyncio.sleep(0)
    assert not flow.write_paused
    flow.has_written(100_000)
    flow.pause_writing()
    await asyncio.sleep(0)
    assert flow.write_paused
    flow.resume_writing()
    assert not flow.write_paused


async def test_an_answer_that_waits_for_its_turn_ends_when_the_client_has_left() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    turns = BodyTurns(1)
    protocol, transport = connect(app, turns)
    for _ in range(3):
        turns.ask(lambda: None)
    protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0)
    assert len(transport.written) < 200_000
    transport.is_closed = True
    protocol.connection_lost(OSError())
    await finish(protocol)
    assert len(transport.written) < 200_000


async def test_bodies_that_are_read_straight_begin_in_turns() -> None:
    read: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        read.append(len(await read_body(scope, receive, max_bytes=1_000_000)))
        await answer(send, b"")

    turns = BodyTurns(2)
    connections = [connect(app, turns) for _ in range(7)]
    for protocol, _ in connections:
        protocol.data_received(b"POST / HTTP/1.1\r\ncontent-length: 30000\r\n\r\n")
    most = 0
    for _ in range(100):
        await asyncio.sleep(0)
        reading = [t for _, t in connections if t.is_read and t.reader is not None]
        most = max(most, len(reading))
        for transport in reading:
            for _ in range(3):  # as much as there is, until reading is paused
                if transport.is_read and transport.reader is not None:
                    transport.reader.get_buffer(-1)[:10_000] = bytes(10_000)
                    transport.reader.buffer_updated(10_000)
    assert read == [30_000] * 7
    assert most == 2
    for protocol, _ in connections:
        await finish(protocol)


async def test_turns_come_in_order_and_at_once_if_nobody_waits() -> None:
    turns = BodyTurns(2)
    order: list[int] = []
    for number in range(5):
        turns.ask(lambda number=number: order.append(number))  # type: ignore[misc]
    assert order == [0, 1]
    await asyncio.sleep(0)
    assert order == [0, 1, 2, 3]
    turns.ask(lambda: order.append(5))
    await asyncio.sleep(0)
    assert order == [0, 1, 2, 3, 4, 5]
    await asyncio.sleep(0)
    turns.ask(lambda: order.append(6))
    assert order[-1] == 6


async def test_reading_that_was_stopped_again_does_not_go_on_with_its_turn() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    turns = BodyTurns(1)
    turns.ask(lambda: None)
    protocol, transport = connect(app, turns)
    protocol.flow.pause_reading()
    protocol.flow.resume_reading()
    protocol.flow.pause_reading()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not transport.is_read
    protocol.flow.resume_reading()
    await asyncio.sleep(0)
    assert transport.is_read


async def test_a_body_that_nobody_reads_is_dropped_after_the_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    protocol, transport = connect(app, BodyTurns())
    protocol.data_received(b"POST / HTTP/1.1\r\ncontent-length: 30000\r\n\r\n" + bytes(10_000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert transport.written.startswith(b"HTTP/1.1 413")
    for _ in range(2):
        assert transport.is_read
        protocol.data_received(bytes(10_000))


async def finish(protocol: Any) -> None:
    """Return when the protocol has answered."""
    while protocol.tasks:
        await asyncio.sleep(0)
    if protocol.timeout_keep_alive_task is not None:
        protocol.timeout_keep_alive_task.cancel()


async def answer(send: Send, *pieces: bytes) -> None:
    headers = [(b"content-length", str(sum(map(len, pieces))).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for number, piece in enumerate(pieces, 1):
        more = number < len(pieces)
        await send({"type": "http.response.body", "body": piece, "more_body": more})


async def test_the_head_of_an_answer_goes_out_with_the_first_piece_of_its_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"one", b"two")

    protocol, transport = connect(app, BodyTurns())
    for _ in range(2):  # the second on the same connection
        protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
        await finish(protocol)
        head, last = transport.writes
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert head.endswith(b"\r\n\r\none")
        assert last == b"two"
        transport.writes.clear()


async def test_a_head_that_was_asked_for_alone_is_written_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"one")

    protocol, transport = connect(app, BodyTurns())
    protocol.data_received(b"HEAD / HTTP/1.1\r\n\r\n")
    await finish(protocol)
    assert transport.writes == [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"]
    assert not transport.is_closed


async def test_a_client_that_waits_for_a_go_ahead_gets_it_at_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answer(send, b"x")

    protocol, transport = connect(app, BodyTurns())
    protocol.data_received(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n")
    await asyncio.sleep(0)
    assert transport.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    protocol.data_received(b"y")
    await finish(protocol)
    assert len(transport.writes) == 2
    assert transport.writes[1].endswith(b"\r\n\r\nx")


async def test_a_head_without_a_body_is_written_when_the_connection_closes() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    protocol, transport = connect(app, BodyTurns())
    protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
    await finish(protocol)
    assert transport.is_closed
    assert transport.writes[0].startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("has_answered", [True, False])
async def test_a_request_under_way_to_an_idle_connection_is_answered_at_the_end(
    has_answered: bool,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
        while protocol.server_state.tasks:
            await asyncio.sleep(0)

    protocol, transport = connect(app, BodyTurns())
    if has_answered:
        await ask()
        assert b"connection: close" not in transport.written
        transport.writes.clear()
    protocol.shutdown()
    assert not transport.is_closing()
    await ask()
    assert transport.written.startswith(b"HTTP/1.1 204")
    assert b"connection: close" in transport.written.lower()
    assert transport.is_closing()
    protocol.connection_lost(None)


async def test_an_idle_connection_is_closed_if_nothing_comes_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lazydecode.server.http_protocol._LAST_CALL_S", 0.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nobody asked")

    protocol, transport = connect(app, BodyTurns())
    protocol.shutdown()
    protocol.shutdown()
    while not transport.is_closing():
        await asyncio.sleep(0)
    assert transport.writes == []
