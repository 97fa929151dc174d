"""Bodies read straight into their memory: real uvicorn, raw sockets, both kinds of event loop."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import pytest
import uvicorn
import uvloop
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from lazydecode.errors import LazyDecodeError, OverloadedError
from lazydecode.media.budget import ByteBudget
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server import arriving
from lazydecode.server.body import read_body
from lazydecode.server.http_protocol import BodyTurns, UncopiedBodies
from lazydecode.server.straight_body import straight_body

MIB = 1024 * 1024
PIECE = 64 * 1024
Reader = Callable[[Scope, Receive], Awaitable[bytes]]
LOOPS = pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])


class Service:
    """Answers each request with what `read` returns, and an error with its status."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self.was_straight: list[bool] = []
        self.failures: list[BaseException] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.was_straight.append(straight_body(scope) is not None)
        status, text = 200, b""
        try:
            text = await self._read(scope, receive)
        except LazyDecodeError as exc:
            self.failures.append(exc)
            status, text = exc.status, str(exc).encode()
        except ClientDisconnect as exc:
            self.failures.append(exc)
            return
        length = str(len(text)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[int]:
    """Serve on a port of this machine, on the running loop."""
    config = uvicorn.Config(
        service,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="none",
        http=partial(UncopiedBodies, turns=BodyTurns()),  # type: ignore[arg-type]
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


def run(
    loop: Callable[[], asyncio.AbstractEventLoop],
    service: Service,
    client: Callable[[int], Any],
) -> Any:
    """Serve while `client` runs on a thread, with the port; returns what it returns."""

    async def main() -> Any:
        async with serving(service) as port, asyncio.timeout(60):
            return await asyncio.to_thread(client, port)

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main())


async def digest(scope: Scope, receive: Receive) -> bytes:
    """Read a body; what was seen of it on the way must be the same."""
    seen = hashlib.sha256()
    body = await read_body(scope, receive, max_bytes=64 * MIB, on_chunk=seen.update)
    assert seen.digest() == hashlib.sha256(body).digest()
    return seen.hexdigest().encode()


def head(length: int, *fields: str) -> bytes:
    lines = ["POST / HTTP/1.1", "host: here", f"content-length: {length}", *fields]
    return "\r\n".join([*lines, "", ""]).encode()


class Connection:
    """A client's end."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_answer(self) -> tuple[int, bytes]:
        """Return the next answer's status and body, and leave what follows."""
        status = int(self._file.readline().split()[1])
        length = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return status, self._file.read(length)


@LOOPS
def test_bodies_arrive_whole_however_they_are_cut_and_one_behind_the_other(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    chance = random.Random(7)
    sizes = [1, 100, 70_000, 300_000, 1_000_000, 3_000_000, 0, 5]
    bodies = [chance.randbytes(size) for size in sizes]
    stream = b"".join(head(len(body)) + body for body in bodies)

    def client(port: int) -> list[tuple[int, bytes]]:
        answers = []
        with Connection(port) as server:
            for body in bodies:  # one after the other
                whole = head(len(body)) + body
                while whole:
                    size = min(len(whole), chance.choice([1, 50, 5_000, 200_000, 2_000_000]))
                    server.send(whole[:size])
                    whole = whole[size:]
                    time.sleep(chance.choice([0, 0, 0.002]))
                answers.append(server.read_answer())
        with Connection(port) as server:
            server.send(stream)  # before the first answer
            answers += [server.read_answer() for _ in bodies]
        return answers

    service = Service(digest)
    expected = [(200, hashlib.sha256(body).hexdigest().encode()) for body in bodies]
    assert run(loop, service, client) == expected * 2
    assert all(service.was_straight)


@LOOPS
def test_what_nobody_reads_of_a_body_is_skipped_and_the_next_request_answered(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def refuse(scope: Scope, receive: Receive) -> bytes:
        num_seen = 0

        def count(piece: bytes) -> None:
            nonlocal num_seen
            num_seen += len(piece)
            if num_seen > MIB and num_seen < 4 * MIB:
                asyncio.get_running_loop().call_soon(task.cancel)

        task = asyncio.ensure_future(read_body(scope, receive, max_bytes=64 * MIB, on_chunk=count))
        await asyncio.wait((task,))
        if task.cancelled():
            raise OverloadedError("no more room")
        return str(len(task.result())).encode()

    def client(port: int) -> list[tuple[int, bytes]]:
        with Connection(port) as server:
            server.send(head(3 * MIB) + bytes(3 * MIB) + head(9) + b"the next.")
            return [server.read_answer(), server.read_answer()]

    answers = run(loop, Service(refuse), client)
    assert answers == [(OverloadedError.status, b"no more room"), (200, b"9")]


@LOOPS
def test_a_client_that_leaves_in_the_body_is_noticed(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    service = Service(digest)

    def client(port: int) -> None:
        for ends_writing in (False, True):
            before = len(service.failures)
            with Connection(port) as server:
                server.send(head(3 * MIB) + bytes(2 * MIB))
                if ends_writing:
                    server.socket.shutdown(socket.SHUT_WR)
                    assert server.socket.recv(1) == b""
            deadline = time.monotonic() + 120
            while len(service.failures) == before and time.monotonic() < deadline:
                time.sleep(0.005)

    run(loop, service, client)
    assert [type(failure) for failure in service.failures] == [ClientDisconnect] * 2


def test_a_client_that_waits_to_be_told_is_told_to_send_its_body() -> None:
    def client(port: int) -> tuple[int, bytes]:
        with Connection(port) as server:
            server.send(head(3, "expect: 100-continue"))
            assert server.socket.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
            server.send(b"abc")
            return server.read_answer()

    service = Service(digest)
    answer = run(uvloop.new_event_loop, service, client)
    assert answer == (200, hashlib.sha256(b"abc").hexdigest().encode())
    assert service.was_straight == [False]


def test_a_body_that_stalls_keeps_no_memory_for_what_has_not_arrived_and_then_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arriving, "_BRISK_GRACE_S", 0.05)
    budget = ByteBudget(20 * MIB)
    body = random.Random(1).randbytes(4 * MIB)

    async def held(scope: Scope, receive: Receive) -> bytes:
        async with EncodedHold(budget) as hold:
            read = await read_body(scope, receive, max_bytes=8 * MIB, hold=hold)
            assert budget.held_bytes == 7 * MIB  # the body and what is decoded of it
            return hashlib.sha256(read).hexdigest().encode()

    def wait_held(wanted: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + 120
        while not wanted(budget.held_bytes) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert wanted(budget.held_bytes), budget.held_bytes

    def client(port: int) -> tuple[int, bytes]:
        with Connection(port) as server:
            server.send(head(4 * MIB) + body[:MIB])
            wait_held(lambda held: held <= 7 * (MIB + PIECE) // 4)
            server.send(body[MIB : 2 * MIB])
            wait_held(lambda held: 7 * MIB // 2 <= held <= 7 * (2 * MIB + PIECE) // 4)
            server.send(body[2 * MIB :])
            return server.read_answer()

    answer = run(uvloop.new_event_loop, Service(held), client)
    assert answer == (200, hashlib.sha256(body).hexdigest().encode())
    assert budget.held_bytes == 0


def test_a_body_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "_BRISK_GRACE_S", 0.05)

    async def impatient(scope: Scope, receive: Receive) -> bytes:
        body = await read_body(scope, receive, max_bytes=MIB, max_stall_s=0.3)
        return str(len(body)).encode()

    def client(port: int) -> list[tuple[int, bytes]]:
        with Connection(port) as server:
            server.send(head(500_000) + bytes(1000))
            answers = [server.read_answer()]
            server.send(bytes(499_000) + head(2) + b"ok")
            return [*answers, server.read_answer()]

    (first_status, why), second = run(uvloop.new_event_loop, Service(impatient), client)
    assert first_status == 408 and b"did not arrive in time: 1000 bytes" in why
    assert second == (200, b"2")
