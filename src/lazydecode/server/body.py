"""Reading a request body: bounded while it arrives, held once, parsed off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from lazydecode.errors import InvalidRequestError, RequestTimeoutError, RequestTooLargeError
from lazydecode.renderers.chat import Conversation, parse_media_messages, parse_messages
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.payload_cut import CutBody, PayloadFinder
from lazydecode.server.protocol import ChatCompletionRequest, decode_request

_T = TypeVar("_T")
_INLINE_BYTES: Final = 64 * 1024
"""Up to here, payloads apart, parsing takes some 50 µs, less than a thread hop."""
FREE_BYTES: Final = 1024 * 1024
"""Bodies up to here are read without asking for memory."""
_SLOW_BYTES_PER_S: Final = 32 * 1024
"""A body holds memory and a place in the queue while it arrives. Who sends more slowly than the
slowest usable connection holds them for nothing."""
_BRISK_BYTES_PER_S: Final = 1024 * 1024
_BRISK_GRACE_S: Final = 1.0
"""A body that falls so far behind such a pace keeps no memory for what has not arrived."""


async def read_body(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    max_stall_s: float | None = None,
    hold: EncodedHold | None = None,
    on_chunk: Callable[[bytes], object] = lambda _: None,
) -> memoryview:
    """Return the body of an HTTP request.

    It is written into one buffer as it arrives: no list of chunks is joined at the end.

    Args:
        scope: The request's.
        receive: The request's.
        max_bytes: Largest body.
        max_stall_s: How far the body may fall behind a slow connection; None: without end.
        hold: Gets the memory of a large body before it is read, and that of what is decoded
            from it. The connection stands still meanwhile.
        on_chunk: Called with each piece of the body as it arrives.

    Raises:
        RequestTooLargeError: As soon as more than `max_bytes` are announced or arrived.
        RequestTimeoutError: If it comes too slowly.
        ClientDisconnect: If the client went away before the end.
    """
    stated = content_length(scope)
    arriving = ArrivingHold(hold, min(stated or 0, max_bytes), cost=_with_payload)
    chunks = body_chunks(
        scope, receive, max_bytes=max_bytes, max_stall_s=max_stall_s, on_slow=arriving.slow_down
    )
    if (stated or 0) <= max_bytes:
        await arriving.begin()
    body = BodyBuffer(min(stated or 0, max_bytes))
    async with aclosing(chunks):
        async for chunk in chunks:
            await arriving.arrived(body.filled + len(chunk))
            body.append(chunk)
            on_chunk(chunk)
    return body.view()


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
        self._arrived = 0

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
        self._arrived = num_bytes
        needed = self._cost(num_bytes)
        if self._hold is not None and num_bytes > FREE_BYTES and needed > self._hold.nbytes:
            ahead = 2 * needed
            if num_bytes <= self._announced:
                ahead = min(ahead, self._cost(self._announced))
            await self._hold.require(ahead)

    def slow_down(self) -> None:
        """Give back what has not arrived."""
        if self._hold is not None:
            self._hold.shrink(self._cost(self._arrived))


async def body_chunks(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    max_stall_s: float | None,
    on_slow: Callable[[], object] = lambda: None,
) -> AsyncGenerator[bytes]:
    """Yield the body of an HTTP request as it arrives.

    Args:
        scope: The request's.
        receive: The request's.
        max_bytes: As for `read_body`.
        max_stall_s: As for `read_body`.
        on_slow: Called whenever the body has fallen behind a brisk connection.

    Raises:
        RequestTooLargeError: As soon as more than `max_bytes` are announced or arrived.
        RequestTimeoutError: If it comes too slowly.
        ClientDisconnect: If the client went away before the end.
    """
    stated = content_length(scope)
    if stated is not None and stated > max_bytes:
        raise _too_large(max_bytes)
    total = 0
    waited_s = 0.0
    while True:
        # Only the client's time counts, not that in which memory is waited for.
        began = time.monotonic()
        left_s = None
        if max_stall_s is not None:
            left_s = max_stall_s + total / _SLOW_BYTES_PER_S - waited_s
        brisk_s = max(0.0, _BRISK_GRACE_S + total / _BRISK_BYTES_PER_S - waited_s)
        slow = asyncio.get_running_loop().call_later(brisk_s, on_slow)
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError as exc:
            raise RequestTimeoutError(
                f"the body did not arrive in time: {total} bytes in "
                f"{waited_s + time.monotonic() - began:.0f} s"
            ) from exc
        finally:
            slow.cancel()
        waited_s += time.monotonic() - began
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        total += len(chunk)
        if total > max_bytes:
            raise _too_large(max_bytes)
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

    def append(self, chunk: bytes) -> None:
        """Add a chunk at the end."""
        end = self.filled + len(chunk)
        if isinstance(self._memory, memoryview) and end > len(self._memory):
            self._memory = bytearray(self._memory[: self.filled])
        # Beyond the end of a bytearray this appends.
        self._memory[self.filled : end] = chunk
        self.filled = end

    def view(self) -> memoryview:
        """Return what was added, without a copy."""
        return memoryview(self._memory)[: self.filled]


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body that was read."""

    view: memoryview
    """All of it."""
    cut: CutBody | None = None
    """The body without its payloads; None if it has none, or none were looked for."""

    @property
    def is_parsed_at_once(self) -> bool:
        """Whether parsing takes less time than a thread takes to be asked for it."""
        if self.cut is not None and len(self.cut.rest) <= _INLINE_BYTES:
            return True
        return len(self.view) <= _INLINE_BYTES


