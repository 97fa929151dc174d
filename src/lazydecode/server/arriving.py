"""A request body while it arrives: how fast it has to come, the memory it holds, where it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Final

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from lazydecode.errors import RequestTimeoutError, RequestTooLargeError
from lazydecode.renderers.hold import EncodedHold

FREE_BYTES: Final = 1024 * 1024
"""Bodies up to here are read without asking for memory."""
_SLOW_BYTES_PER_S: Final = 32 * 1024
"""A body holds memory and a place in the queue while it arrives. Who sends more slowly than the
slowest usable connection holds them for nothing."""
_BRISK_BYTES_PER_S: Final = 1024 * 1024
_BRISK_GRACE_S: Final = 1.0
"""A body that falls so far behind such a pace keeps no memory for what has not arrived."""


class Pace:
    """How much time a client took for a body, and has left.

    Only the client's time counts, not that in which memory is waited for.

    Args:
        max_stall_s: How far the body may fall behind a slow connection; None: without end.
    """

    def __init__(self, max_stall_s: float | None) -> None:
        self._max_stall_s = max_stall_s
        self._waited_s = 0.0
        self._began: float | None = None

    def begin(self) -> None:
        """Wait for the client from now on."""
        self._began = time.monotonic()

    def end(self) -> None:
        """Wait for it no more."""
        self._waited_s = self.waited_s
        self._began = None

    @property
    def waited_s(self) -> float:
        """How long the client was waited for so far."""
        running_s = 0.0 if self._began is None else time.monotonic() - self._began
        return self._waited_s + running_s

    def left_s(self, num_bytes: int) -> float | None:
        """Return how long a body of which so much has arrived is waited for; None: for ever."""
        if self._max_stall_s is None:
            return None
        return self._max_stall_s + num_bytes / _SLOW_BYTES_PER_S - self.waited_s

    def brisk_s(self, num_bytes: int) -> float:
        """Return how long a body of which so much has arrived counts as one that comes briskly."""
        return max(0.0, _BRISK_GRACE_S + num_bytes / _BRISK_BYTES_PER_S - self.waited_s)

    def too_slow(self, num_bytes: int) -> RequestTimeoutError:
        """Return the error of a body of which so little has arrived."""
        return RequestTimeoutError(
            f"the body did not arrive in time: {num_bytes} bytes in {self.waited_s:.0f} s"
        )


class ArrivingHold:
    """The memory of a body that arrives: for all of it, as long as it comes briskly.

    It is waited for before the first byte is read, when nothing is held. A client that then
    falls behind has it taken away but for what has arrived, so that it keeps no memory from
    others by announcing; what comes after that is held as it comes, or refused.

    Args:
        hold: Gets the memory; None: nobody counts.
        announced: Size of the body as the client states it; 0: it does not.
        cost: Size of a body -> memory for it.
    """

    def __init__(
        self, hold: EncodedHold | None, announced: int, *, cost: Callable[[int], int]
    ) -> None:
        self._hold = hold
        self._announced = announced
        self._cost = cost
        self.num_arrived = 0
        """Bytes of the body."""

    async def begin(self) -> None:
        """Wait for the memory of a large body.

        Raises:
            OverloadedError: If there is none in time.
        """
        if self._hold is not None and self._announced > FREE_BYTES:
            await self._hold.require(self._cost(self._announced))

    async def arrived(self, num_bytes: int) -> None:
        """Hold memory for so many bytes, before they are kept.

        Raises:
            OverloadedError: If there is no more.
        """
        self.num_arrived = num_bytes
        needed = self._cost(num_bytes)
        if self._hold is not None and num_bytes > FREE_BYTES and needed > self._hold.nbytes:
            ahead = 2 * needed
            if num_bytes <= self._announced:
                ahead = min(ahead, self._cost(self._announced))
            await self._hold.require(ahead)

    def slow_down(self) -> None:
        """Give back what has not arrived."""
        if self._hold is not None:
            self._hold.shrink(self._cost(self.num_arrived))


async def body_chunks(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    pace: Pace,
    on_slow: Callable[[], object] = lambda: None,
) -> AsyncGenerator[bytes]:
    """Yield the body of an HTTP request as it arrives.

    Args:
        scope: The request's.
        receive: The request's.
        max_bytes: Largest body.
        pace: Of this body.
        on_slow: Called whenever the body has fallen behind a brisk connection.

    Raises:
        RequestTooLargeError: As soon as more than `max_bytes` are announced or arrived.
        RequestTimeoutError: If it comes too slowly.
        ClientDisconnect: If the client went away before the end.
    """
    stated = content_length(scope)
    if stated is not None and stated > max_bytes:
        raise too_large(max_bytes)
    total = 0
    while True:
        slow = asyncio.get_running_loop().call_later(pace.brisk_s(total), on_slow)
        left_s = pace.left_s(total)
        pace.begin()
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError as exc:
            raise pace.too_slow(total) from exc
        finally:
            slow.cancel()
            pace.end()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        total += len(chunk)
        if total > max_bytes:
            raise too_large(max_bytes)
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return


class BodyBuffer:
    """Takes chunks; of the stated size if there is one, growing otherwise.

    The stated size is not filled with zeros, as a `bytearray` would be: that touches every page
    on the event loop, 1 ms per MB. Pages that no byte arrives for are never touched at all.
    """

    def __init__(self, stated: int) -> None:
        self._memory: memoryview | bytearray = np.empty(stated, np.uint8).data
        self.filled = 0
        """Bytes so far."""

    def append(self, chunk: bytes | memoryview) -> None:
        """Add a chunk at the end."""
        end = self.filled + len(chunk)
        if isinstance(self._memory, memoryview) and end > len(self._memory):
            self._memory = bytearray(self._memory[: self.filled])
        # Beyond the end of a bytearray this appends.
        self._memory[self.filled : end] = chunk
        self.filled = end

    def unfilled(self, end: int) -> memoryview:
        """Return the memory from what was added up to `end`; whoever fills it sets `filled`."""
        return memoryview(self._memory)[self.filled : end]

    def view(self) -> memoryview:
        """Return what was added, without a copy."""
        return memoryview(self._memory)[: self.filled]


def content_length(scope: Scope) -> int | None:
    """Return how many bytes the client announced; None if it did not."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def too_large(max_bytes: int) -> RequestTooLargeError:
    """Return the error of a larger body."""
    return RequestTooLargeError(f"the body is larger than {max_bytes} bytes", value=max_bytes)
