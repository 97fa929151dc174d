"""Parsing a body without its base64: what is not looked at costs nothing.

A JSON parser looks at every character of a string, 0.5 ms per MB with the interpreter's lock
held. But a data URL's base64 ends at the next quotation mark, and finding that takes a fifth. So
each long payload is replaced by a short word, the rest is parsed, and the words are replaced by
views of what stood there.

What comes out is what parsing the whole gives. `;base64,` can stand in a string only; up to the
next quotation mark, with no backslash between, all belongs to that string, unless it holds
control characters, which no string may. Payloads are looked through for these only when the rest
was parsed, and only if they have not come before. The words are recognized in media URLs alone. If
one of them ended up elsewhere, as in a text that spells a data URL, or if the rest is not valid,
the caller parses the whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from lazydecode.media.known_texts import KnownTexts, TextTag
from lazydecode.renderers.messages import ChatMessage, ContentPart, MediaURL, PlainURL
from lazydecode.server.search import Searchable

_MARKER: Final = b";base64,"
_MAX_MARKERS: Final = 1024
"""A body with more is parsed as a whole: looking at each takes some µs."""
_MIN_PAYLOAD: Final = 4096
"""Shorter ones are not worth it."""
_WORD_BYTES: Final = 24
_PIECE_CHARS: Final = 1024 * 1024
_FIRST_PRINTABLE: Final = 0x20
_URL_FIELDS: Final = ("image_url", "video_url", "audio_url")


class Place(NamedTuple):
    """Where a payload is in a body."""

    start: int
    stop: int
    """Where the quotation mark behind it is."""
    tag: TextTag | None = None
    """Of the payload, if it is worth one and known to be what it seems."""


class CutBody:
    """A body of JSON whose long payloads are words in `rest`.

    Args:
        body: All of it.
        places: Of the payloads, in their order.
    """

    def __init__(self, body: memoryview, places: Sequence[Place]) -> None:
        self._body = body
        # Nobody can write a word beforehand that is chosen now.
        word = os.urandom(_WORD_BYTES // 2 - 4).hex().encode()
        self.payloads: dict[bytes, Place] = {}
        """Word -> where its payload is."""
        pieces: list[bytes] = []
        done = 0
        for place in places:
            name = b"%s%08d" % (word, len(self.payloads))
            self.payloads[name] = place
            pieces += [bytes(body[done : place.start]), name]
            done = place.stop
        pieces.append(bytes(body[done:]))
        self.rest = b"".join(pieces)
        """The body with a word in the place of each payload."""
        self.num_chars = len(body) - len(self.rest)
        """About the length of all payloads."""

    def without_unsound(
        self, texts: KnownTexts, tenant: str | None, *, between: Callable[[], object]
    ) -> CutBody | None:
        """Return this if all payloads are what they seem, else another without the others.

        Up to the next quotation mark all belongs to one string only if no backslash is between,
        nor control characters, which no string may hold. A payload that was decoded before has
        neither.

        Args:
            texts: Texts that came before.
            tenant: Who has sent the body.
            between: Called between pieces of 1 MB.

        Returns:
            None if none is sound.
        """
        sound: list[Place] = []
        for word, place in self.payloads.items():
            if place.tag is None:
                text = self._body[place.start : place.stop]
                tag = texts.tag(text, between=between)
                is_known = tag is not None and texts.holds(tag, tenant)
                if not is_known and not is_plain(text, between=between):
                    continue
                place = self.payloads[word] = place._replace(tag=tag)
            sound.append(place)
        if len(sound) == len(self.payloads):
            return self
        return CutBody(self._body, sound) if sound else None

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
            # The string's beginning stands before the payload as it does before the word.
            start = place.start - (len(raw) - _WORD_BYTES - 1)
            if b"\\" in bytes(raw):
                continue  # before the payload; who parses the whole reads that too
            url = msgspec.Raw(self._body[start : place.stop + 1])
            plain = PlainURL(url=url, detail=media.detail, uuid=media.uuid, tag=place.tag)
            setattr(part, name, plain)
            num_found += 1
        return num_found


def is_plain(text: memoryview, *, between: Callable[[], object] = lambda: None) -> bool:
    """Whether a text holds neither backslashes nor control characters; 0.1 ms per MB.

    Args:
        text: The text.
        between: Called between pieces of 1 MB.
    """
    for begin in range(0, len(text), _PIECE_CHARS):
        if begin:
            between()
        searched = Searchable(text[begin : begin + _PIECE_CHARS])
        if searched.find(b"\\") < searched.num_bytes or searched.least() < _FIRST_PRINTABLE:
            return False
    return True


class PayloadFinder:
    """Finds the payloads of a body while it arrives.

    Each piece is looked at where it lies, at 0.05 ms per MB, when it is in the processor's cache.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._num_markers = 0
        self._tail = b""
        self._start: int | None = None
        """Of the payload that has not ended."""
        self._places: list[Place] = []

    def feed(self, piece: bytes | memoryview) -> None:
        """Look at the next piece of the body, which is not empty.

        Each is searched once for each of two things: a body of nothing but markers costs no
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
        searched = Searchable(piece)
        end = searched.num_bytes
        while self._num_markers <= _MAX_MARKERS:
            if self._start is None:
                found = searched.find(_MARKER, at)
                if found == end:
                    return
                at = found + len(_MARKER)
                self._begin(base + at)
            at = searched.find(b'"', at)
            if at == end:
                return  # the next piece tells
            assert self._start is not None
            if base + at >= self._start + _MIN_PAYLOAD:
                self._places.append(Place(self._start, base + at))
            self._start = None

    def _begin(self, start: int) -> None:
        self._start = start
        self._num_markers += 1

    def cut(self, body: memoryview) -> CutBody | None:
        """Return the body, all of which was fed, without its payloads; None if it has none that
        are worth it, or too many markers.

        Whether they are payloads is to be seen: `CutBody.without_unsound`.
        """
        if not self._places or self._num_markers > _MAX_MARKERS:
            return None
        return CutBody(body, self._places)


def cut_payloads(body: memoryview) -> CutBody | None:
    """Return a whole body without its payloads; None if it has none that are worth it."""
    finder = PayloadFinder()
    finder.feed(body)
    return finder.cut(body)
