"""`data:` URLs (RFC 2397): parsing without a copy of the payload, and strict decoding.

Accepted beside the plain form: any case of `data:` and `base64`, parameters, no media type,
white space and line breaks, percent-encoding, the URL-safe alphabet (then also without padding)
if the text does not mix it with the standard one. Everything else is an error.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

import pybase64

from lazydecode.errors import BlockedURLError, CorruptMediaError

_MAX_HEADER: Final = 1024
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9!#$&^_.+-]+/[a-z0-9!#$&^_.+*-]+")
_DEFAULT_MEDIA_TYPE: Final = "text/plain"
_LINE_BREAKS: Final = b"\t\r\n\f"
_WHITE_SPACE: Final = b" \t\r\n\f"
_MEASURED_CHARS: Final = 1024 * 1024
_BAD_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_TO_STANDARD: Final = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, slots=True)
class DataURL:
    """A `data:` URL, split; the payload is still encoded and is not copied."""

    media_type: str
    """Lower case, without parameters."""
    is_base64: bool
    payload: memoryview

    def __repr__(self) -> str:
        return f"<DataURL {self.media_type}, {len(self.payload)} characters>"


def parse_data_url(url: str | bytes | memoryview) -> DataURL:
    """Split a `data:` URL; costs one copy for `str`, none for bytes.

    Raises:
        BlockedURLError: If it is not a well-formed data URL.
    """
    if isinstance(url, str):
        try:
            url = url.encode("ascii")
        except UnicodeEncodeError as exc:
            raise BlockedURLError("The data URL contains characters beyond ASCII.") from exc
    view = memoryview(url)
    head = bytes(view[: 5 + _MAX_HEADER])
    header, comma, _ = head.partition(b",")
    if not comma:
        raise BlockedURLError("The data URL is missing ',' separator before its data.")
    media_type, is_base64 = _parse_header(header[5:])
    return DataURL(media_type, is_base64, view[len(header) + 1 :])


@functools.lru_cache(maxsize=64)
def _parse_header(header: bytes) -> tuple[str, bool]:
    """Return the media type between `data:` and the comma, and whether base64 follows it."""
    media_type, *parameters = (part.strip().lower() for part in header.decode("latin-1").split(";"))
    if media_type and not _MEDIA_TYPE.fullmatch(media_type):
        raise BlockedURLError("The data URL has a malformed media type.")
    is_base64 = bool(parameters) and parameters[-1] == "base64"
    if "base64" in parameters[:-1]:
        raise BlockedURLError("The data URL has its base64 marker before other parameters.")
    return media_type or _DEFAULT_MEDIA_TYPE, is_base64


def upper_bound(url: DataURL) -> int:
    """Return what the payload decodes to at most, in bytes, judging by its length alone."""
    num_chars = len(url.payload)
    return (num_chars + 3) // 4 * 3 if url.is_base64 else num_chars


def measure(url: DataURL) -> int:
    """Return how many bytes a well-formed payload decodes to, without decoding or copying it.

    Exact for the plain form; at most two bytes too high if the padding is written in an odd way.
    """
    white_space = _WHITE_SPACE if url.is_base64 else _LINE_BREAKS
    num_chars = 0
    for start in range(0, len(url.payload), _MEASURED_CHARS):
        piece = bytes(url.payload[start : start + _MEASURED_CHARS])
        num_chars += len(piece.translate(None, white_space)) - 2 * piece.count(b"%")
    if not url.is_base64:
        return num_chars
    padding = bytes(url.payload[-2:]).count(b"=")
    return max(0, (num_chars + 3) // 4 * 3 - padding)


def decode_data_url(url: DataURL) -> bytes:
    """Return the payload's bytes; linear in the payload.

    Raises:
        CorruptMediaError: If the payload is empty, or not encoded as the URL says.
    """
    if url.is_base64:
        try:
            # The plain form in one pass over the request's own buffer.
            data = pybase64.b64decode(url.payload, validate=True)
        except ValueError:
            data = _decode_unusual_base64(normalize_text(url))
    else:
        data = normalize_text(url)
    if not data:
        raise CorruptMediaError("The data URL has no data.")
    return data


def normalize_text(url: DataURL) -> bytes:
    """Return the payload without percent-encoding, line breaks, and (in base64) white space.

    Raises:
        CorruptMediaError: If an escape is malformed, or it is not ASCII.
    """
    text = bytes(url.payload)
    if not text.isascii():
        raise CorruptMediaError("The data URL contains characters beyond ASCII.")
    text = text.translate(None, _LINE_BREAKS)
    if b"%" in text:
        if _BAD_ESCAPE.search(text):
            raise CorruptMediaError("The data URL is percent-encoded wrongly.")
        text = unquote_to_bytes(text)
    return text.translate(None, _WHITE_SPACE) if url.is_base64 else text


def _decode_unusual_base64(text: bytes) -> bytes:
    if b"-" in text or b"_" in text:
        if b"+" in text or b"/" in text:
            raise CorruptMediaError("The data mixes two base64 alphabets.")
        text = text.translate(_TO_STANDARD)
        if b"=" not in text:
            text += b"=" * (-len(text) % 4)
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as exc:
        raise CorruptMediaError("The data is not valid base64.") from exc
