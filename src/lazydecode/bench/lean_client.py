"""A load client that costs little: it looks at nothing of an answer but its status and its end.

Where the rates of one and of two cores are compared, client and server share them, and what the
client takes is missing from the server's rates.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

_BUFFER_BYTES: Final = 256 * 1024
_STEADY_ROUNDS: Final = 4
"""Answers per connection from which on the first ones and the last ones are left out of a rate."""
_HEAD_END: Final = b"\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


async def measure_rate(
    url: str, bodies: Sequence[bytes], concurrency: int, *, headers: Mapping[str, str] | None = None
) -> float:
    """Send all `bodies` to `url`, `concurrency` at a time; return the answers per second.

    That is the rate while as many are under way: without the first answers and the last, if there
    are enough between them. In the beginning and at the end a server has too little to do.

    Args:
        url: Of plain http; its answers state their length.
        bodies: JSON requests, at least one.
        concurrency: Connections, each of which stays open.
        headers: Further ones of each request.

    Raises:
        RuntimeError: If an answer is not 200, does not state its length, or is cut off.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    fields = {"host": parts.netloc, "content-type": "application/json", **(headers or {})}
    lines = [f"POST {parts.path or '/'} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
    head = "\r\n".join(lines)
    waiting = iter(bodies)
    answered: list[float] = []
    loop = asyncio.get_running_loop()

    async def work() -> None:
        transport, answers = await loop.create_connection(_Answers, host, port)
        try:
            for body in waiting:
                transport.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode())
                transport.write(body)
                await answers.next()
                answered.append(time.perf_counter())
        finally:
            transport.close()

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(bodies))):
                group.create_task(work())
    except BaseExceptionGroup as group_error:
        # Not `except*`: older releases of Python 3.11 wrap what is raised there.
        failures = group_error.subgroup(RuntimeError)
        if failures is None:
            raise
        raise failures.exceptions[0] from None
    if len(answered) >= _STEADY_ROUNDS * concurrency:
        first, last = concurrency - 1, len(answered) - concurrency - 1
        return (last - first) / (answered[last] - answered[first])
    return len(answered) / (answered[-1] - started)


class _Answers(asyncio.BufferedProtocol):
    """Reads answers into the same memory again and again."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._head = b""
        self._left: int | None = None
        """Bytes of the body that are still to come; None: its head is not whole."""
        self._done: asyncio.Future[None] | None = None

    async def next(self) -> None:
        """Return when the next answer has come.

        Raises:
            RuntimeError: As `measure_rate`.
        """
        self._head, self._left = b"", None
        self._done = asyncio.get_running_loop().create_future()
        await self._done

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._left is None:
            self._head += bytes(self._buffer[:nbytes])
            end = self._head.find(_HEAD_END)
            if end < 0:
                return
            status, length = _STATUS.match(self._head), _LENGTH.search(self._head[:end])
            if status is None or status[1] != b"200" or length is None:
                self._end(RuntimeError(f"an answer begins with {self._head[:200]!r}"))
                return
            self._left = int(length[1])
            nbytes = len(self._head) - end - len(_HEAD_END)
        self._left -= nbytes
        if self._left == 0:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(RuntimeError(f"the connection was lost: {exc}"))

    def _end(self, error: Exception | None) -> None:
        done, self._done = self._done, None
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
