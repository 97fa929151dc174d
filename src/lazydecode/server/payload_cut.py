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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from lazydecode.renderers.messages import ChatMessage, ContentPart, MediaURL

_MARKER: Final = b";base64,"
_WINDOW: Final = 64 * 1024
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
            media.url = msgspec.Raw(self.body[start : stop + 1])
            num_found += 1
        return num_found


def cut_payloads(body: memoryview) -> CutBody | None:
    """Return the body without its payloads; None if it has none that are worth it.

    Linear in the body, some 0.3 ms per MB, whatever stands in it.
    """
    # Nobody can write a word beforehand that is chosen now.
    word = os.urandom(_WORD_BYTES // 2 - 4).hex().encode()
    payloads: dict[bytes, tuple[int, int]] = {}
    pieces: list[bytes] = []
    done = 0
    for start, stop in _find_payloads(body):
        if _has_control_character(body[start:stop]):
            continue
        name = b"%s%08d" % (word, len(payloads))
        payloads[name] = (start, stop)
        pieces += [bytes(body[done:start]), name]
        done = stop
    if not payloads:
        return None
    pieces.append(bytes(body[done:]))
    return CutBody(b"".join(pieces), body, payloads)


def _find_payloads(body: memoryview) -> Iterator[tuple[int, int]]:
    """Yield where long payloads without an escape start, and the quotation marks behind them.

    Small copies stay in the processor's cache. Each is made once, and searched once for each of
    the three things: a body of nothing but markers costs no more than another one.
    """
    start: int | None = None  # of the payload that has not ended
    for begin in range(0, len(body), _WINDOW):
        window = bytes(body[begin : begin + _WINDOW + len(_MARKER) - 1])
        at = 0 if start is None else max(0, start - begin)
        quote = escape = -1
        while True:
            if start is None:
                found = window.find(_MARKER, at)
                if found < 0:
                    break
                at = found + len(_MARKER)
                start = begin + at
            quote = quote if quote >= at else _find(window, b'"', at)
            escape = escape if escape >= at else _find(window, b"\\", at)
            at = min(quote, escape)
            if at >= _WINDOW:
                break  # the next window tells
            if quote < escape and begin + quote >= start + _MIN_PAYLOAD:
                yield start, begin + quote
            start = None


def _has_control_character(payload: memoryview) -> bool:
    """Whether one is in it that JSON does not allow in a string: the parser is to say so."""
    return int(np.frombuffer(payload, np.uint8).min()) < _FIRST_PRINTABLE


def _find(window: bytes, what: bytes, start: int) -> int:
    """Return where `what` stands from `start` on; beyond the window if nowhere."""
    at = window.find(what, start)
    return at if at >= 0 else _WINDOW + len(window)
