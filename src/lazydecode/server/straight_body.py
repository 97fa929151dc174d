"""A request body read straight into the memory that keeps it.

A server's usual way holds each piece of a body three times: as the transport read it, as the
parser cut it out, and as it was added to the rest; each piece is an event and wakes a task. But
once a request's head has stated a length, no parser is needed for what follows. So the transport
reads right into the request's buffer, and wakes its reader when all is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Scope

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from lazydecode.server.http_protocol import UncopiedBodies

EXTENSION: Final = "lazydecode.straight_body"
"""Name of the ASGI extension whose value is the request's `StraightBody`."""
_READ_BYTES: Final = 512 * 1024
"""Most that is taken at once: others on the event loop get their turn between."""


class StraightBody(asyncio.BufferedProtocol):
    """Has a connection for itself while the rest of a body arrives.

    Args:
        http: Whose connection it is; has it again afterwards.
        cycle: The request.
    """

    __slots__ = ("_cycle", "_http", "_left", "_memory", "_num_read", "_on_read", "_waiting")

    def __init__(self, http: UncopiedBodies, cycle: RequestResponseCycle) -> None:
        self._http = http
        self._cycle = cycle
        self._left = 0
        """Bytes of the body that nobody has read."""
        self._memory = memoryview(b"")
        self._num_read = 0
        self._on_read: Callable[[memoryview], object]
        self._waiting: asyncio.Future[None] | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the body can be read this way: not if the client waits to be told to send it."""
        return not self._cycle.waiting_for_100_continue

    def take(self, length: int) -> bytes | memoryview:
        """Return what came with the head, or since; at once, and only once.

        Args:
            length: Of the whole body, as the head states it.
        """
        # The request refers to this and this to the request: a circle that would keep both.
        self._cycle.scope.get("extensions", {}).pop(EXTENSION, None)
        body: Any = self._cycle.body  # uvicorn states a bytearray, which has some pieces
        taken: bytes | memoryview = memoryview(body) if isinstance(body, bytearray) else body
        self._cycle.body = b""  # type: ignore[assignment]  # uvicorn adds to it, whatever it is
        self._left = length - len(taken)
        return taken

    def take_whole(self, length: int) -> bytes | memoryview | None:
        """Return the body if all of it came with the head, or since; else None, as before."""
        return self.take(length) if len(self._cycle.body) == length else None

    async def read_into(self, memory: memoryview, on_read: Callable[[memoryview], object]) -> int:
        """Fill `memory` from the connection, after `take`; nothing else of the body is unread.

        Args:
            memory: Where the next bytes of the body go, not longer than what is left of it.
            on_read: Called with each part of it when that is filled, on the event loop.

        Returns:
            How much was filled: all, or less after `stop`.

        Raises:
            ClientDisconnect: If the client went away.
            Exception: What `fail` was given.
        """
        if self._cycle.disconnected or self._http.transport.is_closing():
            raise ClientDisconnect
        self._memory = memory
        self._num_read = 0
        self._on_read = on_read
        self._waiting = asyncio.get_running_loop().create_future()
        self._http.lend(self)
        try:
            await self._waiting
        finally:
            self._waiting = None
            self._memory = memoryview(b"")
            del self._on_read  # who reads has the whole body
            self._left -= self._num_read
            self._http.take_back(self._left)
        return self._num_read

    def stop(self) -> None:
        """Let `read_into` return with what there is."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def fail(self, exc: Exception) -> None:
        """Let `read_into` raise this."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc)

    # -- what the transport calls

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._memory[self._num_read : self._num_read + _READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of bytes that were put there."""
        begin = self._num_read
        self._num_read += nbytes
        self._on_read(self._memory[begin : self._num_read])
        if self._num_read == len(self._memory):
            self.stop()
        if self._waiting is None or self._waiting.done():
            self._http.transport.pause_reading()
        else:
            self._http.read_in_turn()

    def eof_received(self) -> None:
        """The client sends no more: the transport closes, and `connection_lost` is next."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up, and pass it on."""
        self._http.connection_lost(exc)
        self.fail(ClientDisconnect())

    def pause_writing(self) -> None:
        """Pass it on."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._http.resume_writing()


def straight_body(scope: Scope) -> StraightBody | None:
    """Return the way to read a request's body straight; None if the server has none."""
    found: StraightBody | None = scope.get("extensions", {}).get(EXTENSION)
    return found if found is not None and found.is_usable else None
