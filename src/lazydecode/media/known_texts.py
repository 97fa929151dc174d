"""Base64 text that was decoded before: found by a tag that takes a quarter of its digest's time.

A tag says that a text is the same as one before, in this process, and nothing else: identity
stays the digest of the decoded bytes. A known text is then neither decoded nor digested; should
somebody need the bytes after all, they are decoded, and used only if their digest is the
remembered one (`LazyPayload`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lazydecode.media.base import MediaIO, MediaRef, PayloadDigest
from lazydecode.media.data_urls import DataURL, decode_data_url
from lazydecode.media.jpeg_sequence import is_jpeg_sequence
from lazydecode.media.known_payloads import KnownPayloads

MIN_CHARS: Final = 1024 * 1024
"""Of shorter texts a hit gains 0.1 to 0.2 ms, and the first sight costs twice as much."""
MAX_TEXTS: Final = 4096
"""Mostly more than a cache of processed items holds, from payloads of this size: what has left it
has to be decoded anyway."""
_PIECE_CHARS: Final = 1024 * 1024
_NONCE: Final = bytes(12)


def yield_to_others() -> None:
    """Let other threads run: tags are made with the interpreter's lock held, 0.15 ms a piece."""
    time.sleep(0)


class TextTag(NamedTuple):
    """Stands for one text, in this process and to nobody else."""

    num_chars: int
    code: bytes


class KnownTexts:
    """Finds what texts are by what they were when they came before. Threads share it.

    The tag is GMAC (NIST SP 800-38D) under a key that is drawn here and that nobody sees, as
    nobody sees a tag; so the nonce may be the same for all. Whoever chose them, two texts of n
    blocks of 16 bytes have one tag with a probability of at most (n + 1) / 2^128 (McGrew and
    Viega, "The Security and Performance of the Galois/Counter Mode", 2004, lemma 2).

    Args:
        max_entries: Texts that are remembered, about 1 KB each; 0: none.
    """

    def __init__(self, max_entries: int) -> None:
        self._known = KnownPayloads(max_entries)
        self._cipher = AESGCM(AESGCM.generate_key(256))

    @property
    def are_kept(self) -> bool:
        """Whether any texts are remembered."""
        return self._known.capacity > 0

    def tag(
        self, text: memoryview, *, between: Callable[[], object] = lambda: None
    ) -> TextTag | None:
        """Return the tag of a text, in 0.15 ms per MB; None if it is too short to be worth it.

        Args:
            text: The base64 of a payload, as it was written.
            between: Called between pieces of 1 MB.
        """
        if not self.are_kept or len(text) < MIN_CHARS:
            return None
        tags = []
        for begin in range(0, len(text), _PIECE_CHARS):
            if begin:
                between()
            tags.append(self._tag(text[begin : begin + _PIECE_CHARS]))
        return TextTag(len(text), tags[0] if len(tags) == 1 else self._tag(b"".join(tags)))

    def _tag(self, data: bytes | memoryview) -> bytes:
        return self._cipher.encrypt(_NONCE, b"", data)

    def holds(self, tag: TextTag, tenant: str | None) -> bool:
        """Whether a text was decoded before, and is all of the standard or the URL-safe alphabet.

        Args:
            tag: Of the text.
            tenant: Who sent it: nobody can tell from the time it takes what others have sent.
        """
        return (tenant, tag) in self._known

    def look(
        self,
        url: DataURL,
        media_ios: Sequence[MediaIO[Any]],
        tenant: str | None,
        *,
        tag: TextTag | None = None,
        between: Callable[[], object] = lambda: None,
    ) -> TextLook | None:
        """Return a look for a text; None if it is not worth it, or not to be remembered.

        Args:
            url: The text.
            media_ios: The decoders.
            tenant: Who sent it: nobody can tell from the time it takes what others have sent.
            tag: Of the text, if it was made.
            between: Called between pieces of 1 MB of which the tag is made.
        """
        if not url.is_base64 or is_jpeg_sequence(url.media_type):
            return None
        if any(media_io.identity_scope() is None for media_io in media_ios):
            return None
        if tag is None:
            tag = self.tag(url.payload, between=between)
        return None if tag is None else TextLook(self._known, url, media_ios, (tenant, tag))


@dataclass(frozen=True, slots=True)
class TextLook:
    """One text among those that are known, or to be."""

    known: KnownPayloads
    url: DataURL
    media_ios: Sequence[MediaIO[Any]]
    source: tuple[str | None, TextTag]

    def find(self) -> list[MediaRef[Any]] | None:
        """Return a ref for each decoder over a payload that is not decoded from its text until
        it is needed; None if it is new.
        """
        decode, num_chars = partial(_decode, self.url), len(self.url.payload)
        return self.known.find(self.source, self.media_ios, decode, unread_bytes=num_chars)

    def learn(self, digest: PayloadDigest, refs: Sequence[MediaRef[Any]]) -> None:
        """Remember what the text was, as `KnownPayloads.learn`.

        Not if it has not a character for each six bits, padding included: `KnownTexts.holds`
        says that there is no white space in it.
        """
        text = self.url.payload
        padding = bytes(text[-2:]).count(b"=")
        if digest.num_bytes == -(-len(text) // 4) * 3 - padding:
            self.known.learn(self.source, digest, self.media_ios, refs)


def _decode(url: DataURL) -> tuple[bytes, PayloadDigest]:
    data = decode_data_url(url)
    return data, PayloadDigest(data)
