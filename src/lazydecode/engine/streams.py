"""One request's outputs on their way from the reader thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator

from lazydecode.engine.protocol import EngineOutput
from lazydecode.errors import LazyDecodeError


class OutputStream:
    """A queue with one reader on an event loop and writers on any thread.

    The lock covers the queue and the reader's event; the loop is woken outside it.
    """

    def __init__(self, request_id: str, wire_id: str) -> None:
        self.request_id = request_id
        self.wire_id = wire_id
        """The id that the engine process knows: never used twice."""
        self.sent = False
        """Whether the request was handed to the process that runs now."""
        self.has_reader = False
        self._lock = threading.Lock()
        self._queue: deque[EngineOutput | LazyDecodeError] = deque()
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, value: EngineOutput | LazyDecodeError) -> None:
        """Append an output, or the error that ends the stream."""
        with self._lock:
            self._queue.append(value)
            reader = self._reader
        if reader is None:
            return
        loop, event = reader
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody reads any more
            loop.call_soon_threadsafe(event.set)

    async def read(self) -> AsyncIterator[EngineOutput]:
        """Yield outputs until the one with a finish reason; raise the error that ends them."""
        event = asyncio.Event()
        with self._lock:
            self._reader = (asyncio.get_running_loop(), event)
        while True:
            with self._lock:
                # Cleared under the lock: a put that comes after it sets the event again.
                event.clear()
                value = self._queue.popleft() if self._queue else None
            if value is None:
                await event.wait()
            elif isinstance(value, LazyDecodeError):
                raise value
            else:
                yield value
                if value.finish_reason is not None:
                    return
