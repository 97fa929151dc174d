"""Reading a request body: bounded while it arrives, held once, parsed off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from starlette.types import Receive, Scope

from lazydecode.errors import InvalidRequestError
from lazydecode.media.known_texts import KnownTexts, yield_to_others
from lazydecode.renderers.chat import Conversation, parse_media_messages, parse_messages
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.arriving import (
    FREE_BYTES,
    ArrivingHold,
    BodyBuffer,
    Pace,
    body_chunks,
    content_length,
    too_large,
)
from lazydecode.server.payload_cut import CutBody, PayloadFinder
from lazydecode.server.protocol import ChatCompletionRequest, decode_request
from lazydecode.server.straight_body import StraightBody, straight_body
from lazydecode.turns import Turns

_T = TypeVar("_T")
_INLINE_BYTES: Final = 64 * 1024
"""Up to here, payloads apart, parsing takes some 50 µs, less than a thread hop."""
_INLINE_CHARS: Final = 4 * 1024 * 1024
"""Payloads up to here are looked through in 1 ms, and in less if they came before."""
_SMALL_REQUESTS: Final = 4
"""Requests without large media that take as long as one with."""
_SLOW_PIECE_BYTES: Final = 64 * 1024
"""So much at once is asked for of the memory budget while a body does not come briskly."""


def _nothing_of(_: bytes | memoryview) -> None:
    pass


async def read_body(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    max_stall_s: float | None = None,
    hold: EncodedHold | None = None,
    on_chunk: Callable[[bytes | memoryview], object] = _nothing_of,
) -> memoryview:
    """Return the body of an HTTP request.

    It is written into one buffer as it arrives: no list of chunks is joined at the end. One that
    came with its head stays where it is.

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
    stated = content_length(scope) or 0
    if stated > max_bytes:
        raise too_large(max_bytes)
    straight = straight_body(scope) if stated else None
    if straight is not None and stated <= FREE_BYTES:
        whole = straight.take_whole(stated)
        if whole is not None:
            on_chunk(whole)
            return memoryview(whole)
    arriving = ArrivingHold(hold, stated, cost=_with_payload)
    await arriving.begin()
    body = BodyBuffer(stated)
    pace = Pace(max_stall_s)
    if straight is not None:
        reading = _StraightReading(straight, body, arriving=arriving, pace=pace, on_chunk=on_chunk)
        await reading.read(stated)
        return body.view()
    chunks = body_chunks(scope, receive, max_bytes=max_bytes, pace=pace, on_slow=arriving.slow_down)
    async with aclosing(chunks):
        async for chunk in chunks:
            await arriving.arrived(body.filled + len(chunk))
            body.append(chunk)
            on_chunk(chunk)
    return body.view()


class _StraightReading:
    """Fills a buffer of the stated size, with what `body_chunks` looks after too.

    While the body comes briskly, the memory for all of it is held, and nothing is waited for but
    its end.
    """

    def __init__(
        self,
        straight: StraightBody,
        body: BodyBuffer,
        *,
        arriving: ArrivingHold,
        pace: Pace,
        on_chunk: Callable[[bytes | memoryview], object],
    ) -> None:
        self._straight = straight
        self._body = body
        self._arriving = arriving
        self._pace = pace
        self._on_chunk = on_chunk
        self._is_all_held = True
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, stated: int) -> None:
        """Return when all has arrived.

        Raises:
            LazyDecodeError: See `read_body`.
            ClientDisconnect: If the client went away before the end.
        """
        body = self._body
        if first := self._straight.take(stated):
            await self._arriving.arrived(len(first))
            body.append(first)
            self._on_chunk(first)
        while body.filled < stated:
            end = stated
            if not self._is_all_held:
                end = min(stated, body.filled + _SLOW_PIECE_BYTES)
                await self._arriving.arrived(end)
            self._pace.begin()
            self._arm()
            try:
                await self._straight.read_into(body.unfilled(end), self._take)
            finally:
                self._disarm()
                self._pace.end()

    def _take(self, part: memoryview) -> None:
        self._body.filled += len(part)
        self._on_chunk(part)

    def _arm(self) -> None:
        left_s = self._pace.left_s(self._body.filled)
        brisk_s = self._pace.brisk_s(self._body.filled)
        wait_s = brisk_s if left_s is None else min(brisk_s, left_s)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._check)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """See whether the body has come on since the timer was set."""
        self._timer = None
        filled = self._body.filled
        left_s = self._pace.left_s(filled)
        if left_s is not None and left_s <= 0:
            self._straight.fail(self._pace.too_slow(filled))
        elif self._pace.brisk_s(filled):
            self._arm()
        else:
            self._fall_behind(left_s)

    def _fall_behind(self, left_s: float | None) -> None:
        self._arriving.num_arrived = max(self._arriving.num_arrived, self._body.filled)
        self._arriving.slow_down()
        if self._is_all_held:
            self._is_all_held = False
            self._straight.stop()
        elif left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._check)


