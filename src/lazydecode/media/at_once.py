"""Payloads that an event loop identifies itself, as a thread would take longer to be asked.

A thread that wakes up with cold caches costs half a millisecond, as much as 1 MB of digest. So what
came with a request and is not long is decoded from base64 and digested here; what is longer, in
slices. However many come, the loop does little of it in one iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pybase64

from lazydecode.errors import LazyDecodeError
from lazydecode.media.base import MediaIO, PayloadDigest, RefMaker
from lazydecode.media.data_urls import DataURL, parse_data_url, upper_bound
from lazydecode.media.identity import DigestInSlices
from lazydecode.media.jpeg_sequence import is_jpeg_sequence
from lazydecode.media.payloads import MediaURL, check_size
from lazydecode.turns import Turns

QUICK_CHARS: Final = 1536 * 1024
"""Text of payloads that is decoded and digested in one iteration: in a millisecond at most."""
SLICED_CHARS: Final = 4 * QUICK_CHARS
"""Text of a payload up to which its digest is made in slices. A thread's share is small beyond."""
LOOK_CHARS: Final = 64 * 1024
"""Text that takes as long as a look at a known file."""
_ITEM_CHARS: Final = 16 * 1024
"""Text that takes as long as the rest of what is done for a payload."""
_PATIENT_CHARS: Final = 64 * 1024
"""Text up to which a payload waits for its turn; asking a thread takes as long."""
_SLICE_BYTES: Final = QUICK_CHARS // 4 * 3


class QuickTurns(Turns):
    """Which payloads one event loop identifies itself: however many come, few per iteration."""

    def __init__(self) -> None:
        super().__init__(QUICK_CHARS)

    def allow_now(self, url: MediaURL | DataURL) -> bool:
        """Whether it is the loop's work now. A payload of several slices is if it comes alone."""
        length = _num_chars(url)
        return length <= SLICED_CHARS and self.take(length + _ITEM_CHARS)

    async def allow_soon(self, url: MediaURL | DataURL) -> bool:
        """Whether it is the loop's work soon, as a thread takes longer to be asked."""
        length = _num_chars(url)
        if length > _PATIENT_CHARS:
            return False
        await self.wait(length + _ITEM_CHARS)
        return True


def decode_at_once(
    url: MediaURL | DataURL, media_ios: Sequence[MediaIO[Any]], max_bytes: int
) -> bytes | None:
    """Return the payload of a `data:` URL in the plain form of base64.

    None: it is unusual, too large, or wrong, and `refs_from_data` has to see to it.

    Args:
        url: The URL, or its parts.
        media_ios: The decoders.
        max_bytes: The strictest of all caps.

    Raises:
        LazyDecodeError: If it is no well-formed `data:` URL.
    """
    parsed = url if isinstance(url, DataURL) else parse_data_url(url)
    if not parsed.is_base64 or is_jpeg_sequence(parsed.media_type):
        return None
    try:
        check_size(upper_bound(parsed), media_ios, max_bytes)
        return pybase64.b64decode(parsed.payload, validate=True) or None
    except (LazyDecodeError, ValueError):
        return None


def makers_at_once(data: bytes, media_ios: Sequence[MediaIO[Any]]) -> list[RefMaker[Any]] | None:
    """Return what makes each decoder's ref of the payload's digest, its header having been read.

    None: a header may take long to read, and a thread has to do it.

    Raises:
        LazyDecodeError: If a decoder refuses the payload.
    """
    makers = []
    for media_io in media_ios:
        if (make := media_io.ref_at_once(data)) is None:
            return None
        makers.append(make)
    return makers


async def digest_in_turns(data: bytes, turns: QuickTurns) -> PayloadDigest:
    """Return the digest of a payload, made in slices: others have their turns between."""
    slices = DigestInSlices(data)
    while True:
        await turns.wait(QUICK_CHARS)
        if (digest := slices.take(_SLICE_BYTES)) is not None:
            return digest


def is_one_slice(data: bytes) -> bool:
    """Whether a payload is digested within the iteration in which it was decoded."""
    return len(data) <= _SLICE_BYTES


def _num_chars(url: MediaURL | DataURL) -> int:
    return len(url.payload) if isinstance(url, DataURL) else len(url)
