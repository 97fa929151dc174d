"""One HTTP request and its answer: ids, reading, answering, and noticing that the client left."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from lazydecode.errors import AuthenticationError
from lazydecode.renderers.timeline import Timeline

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_WATCH_AFTER_S: Final = 0.01
"""Requests that are answered within this are not watched for a client that leaves: most hits."""
_WRITE_BYTES: Final = 256 * 1024
"""Large answers are written in slices, so that other connections get their turn between."""


def choose_request_id(given: str) -> str:
    """Return the client's id if it is a plain word (logs and headers show it), or a new one."""
    return given if given and _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()


class Exchange:
    """One request with its answer, for handlers; at most one answer is begun.

    Args:
        scope: The request's.
        receive: The request's.
        send: The request's.
        on_complete: Called once: before the answer's last byte leaves, or by `complete`. A client
            that has its whole answer then also finds it counted.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        on_complete: Callable[[Exchange], object] | None = None,
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = choose_request_id(
            self.headers.get(b"x-request-id", b"").decode("latin-1")
        )
        self.timeline = Timeline()
        self.started = time.perf_counter()
        self.status: int | None = None
        """Status of the answer, once it has begun."""
        self.is_admitted = False
        """Whether it has had a place among the requests that run or wait."""
        self._on_complete = on_complete
        self._left: int | None = None
        """Bytes of the answer's body that are not sent yet, where its length was stated."""

    def complete(self) -> None:
        """Call what waits for the end of the answer, unless it was called."""
        on_complete, self._on_complete = self._on_complete, None
        if on_complete is not None:
            on_complete(self)

    def header(self, name: str) -> str | None:
        """Value of a request header."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def check_key(self, api_key: str | None) -> None:
        """Let the request through if it bears the key; the comparison takes constant time.

        Raises:
            AuthenticationError: If it does not.
        """
        if api_key is None:
            return
        scheme, _, given = (self.header("authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            hashlib.sha256(given.strip().encode()).digest(),
            hashlib.sha256(api_key.encode()).digest(),
        ):
            raise AuthenticationError("a valid API key is needed: send 'Authorization: Bearer KEY'")

    async def run_while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; if the client goes away first, cancel it and wait until it has ended.

        The body must have been read: what comes after it is only the disconnect.

        Raises:
            ClientDisconnect: If the client went away.
        """
        task = asyncio.current_task()
        assert task is not None
        task.set_name(f"request-{self.request_id}")
        watch = _DisconnectWatch(self, task, work)
        try:
            await watch
        except (asyncio.CancelledError, OSError):
            # A server that shuts down cancels as well; that goes on up.
            if watch.has_left and not task.uncancel():
                raise ClientDisconnect from None
            raise
        finally:
            await watch.end()

    async def answer(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole answer."""
        await self._send(self._begin(status, content_type, len(body), headers))
        self.complete()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_pieces(
        self,
        pieces: Iterator[bytes],
        num_bytes: int,
        *,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send an answer whose pieces are made when the one before was sent.

        Each is to take no longer to make than to send, and to be small enough that other
        connections get their turn: here, on the event loop, it is in the cache when it is sent.
        """
        if num_bytes <= _WRITE_BYTES:
            await self.answer(200, b"".join(pieces), content_type=content_type, headers=headers)
            return
        await self._send(self._begin(200, content_type, num_bytes, headers))
        self._left = num_bytes
        for piece in pieces:
            if len(piece) <= _WRITE_BYTES:
                await self._write(piece, more=True)
                continue
            for begin in range(0, len(piece), _WRITE_BYTES):
                await self._write(piece[begin : begin + _WRITE_BYTES], more=True)
        await self._write(b"", more=False)

    async def answer_json(
        self, status: int, value: Any, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a small JSON answer."""
        await self.answer(status, msgspec.json.encode(value), headers=headers)

    async def answer_events(
        self, events: AsyncGenerator[bytes], headers: Callable[[], Mapping[str, str]]
    ) -> None:
        """Send server-sent events; status and headers go out with the first one.

        To a client the event that says so is the end: `events` calls `complete` before it.
        """
        async with aclosing(events):
            async for event in events:
                if self.status is None:
                    fields = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers()}
                    await self._send(
                        self._begin(200, "text/event-stream; charset=utf-8", None, fields)
                    )
                await self._write(event, more=True)
        await self._write(b"", more=False)

    async def end_events(self, event: bytes) -> None:
        """Send a last event and end a stream that has begun."""
        await self._write(event, more=True)
        await self._write(b"", more=False)

    def _begin(
        self,
        status: int,
        content_type: str,
        num_bytes: int | None,
        headers: Mapping[str, str] | None,
    ) -> Message:
        """Return the message with which an answer begins; None as `num_bytes`: its end is seen."""
        if self.status is not None:
            raise RuntimeError("the answer has already begun")
        self.status = status
        fields = [
            (b"content-type", content_type.encode("latin-1")),
            (b"x-request-id", self.request_id.encode("latin-1")),
        ]
        if num_bytes is not None:
            fields.append((b"content-length", b"%d" % num_bytes))
        if headers:
            fields += [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in headers.items()
            ]
        return {"type": "http.response.start", "status": status, "headers": fields}

    async def _write(self, data: bytes, *, more: bool) -> None:
        if self._left is not None:
            self._left -= len(data)
        if not more or self._left == 0:
            self.complete()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class _DisconnectWatch(Generator[Any, Any, None]):
    """Awaits work, and cancels its task when the client goes away; from `_WATCH_AFTER_S` on.

    Work that never waits, as most hits' does not, ends before anything could be noticed: the
    timer is set when it waits for the first time.

    Args:
        exchange: The request, whose body has been read.
        task: Awaits this.
        work: What is done for the request.
    """

    def __init__(
        self, exchange: Exchange, task: asyncio.Task[Any], work: Coroutine[Any, Any, None]
    ) -> None:
        self._exchange = exchange
        self._task = task
        self._work = work
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.has_left = False
        """Whether the client went away, and the task was cancelled for it."""

    def __await__(self) -> Generator[Any, Any, None]:
        return self

    def send(self, value: Any) -> Any:
        """Let the work go on to its next wait."""
        waits_for = self._work.send(value)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._start)
        return waits_for

    def throw(self, *exc: Any) -> Any:
        """Let the work go on from an exception, as a cancellation."""
        return self._work.throw(*exc)

    def _start(self) -> None:
        name = f"watch-{self._exchange.request_id}"
        self._watcher = asyncio.create_task(self._watch(), name=name)

    async def _watch(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        self._task.cancel()

    async def end(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait((watcher,))