@dataclass(frozen=True, slots=True)
class ReadBody:
    """A body that was read."""

    view: memoryview
    """All of it."""
    cut: CutBody | None = None
    """The body without its payloads; None if it has none, or none were looked for."""
    is_on_loop: bool = False
    """Whether an event loop parses it, which leaves to a thread what takes longer than it seemed
    to take."""

    @property
    def is_parsed_at_once(self) -> bool:
        """Whether parsing takes less time than a thread takes to be asked for it."""
        cut = self.cut
        if cut is not None and len(cut.rest) <= _INLINE_BYTES and cut.num_chars <= _INLINE_CHARS:
            return True
        return len(self.view) <= _INLINE_BYTES


class RequestTurns(Turns):
    """Few requests that have arrived go on in one iteration of an event loop.

    What is known is answered without another wait: of 64 requests of 0.4 ms that were ready at
    once, timers waited for the sum.
    """

    def __init__(self) -> None:
        super().__init__(_SMALL_REQUESTS)

    async def wait_for(self, num_bytes: int) -> None:
        """Return when a request with a body of so many bytes has its turn."""
        await self.wait(1 if num_bytes <= _INLINE_BYTES else _SMALL_REQUESTS)


class TakesLongError(Exception):
    """A body cannot be parsed as quickly as it seemed."""


def parse_body(body: ReadBody, texts: KnownTexts) -> tuple[ChatCompletionRequest, Conversation]:
    """Parse and check a body, and take its messages apart; linear in the body.

    Media URLs in the conversation are views of `body`; the request refers to it no more.

    Args:
        body: The body.
        texts: Base64 texts that came before.

    Raises:
        InvalidRequestError: See `decode_request` and `parse_messages`.
        TakesLongError: If it is not an event loop's work.
    """
    request = _decode_cut(body, texts)
    if request is None:
        request = _decode(body, body.view)
    if request.prompt_token_ids is None:
        conversation = parse_messages(request.messages)
    else:
        conversation = parse_media_messages(request.messages)
    request.messages = []
    return request, conversation


def _decode_cut(body: ReadBody, texts: KnownTexts) -> ChatCompletionRequest | None:
    """Parse a body without its payloads; None if it has to be parsed as a whole."""
    cut = body.cut
    between = _nothing if body.is_on_loop else yield_to_others
    while cut is not None:
        try:
            request = _decode(body, cut.rest)
        except InvalidRequestError:
            return None  # The message is to be about the client's own body.
        sound = cut.without_unsound(texts, request.cache_salt, between=between)
        if sound is cut:
            return request if cut.restore(request.messages) else None
        cut = sound
    return None


def _decode(body: ReadBody, text: bytes | memoryview) -> ChatCompletionRequest:
    if body.is_on_loop and len(text) > _INLINE_BYTES:
        raise TakesLongError
    return decode_request(text)


def _nothing() -> None:
    pass


async def read_parsed(
    scope: Scope,
    receive: Receive,
    parse: Callable[[ReadBody], _T],
    *,
    max_bytes: int,
    executor: Executor,
    turns: RequestTurns,
    max_stall_s: float | None = None,
    hold: EncodedHold | None = None,
    finder: PayloadFinder | None = None,
) -> _T:
    """Read a body and return what `parse` makes of it, on a thread if it is a large one.

    On the event loop it is parsed, and what follows is begun, when the request has its turn.

    Args:
        scope: The request's.
        receive: The request's.
        parse: Is given the body. May raise `TakesLongError` on the event loop.
        max_bytes: As for `read_body`.
        executor: Runs `parse` for a large body.
        turns: Of the event loop.
        max_stall_s: As for `read_body`.
        hold: As for `read_body`.
        finder: If `parse` wants the body without its payloads: finds them.

    Raises:
        LazyDecodeError: See `read_body`, or what `parse` raises.
    """
    body = await read_body(
        scope,
        receive,
        max_bytes=max_bytes,
        max_stall_s=max_stall_s,
        hold=hold,
        on_chunk=_nothing_of if finder is None else finder.feed,
    )
    if not body:
        raise InvalidRequestError("the body is empty; a JSON object is expected")
    if hold is not None:
        hold.body_bytes = len(body)
    read = ReadBody(body, None if finder is None else finder.cut(body))
    if read.is_parsed_at_once:
        await turns.wait_for(len(body))
        with suppress(TakesLongError):
            return parse(replace(read, is_on_loop=True))
    return await asyncio.get_running_loop().run_in_executor(executor, parse, read)


def _with_payload(num_bytes: int) -> int:
    """Memory for a body of base64 and for what is decoded from it."""
    return num_bytes + num_bytes * 3 // 4
