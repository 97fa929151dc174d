"""Parsing a body without its base64: what is not looked at costs nothing.

A JSON parser looks at every character of a string, 0.5 ms per MB with the interpreter's lock
held. But a data URL's base64 ends at the next quotation mark, and finding that takes a fifth. So
each long payload is replaced by a short word, the rest is parsed, and the words are replaced by
views of what stood there.

What comes out is what parsing the whole gives. `;base64,` can stand in a string only; up to the
next quotation mark, with no backslash between, all belongs to that string, unless it holds
control characters, which no string may. The words are recognized in media URLs alone. If one of
them ended up elsewhere, as in a text that spells a data URL, or if the rest is not valid, the
caller parses the whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from lazydecode.renderers.messages import ChatMessage, ContentPart, MediaURL, PlainURL
from lazydecode.server.search import Searchable

_MARKER: Final = b";base64,"
_WINDOW: Final = 64 * 1024
_MAX_MARKERS: Final = 1024
"""A body with more is parsed as a whole: looking at each takes some µs."""
_MIN_PAYLOAD: Final = 4096
"""Shorter ones are not worth it."""
_WORD_BYTES: Final = 24
_FIRST_PRINTABLE: Final = 0x20
_URL_FIELDS: Final = ("image_url", "video_url", "audio_url")


@dataclass(frozen=True, slots=True)
class CutBody:
    """A body of JSON whose long payloads are words."""

    rest: bytes
    """The body with a word in the place of each payload."""
    body: memoryview
    payloads: dict[bytes, tuple[int, int]]
    """Word -> where the payload begins in the body, and where the quotation mark behind it is."""

    def restore(self, messages: Sequence[ChatMessage]) -> bool:
        """Put views of the body in the place of the words; False if one of them is missing."""
        num_found = 0
        for message in messages:
            if isinstance(message.content, list):
                for part in message.content:
                    num_found += self._restore_part(part)
        return num_found == len(self.payloads)

    def _restore_part(self, part: ContentPart) -> int:
        num_found = 0
        for name in _URL_FIELDS:
            media = getattr(part, name)
            if not isinstance(media, MediaURL):
                continue
            raw = memoryview(media.url)
            word = bytes(raw[-_WORD_BYTES - 1 : -1])
            place = self.payloads.get(word)
            if place is None:
                continue
            start, stop = place
            # The string's beginning stands before the payload as it does before the word.
            start -= len(raw) - _WORD_BYTES - 1
            kind = MediaURL if b"\\" in bytes(raw) else PlainURL
            url = msgspec.Raw(self.body[start : stop + 1])
            setattr(part, name, kind(url=url, detail=media.detail, uuid=media.uuid))
            num_found += 1
        return num_found


class PayloadFinder:
    """Finds the payloads of a body while it arrives.

    Each piece is looked at where it lies, at 0.1 ms per MB, when it is in the processor's cache.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_markers = 0
        self._tail = b""
        self._start: int | None = None
        """Of the payload that has not ended."""
        self._is_sound = True
        """Whether that one had no control characters so far."""
        self._payloads: list[tuple[int, int]] = []

    def feed(self, piece: bytes | memoryview) -> None:
        """Look at the next piece of the body, which is not empty.

        Each is searched once for each of three things: a body of nothing but markers costs no
        more than another one, and is given up soon.
        """
        base = self._num_bytes
        self._num_bytes += len(piece)
        if self._num_markers > _MAX_MARKERS:
            return
        at = 0
        if self._start is None:
            head = self._tail + bytes(piece[: len(_MARKER) - 1])
            found = head.find(_MARKER)
            if found >= 0:
                at = found + len(_MARKER) - len(self._tail)
                self._begin(base + at)
        self._tail = (self._tail + bytes(piece[1 - len(_MARKER) :]))[1 - len(_MARKER) :]
        quote = escape = -1
        searched = Searchable(piece)
        end = searched.num_bytes
        while self._num_markers <= _MAX_MARKERS:
            if self._start is None:
                found = searched.find(_MARKER, at)
                if found == end:
                    return
                at = found + len(_MARKER)
                self._begin(base + at)
            quote = quote if quote >= at else searched.find(b'"', at)
            escape = escape if escape >= at else searched.find(b"\\", at)
            stop = min(quote, escape)
            if self._is_sound and stop > at:
                # No string may hold control characters: the parser is to say so.
                self._is_sound = searched.least(at, stop) >= _FIRST_PRINTABLE
            if stop == end:
                return  # the next piece tells
            assert self._start is not None
            is_long = base + quote >= self._start + _MIN_PAYLOAD
            if quote < escape and is_long and self._is_sound:
                self._payloads.append((self._start, base + quote))
            self._start = None
            at = stop

    def _begin(self, start: int) -> None:
        self._start = start
        self._is_sound = True
        self._num_markers += 1

    def cut(self, body: memoryview) -> CutBody | None:
        """Return the body, all of which was fed, without its payloads; None if it has none that
        are worth it, or too many markers.
        """
        if not self._payloads or self._num_markers > _MAX_MARKERS:
            return None
        # Nobody can write a word beforehand that is chosen now.
        word = os.urandom(_WORD_BYTES // 2 - 4).hex().encode()
        payloads: dict[bytes, tuple[int, int]] = {}
        pieces: list[bytes] = []
        done = 0
        for start, stop in self._payloads:
            name = b"%s%08d" % (word, len(payloads))
            payloads[name] = (start, stop)
            pieces += [bytes(body[done:start]), name]
            done = stop
        pieces.append(bytes(body[done:]))
        return CutBody(b"".join(pieces), body, payloads)


def cut_payloads(body: memoryview) -> CutBody | None:
    """Return a whole body without its payloads; None if it has none that are worth it."""
    finder = PayloadFinder()
    for begin in range(0, len(body), _WINDOW):
        # Three searches of a part that stays in the processor's cache.
        finder.feed(body[begin : begin + _WINDOW])
    return finder.cut(body)
