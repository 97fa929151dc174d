"""A loopback HTTP origin that behaves as badly as it is told to, and a resolver that lies.

The server writes raw bytes, so it can do what no HTTP library would let it do. It runs on a
loop in a thread of its own: blocking and async tests use it alike.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

GRACE_S = 120.0
"""Longest wait for something that a test says will happen."""


@dataclass(frozen=True)
class Request:
    """One request as it arrived."""

    method: str
    target: str
    """Path and query, as sent."""
    headers: dict[str, str]
    """Lower-case names."""
    connection: int
    """Number of the connection, from 1."""
    server_name: str | None = None
    """The name that the client gave in its TLS handshake."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Exchange:
    """What a handler answers with. Every method flushes; a gone client raises ConnectionError."""

    def __init__(self, request: Request, writer: asyncio.StreamWriter, origin: Origin) -> None:
        self.request = request
        self._writer = writer
        self._origin = origin
        self.must_close = False

    async def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self._writer.write(data)
        await self._writer.drain()
        self._origin.bytes_sent += len(data)

    async def head(self, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} Whatever"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        await self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def answer(
        self, body: bytes = b"", status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a well-formed answer; `headers` win over the length and type given here."""
        given = {"Content-Length": str(len(body)), "Content-Type": "application/octet-stream"}
        await self.head(status, {**given, **(headers or {})})
        await self.send(body)

    def close(self) -> None:
        """Close the connection after this exchange."""
        self.must_close = True


Handler = Callable[[Exchange], Awaitable[None]]


@dataclass
class Gate:
    """Holds an answer back. `arrived` is set when a request waits; `open` lets all go on."""

    arrived: threading.Event = field(default_factory=threading.Event)
    _opened: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        self._opened.set()

    def wait_arrived(self) -> None:
        assert self.arrived.wait(GRACE_S), "no request arrived"

    async def wait_arrived_async(self) -> None:
        await wait_until(self.arrived.is_set)

    async def passed(self) -> None:
        self.arrived.set()
        while not self._opened.is_set():
            await asyncio.sleep(0.002)


class Origin:
    """A server on loopback, 127.0.0.1 unless said otherwise. Unknown paths answer 404.

    Routes are set by path, without the query. `requests` holds every request in order.
    """

    def __init__(
        self, *, ssl_context: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self._ssl_context = ssl_context
        self._host = host
        self._server_names: dict[Any, str | None] = {}
        self._handlers: dict[str, Handler] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="test-origin", daemon=True)
        self._started = threading.Event()
        self.requests: list[Request] = []
        self.bytes_sent = 0
        self.num_connections = 0

    # -- where it is, what it saw

    @property
    def netloc(self) -> str:
        """Host and port."""
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    def url(self, path: str, *, host: str | None = None) -> str:
        """The URL of a path, optionally by another name for this host."""
        scheme = "http" if self._ssl_context is None else "https"
        netloc = self.netloc if host is None else f"{host}:{self.port}"
        return f"{scheme}://{netloc}{path}"

    def hits(self, path: str | None = None) -> int:
        """Number of requests for a path, or of all."""
        if path is None:
            return len(self.requests)
        return Counter(request.path for request in self.requests)[path]

    @property
    def open_connections(self) -> int:
        """Connections that are open now, as far as this end knows."""
        return len(self._writers)

    # -- routes

    def route(self, path: str, handler: Handler) -> None:
        """Answer `path` with a handler of the test's own."""
        self._handlers[path] = handler

    def serve(
        self,
        path: str,
        body: bytes,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        gate: Gate | None = None,
    ) -> str:
        """Answer `path` with `body`, once `gate` is open. Returns the URL."""

        async def handler(exchange: Exchange) -> None:
            if gate is not None:
                await gate.passed()
            await exchange.answer(body, status, headers)

        self.route(path, handler)
        return self.url(path)

    def serve_in_turn(self, path: str, *answers: tuple[int, bytes]) -> str:
        """Answer `path` with one (status, body) after the other; the last one stays."""
        left = list(answers)

        async def handler(exchange: Exchange) -> None:
            status, body = left.pop(0) if len(left) > 1 else left[0]
            await exchange.answer(body, status)

        self.route(path, handler)
        return self.url(path)

    def redirect(self, path: str, location: str, *, status: int = 302) -> str:
        """Answer `path` with a redirect to `location`, sent as it is."""
        return self.serve(path, b"", status=status, headers={"Location": location})

    def redirect_chain(self, prefix: str, length: int, body: bytes) -> str:
        """Set up `prefix/length` -> ... -> `prefix/0`, which serves `body`."""
        for step in range(length, 0, -1):
            self.redirect(f"{prefix}/{step}", f"{prefix}/{step - 1}")
        self.serve(f"{prefix}/0", body)
        return self.url(f"{prefix}/{length}")

    def stall(self, path: str, *, before_head: bool = False) -> str:
        """Answer `path` with a head (or nothing at all) and then be silent for ever."""

        async def handler(exchange: Exchange) -> None:
            if not before_head:
                await exchange.head(200, {"Content-Length": "1000"})
            await asyncio.Event().wait()

        self.route(path, handler)
        return self.url(path)

    def trickle(self, path: str, *, every_s: float, in_head: bool = False) -> str:
        """Answer `path` with one byte after the other, for ever."""

        async def handler(exchange: Exchange) -> None:
            if in_head:
                await exchange.send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            else:
                await exchange.head(200, {"Content-Length": "1000000"})
            while True:
                await exchange.send(b"x")
                await asyncio.sleep(every_s)

        self.route(path, handler)
        return self.url(path)

    def cut_off(self, path: str, body: bytes, *, after: int) -> str:
        """Announce all of `body`, send its first bytes, and hang up."""

        async def handler(exchange: Exchange) -> None:
            await exchange.head(200, {"Content-Length": str(len(body))})
            await exchange.send(body[:after])
            exchange.close()

        self.route(path, handler)
        return self.url(path)

    def endless(self, path: str, *, content_length: int | None = None, pause_s: float = 0.0) -> str:
        """Send zeros without end; without a length, in chunked coding."""
        piece = bytes(16 * 1024)

        async def handler(exchange: Exchange) -> None:
            if content_length is None:
                await exchange.head(200, {"Transfer-Encoding": "chunked"})
            else:
                await exchange.head(200, {"Content-Length": str(content_length)})
            while True:
                if content_length is None:
                    await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                else:
                    await exchange.send(piece)
                await asyncio.sleep(pause_s)

        self.route(path, handler)
        return self.url(path)

    # -- life

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(GRACE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(GRACE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._ssl_context is not None:
            self._ssl_context.sni_callback = self._note_server_name
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family)
        # Little on the way, so that `bytes_sent` is close to what the client has read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        server = await asyncio.start_server(
            self._talk, sock=listener, ssl=self._ssl_context, limit=1 << 16
        )
        self.port: int = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def _note_server_name(self, sslobj: Any, name: str | None, _: ssl.SSLContext) -> None:
        self._server_names[sslobj] = name

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(self._numbers)
        writer.transport.set_write_buffer_limits(high=16 * 1024)
        self.num_connections += 1
        self._writers[number] = writer
        try:
            while (request := await self._read_request(reader, writer, number)) is not None:
                self.requests.append(request)
                exchange = Exchange(request, writer, self)
                if not await self._answer(exchange, reader) or exchange.must_close:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        except asyncio.CancelledError:
            pass  # The origin stops; nothing is left to hand the cancellation to.
        finally:
            self._writers.pop(number, None)
            writer.close()
            writer.transport.abort()

    async def _answer(self, exchange: Exchange, reader: asyncio.StreamReader) -> bool:
        """Run the handler until it is done or the client has hung up; whether it was done."""
        handler = self._handlers.get(exchange.request.path, _not_found)
        answering = asyncio.ensure_future(handler(exchange))
        hanging_up = asyncio.ensure_future(_end_of(reader))
        try:
            await asyncio.wait((answering, hanging_up), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
                return True
            return False
        finally:
            for task in (answering, hanging_up):
                task.cancel()
            await asyncio.gather(answering, hanging_up, return_exceptions=True)

    async def _read_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> Request | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {
            name.lower(): value.strip() for name, _, value in (ln.partition(":") for ln in lines)
        }
        server_name = self._server_names.get(writer.get_extra_info("ssl_object"))
        return Request(method, target, headers, number, server_name)


async def _not_found(exchange: Exchange) -> None:
    await exchange.answer(b"not found", 404)


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Return when the client hangs up; our clients send nothing before they have the answer."""
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.005)


async def wait_until(condition: Callable[[], object]) -> None:
    """Return when `condition` holds; fail if it does not within the grace."""
    deadline = asyncio.get_running_loop().time() + GRACE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "what was waited for did not happen"
        await asyncio.sleep(0.002)


class StubResolver:
    """Resolves names from a table; to be given to `HttpConnection(resolve=...)`.

    Args:
        table: Name -> its addresses; or a list of such lists, one per query, the last one
            staying: a name that resolves differently the second time.
    """

    def __init__(self, table: Mapping[str, Sequence[str] | Sequence[Sequence[str]]]) -> None:
        self._table = {name: list(answers) for name, answers in table.items()}
        self.queries: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.queries.append(host)
        answers = self._table.get(host)
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, f"{host} is not in the table")
        if not answers or isinstance(answers[0], str):
            return [str(answer) for answer in answers]
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
def origin() -> Iterator[Origin]:
    """The media origin that tests are allowed to fetch from."""
    with Origin() as server:
        yield server


@pytest.fixture
def inside() -> Iterator[Origin]:
    """A second server that must never be reached; it would serve a good answer."""
    with Origin() as server:
        server.serve("/secret.png", b"secret")
        server.serve("/k1_gray.jpg", b"secret")
        yield server