def parse_body(body: ReadBody) -> tuple[ChatCompletionRequest, Conversation]:
    """Parse and check a body, and take its messages apart; linear in the body.

    Media URLs in the conversation are views of `body`; the request refers to it no more.

    Raises:
        InvalidRequestError: See `decode_request` and `parse_messages`.
    """
    request = _decode_cut(body.cut) or decode_request(body.view)
    if request.prompt_token_ids is None:
        conversation = parse_messages(request.messages)
    else:
        conversation = parse_media_messages(request.messages)
    request.messages = []
    return request, conversation


def _decode_cut(cut: CutBody | None) -> ChatCompletionRequest | None:
    """Parse a body without its payloads; None if it has to be parsed as a whole."""
    if cut is None:
        return None
    try:
        request = decode_request(cut.rest)
    except InvalidRequestError:
        return None  # The message is to be about the client's own body.
    return request if cut.restore(request.messages) else None


async def read_parsed(
    scope: Scope,
    receive: Receive,
    parse: Callable[[ReadBody], _T],
    *,
    max_bytes: int,
    executor: Executor,
    max_stall_s: float | None = None,
    hold: EncodedHold | None = None,
) -> _T:
    """Read a body and return what `parse` makes of it, on a thread if it is a large one.

    Raises:
        LazyDecodeError: See `read_body`, or what `parse` raises.
    """
    finder = PayloadFinder()
    body = await read_body(
        scope,
        receive,
        max_bytes=max_bytes,
        max_stall_s=max_stall_s,
        hold=hold,
        on_chunk=finder.feed,
    )
    if not body:
        raise InvalidRequestError("the body is empty; a JSON object is expected")
    read = ReadBody(body, finder.cut(body))
    if read.is_parsed_at_once:
        return parse(read)
    return await asyncio.get_running_loop().run_in_executor(executor, parse, read)


async def read_chat_request(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    executor: Executor,
    max_stall_s: float | None = None,
    hold: EncodedHold | None = None,
) -> tuple[ChatCompletionRequest, Conversation]:
    """Read and parse a chat request; media URLs in it are views of the body.

    Raises:
        LazyDecodeError: See `decode_request` and `read_body`.
    """
    return await read_parsed(
        scope,
        receive,
        parse_body,
        max_bytes=max_bytes,
        executor=executor,
        max_stall_s=max_stall_s,
        hold=hold,
    )


def _with_payload(num_bytes: int) -> int:
    """Memory for a body of base64 and for what is decoded from it."""
    return num_bytes + num_bytes * 3 // 4


def content_length(scope: Scope) -> int | None:
    """Return how many bytes the client announced; None if it did not."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than {max_bytes} bytes", value=max_bytes)
