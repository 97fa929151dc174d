"""Payloads that an event loop identifies itself, as a thread would take longer to be asked.

A thread that wakes up with cold caches costs half a millisecond, as much as 1 MB of digest. So what
came with a request and is not long is decoded from base64 and digested here; what is longer, in
slices. However many come, the loop does little of it in one iteration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import pybase64

from lazydecode.errors import LazyDecodeError
from lazydecode.media.base import MediaIO, MediaRef, PayloadDigest
from lazydecode.media.data_urls import DataURL, parse_data_url, upper_bound
from lazydecode.media.fetch_trace import current_trace, fill_trace
from lazydecode.media.identity import DigestInSlices
from lazydecode.media.jpeg_sequence import is_jpeg_sequence
from lazydecode.media.known_texts import MIN_CHARS, KnownTexts, TextLook
from lazydecode.media.payloads import MediaURL, check_size, refs_from_bytes, refs_from_data
from lazydecode.turns import Turns

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Run(Protocol):
    """Runs a function on a thread."""

    async def __call__(
        self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return what `function(*args, **kwargs)` returns."""
        ...


QUICK_CHARS: Final = 1536 * 1024
"""Text of payloads that is decoded and digested in one iteration: in a millisecond at most."""
SLICED_CHARS: Final = 4 * QUICK_CHARS
"""Text of a payload up to which its digest is made in slices. A thread's share is small beyond."""
LOOK_CHARS: Final = 64 * 1024
"""Text that takes as long as a look at a known file."""
_TAG_SHARE: Final = 4
"""A text is looked for among known ones in a fourth of the time that it takes to decode it."""
_ITEM_CHARS: Final = 16 * 1024
"""Text that takes as long as the rest of what is done for a payload."""
_PATIENT_CHARS: Final = 64 * 1024
"""Text up to which a payload waits for its turn; asking a thread takes as long."""
_SLICE_BYTES: Final = QUICK_CHARS // 4 * 3


class QuickTurns(Turns):
    """Which payloads one event loop identifies itself: however many come, few per iteration."""

    def __init__(self) -> None:
        super().__init__(QUICK_CHARS)
        self.num_running = 0
        """Payloads that are being identified, by the loop or by threads."""

    def allow_now(self, url: MediaURL | DataURL) -> bool:
        """Whether it is the loop's work now; a payload of several slices only if it comes alone."""
        length = _num_chars(url)
        limit = QUICK_CHARS if self.num_running else SLICED_CHARS
        return length <= limit and self.take(length + _ITEM_CHARS)

    async def allow_soon(self, url: MediaURL | DataURL) -> bool:
        """Whether it is the loop's work soon, as a thread takes longer to be asked."""
        length = _num_chars(url)
        if length > _PATIENT_CHARS:
            return False
        await self.wait(length + _ITEM_CHARS)
        return True


async def refs_at_hand(
    url: MediaURL | DataURL,
    media_ios: Sequence[MediaIO[Any]],
    max_bytes: int,
    *,
    texts: KnownTexts,
    turns: QuickTurns,
    run: Run,
) -> list[MediaRef[Any]]:
    """Return what `refs_from_data` does for what came with a request.

    Args:
        url: The URL, or its parts.
        media_ios: The decoders.
        max_bytes: The strictest of all caps; checked before anything is decoded.
        texts: Texts that came before.
        turns: Of the event loop.
        run: Has a thread do what takes too long here.

    Raises:
        InvalidRequestError: If the URL is malformed, or a decoder refuses its size.
        UnprocessableMediaError: If the payload is empty or too large, or its base64 is wrong.
    """
    trace = current_trace()
    tenant, tag = (trace.tenant, trace.tag_of(url)) if trace else (None, None)
    if tag is not None:
        url = _parsed(url)
        if tag.num_chars != len(url.payload):
            tag = None  # the payload is not what it seemed to be
    look: TextLook | None = None
    length = _num_chars(url)
    if texts.are_kept and length >= MIN_CHARS and (tag is not None or length <= SLICED_CHARS):
        start = time.perf_counter()
        if tag is None:
            await turns.wait(length // _TAG_SHARE)
        url = _parsed(url)
        look = texts.look(url, media_ios, tenant, tag=tag)
        if look is not None and _fits(url, media_ios, max_bytes):
            known = look.find()
            if known is not None:
                fill_trace(trace, "data", known[0].num_bytes, start, time.perf_counter())
                return known
        if tag is None:
            await asyncio.sleep(0)  # what follows is another iteration's work
    data: bytes | None = None
    is_allowed = turns.allow_now(url)
    turns.num_running += 1
    try:
        if is_allowed or await turns.allow_soon(url):
            start = time.perf_counter()
            data = _decode_plain(url, media_ios, max_bytes)
        if data is None:
            return await run(refs_from_data, url, media_ios, max_bytes, trace, texts, look)
        fetched = time.perf_counter()
        makers = [media_io.ref_at_once(data) for media_io in media_ios]
        if None in makers:  # a header that may take long to read
            refs = await run(refs_from_bytes, data, media_ios, look)
        else:
            is_short = len(data) <= _SLICE_BYTES
            digest = PayloadDigest(data) if is_short else await _digest_in_turns(data, turns)
            refs = [make(digest) for make in makers if make is not None]
            if look is not None:
                look.learn(digest, refs)
    finally:
        turns.num_running -= 1
    fill_trace(trace, "data", len(data), start, fetched)
    return refs


def _decode_plain(
    url: MediaURL | DataURL, media_ios: Sequence[MediaIO[Any]], max_bytes: int
) -> bytes | None:
    """Return the payload of a `data:` URL in the plain form of base64; None if that it is not.

    None also if it is too large, empty or wrong: whoever reads other forms says so.
    """
    parsed = _parsed(url)
    if not parsed.is_base64 or is_jpeg_sequence(parsed.media_type):
        return None
    if not _fits(parsed, media_ios, max_bytes):
        return None
    try:
        return pybase64.b64decode(parsed.payload, validate=True) or None
    except ValueError:
        return None


def _fits(url: DataURL, media_ios: Sequence[MediaIO[Any]], max_bytes: int) -> bool:
    """Whether a payload is not too large, judging by the length of its text."""
    try:
        check_size(upper_bound(url), media_ios, max_bytes)
    except LazyDecodeError:
        return False
    return True


async def _digest_in_turns(data: bytes, turns: QuickTurns) -> PayloadDigest:
    """Return the digest of a payload, made in slices: others have their turns between."""
    slices = DigestInSlices(data)
    while True:
        await turns.wait(QUICK_CHARS)
        if (digest := slices.take(_SLICE_BYTES)) is not None:
            return digest


def _parsed(url: MediaURL | DataURL) -> DataURL:
    return url if isinstance(url, DataURL) else parse_data_url(url)


def _num_chars(url: MediaURL | DataURL) -> int:
    return len(url.payload) if isinstance(url, DataURL) else len(url)
