"""From the payload of one URL to a ref for each decoder that wants it.

A payload is read, counted, decoded from base64 and digested once, however many decoders there
are: a video and the sound in it are two refs over the same bytes. All of this is linear in the
payload, and made for media threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from lazydecode.errors import BlockedURLError, LazyDecodeError, MediaTooLargeError
from lazydecode.limits import FetchLimits
from lazydecode.media.base import MediaIO, MediaRef, PayloadDigest
from lazydecode.media.data_urls import (
    DataURL,
    decode_data_url,
    measure,
    normalize_text,
    parse_data_url,
    upper_bound,
)
from lazydecode.media.fetch_trace import FetchTrace, fill_trace
from lazydecode.media.jpeg_sequence import is_jpeg_sequence
from lazydecode.media.known_payloads import KnownPayloads
from lazydecode.media.known_texts import KnownTexts, TextLook, yield_to_others
from lazydecode.media.local_files import LocalFiles
from lazydecode.media.urls import FileURL, parse_url

MediaURL: TypeAlias = str | bytes | memoryview
"""A URL; as bytes or a view it saves a copy of a `data:` URL's text. What is viewed stays as it is
until the ref is released: a text that came before is decoded late, or not at all."""


@dataclass(frozen=True, slots=True)
class MediaPayload:
    """The encoded bytes that a URL leads to, digested once for all decoders."""

    data: bytes
    digest: PayloadDigest

    def __repr__(self) -> str:
        return f"<MediaPayload, {len(self.data)} bytes>"


def strictest_max_bytes(limits: FetchLimits, media_ios: Sequence[MediaIO[Any]]) -> int:
    """Return the smallest of the caps that the connector and the decoders have."""
    strictest = limits.max_bytes
    for media_io in media_ios:
        if (cap := media_io.get_max_bytes()) is not None and cap < strictest:
            strictest = cap
    return strictest


def build_refs(payload: MediaPayload, media_ios: Sequence[MediaIO[Any]]) -> list[MediaRef[Any]]:
    """Return a ref for each decoder, all over the same bytes and digest."""
    return [media_io.load_bytes_ref(payload.data, digest=payload.digest) for media_io in media_ios]


def refs_from_data(
    url: MediaURL | DataURL,
    media_ios: Sequence[MediaIO[Any]],
    max_bytes: int,
    trace: FetchTrace | None,
    texts: KnownTexts,
    look: TextLook | None = None,
) -> list[MediaRef[Any]]:
    """Return a ref for each decoder over what a `data:` URL holds.

    Args:
        url: The URL, or its parts.
        media_ios: The decoders.
        max_bytes: The strictest of all caps; checked before anything is decoded.
        trace: Is told of sizes and times.
        texts: Texts that came before.
        look: In which this one was not found; None: nobody has looked.

    Raises:
        InvalidRequestError: If the URL is malformed, or a decoder refuses its size.
        UnprocessableMediaError: If the payload is empty or too large, or its base64 is wrong.
    """
    start = time.perf_counter()
    parsed = url if isinstance(url, DataURL) else parse_data_url(url)
    most = upper_bound(parsed)
    try:
        check_size(most, media_ios, max_bytes)
    except LazyDecodeError:
        # White space and escapes may make up the difference, but not most of a text.
        if most > 4 * max_bytes:
            raise
        check_size(measure(parsed), media_ios, max_bytes)
    if parsed.is_base64 and is_jpeg_sequence(parsed.media_type):
        # A list with commas, which the decoder takes apart itself.
        text = normalize_text(parsed).decode("ascii")
        return [media_io.load_base64_ref(parsed.media_type, text) for media_io in media_ios]
    if look is None:
        tenant = trace.tenant if trace else None
        look = texts.look(parsed, media_ios, tenant, between=yield_to_others)
        if look is not None and (known := look.find()) is not None:
            fill_trace(trace, "data", known[0].num_bytes, start, time.perf_counter())
            return known
    data = decode_data_url(parsed)
    fetched = time.perf_counter()
    refs = refs_from_bytes(data, media_ios, look)
    fill_trace(trace, "data", len(data), start, fetched)
    return refs


def refs_from_bytes(
    data: bytes, media_ios: Sequence[MediaIO[Any]], look: TextLook | None
) -> list[MediaRef[Any]]:
    """Return a ref for each decoder over what was decoded from a text.

    Args:
        data: The payload.
        media_ios: The decoders.
        look: In which the text was not found, and is from now on.
    """
    digest = PayloadDigest(data)
    refs = build_refs(MediaPayload(data, digest), media_ios)
    if look is not None:
        look.learn(digest, refs)
    return refs


def refs_from_file(
    local_files: LocalFiles | None,
    known: KnownPayloads,
    url: str,
    media_ios: Sequence[MediaIO[Any]],
    max_bytes: int,
    trace: FetchTrace | None,
) -> list[MediaRef[Any]]:
    """Return a ref for each decoder over a local file, which is read once.

    A file that is unchanged since it was last read is only opened: its refs read it when they
    are decoded.

    Args:
        local_files: The allowed folder; None: there is none.
        known: Files that were read before.
        url: A `file:` URL.
        media_ios: The decoders.
        max_bytes: The strictest of all caps; checked before the file is read.
        trace: Is told of sizes and times.

    Raises:
        InvalidRequestError: If the file is not allowed, or a decoder refuses its size.
        UnprocessableMediaError: If it is empty or too large.
    """
    start = time.perf_counter()
    if local_files is None:
        raise BlockedURLError(
            "Cannot load local files: no folder of local media is allowed "
            "(--allowed-local-media-path)."
        )
    parsed = parse_url(url)
    assert isinstance(parsed, FileURL)
    with local_files.open(parsed) as file:
        check_size(file.state.num_bytes, media_ios, max_bytes)
        read_again = partial(_read_file, local_files, parsed, media_ios, max_bytes)
        refs = known.find(file.state, media_ios, read_again)
        if refs is not None:
            fill_trace(trace, "file", refs[0].num_bytes, start, time.perf_counter())
            return refs
        data = file.read()
        fetched = time.perf_counter()
        digest = PayloadDigest(data)
        refs = build_refs(MediaPayload(data, digest), media_ios)
        if file.is_settled():
            known.learn(file.state, digest, media_ios, refs)
    fill_trace(trace, "file", len(data), start, fetched)
    return refs


def known_refs_from_file(
    local_files: LocalFiles,
    known: KnownPayloads,
    url: str,
    media_ios: Sequence[MediaIO[Any]],
    max_bytes: int,
    trace: FetchTrace | None,
) -> list[MediaRef[Any]] | None:
    """Return what `refs_from_file` does, if the file is known and that is seen without waiting.

    For an event loop. None: it is not, or wrong, and `refs_from_file` has to see to it.

    Raises:
        InvalidRequestError: If the URL is malformed.
    """
    start = time.perf_counter()
    parsed = parse_url(url)
    assert isinstance(parsed, FileURL)
    state = local_files.look(parsed)
    if state is None:
        return None
    read_again = partial(_read_file, local_files, parsed, media_ios, max_bytes)
    refs = known.find(state, media_ios, read_again)
    if refs is None:
        return None
    check_size(state.num_bytes, media_ios, max_bytes)
    fill_trace(trace, "file", state.num_bytes, start, time.perf_counter())
    return refs


def _read_file(
    local_files: LocalFiles, url: FileURL, media_ios: Sequence[MediaIO[Any]], max_bytes: int
) -> tuple[bytes, PayloadDigest]:
    data = local_files.read(url, partial(check_size, media_ios=media_ios, max_bytes=max_bytes))
    return data, PayloadDigest(data)


def check_size(num_bytes: int, media_ios: Sequence[MediaIO[Any]], max_bytes: int) -> None:
    """Refuse a payload of so many bytes, if it is too large.

    Raises:
        InvalidRequestError: If a decoder refuses it.
        MediaTooLargeError: If it has more than `max_bytes`.
    """
    for media_io in media_ios:
        media_io.check_size(num_bytes)
    if num_bytes > max_bytes:
        raise MediaTooLargeError(f"the encoded media is larger than {max_bytes} bytes")
