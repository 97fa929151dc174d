"""`MediaConnector`: URLs become `MediaRef`s. Transport only; how bytes decode is the decoder's.

The async methods are the implementation. Each blocking method forwards to the async one, on a
loop in a thread of the connector's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, TypeVar

from lazydecode.errors import (
    BlockedURLError,
    LazyDecodeError,
    MediaTooLargeError,
    PayloadChangedError,
)
from lazydecode.limits import FetchLimits, FetchPolicy
from lazydecode.media import executor as media_executor
from lazydecode.media.at_once import LOOK_CHARS, QuickTurns, refs_at_hand
from lazydecode.media.base import MediaIO, MediaRef, PayloadDigest
from lazydecode.media.budget import ByteBudget
from lazydecode.media.data_urls import DataURL
from lazydecode.media.decode import await_job
from lazydecode.media.download_cache import DownloadCache
from lazydecode.media.executor import MediaExecutor
from lazydecode.media.fetch_trace import FetchTrace, current_trace, fill_trace, trace_fetch
from lazydecode.media.http import HttpBody, HttpConnection, decode_content
from lazydecode.media.known_payloads import KnownPayloads
from lazydecode.media.known_texts import MAX_TEXTS, KnownTexts
from lazydecode.media.local_files import LocalFiles
from lazydecode.media.payloads import (
    MediaPayload,
    MediaURL,
    build_refs,
    known_refs_from_file,
    refs_from_file,
    strictest_max_bytes,
)
from lazydecode.media.portal import Portal
from lazydecode.media.single_flight import SingleFlight
from lazydecode.media.urls import (
    HttpURL,
    URLPolicy,
    as_text,
    is_data_url,
    parse_url,
    redact_url,
)
from lazydecode.plugins import contain, is_foreign

__all__ = [
    "FetchTrace",
    "MediaConnector",
    "MediaPayload",
    "MediaURL",
    "trace_fetch",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_V = TypeVar("_V")
_A = TypeVar("_A")


class _OnLoop:
    """What a connector has on one event loop."""

    def __init__(self) -> None:
        self.flights: SingleFlight[Any, MediaPayload] = SingleFlight("fetch")
        self.turns = QuickTurns()


class MediaConnector:
    """Fetches media by `http:`, `https:`, `data:` and `file:` URL and returns refs.

    Concurrent fetches of one URL, on one loop, with the same cap and time-out, share one
    download. May be used from several loops and threads. A subclass adds a transport by
    overriding `fetch_payload_async`, or replaces everything by `load_from_url_async`.

    Args:
        connection: The HTTP client; it stays the caller's to close. None: one of its own.
        policy: Which URLs may be fetched.
        limits: How much and how long.
        download_cache: Keeps http(s) payloads on disk. None: not kept.
        executor: Media threads. None: the process-wide ones.
        budget: Bounds the bytes of all downloads that are under way together. The connector is
            then to be used on one loop.
        allowed_local_media_path: Overrides the policy's field of that name.
        allowed_media_domains: Overrides the policy's `allowed_domains`.

    Raises:
        ValueError: If the local folder does not exist, or an entry of the policy is malformed.
    """

    name: str = ""
    """Under which the registry has it; empty for one that it did not make."""

    def __init__(
        self,
        connection: HttpConnection | None = None,
        *,
        policy: FetchPolicy | None = None,
        limits: FetchLimits | None = None,
        download_cache: DownloadCache | None = None,
        executor: MediaExecutor | None = None,
        budget: ByteBudget | None = None,
        allowed_local_media_path: str | Path = "",
        allowed_media_domains: Sequence[str] | None = None,
    ) -> None:
        policy = policy or FetchPolicy()
        if allowed_local_media_path:
            policy = replace(policy, allowed_local_media_path=Path(allowed_local_media_path))
        if allowed_media_domains is not None:
            policy = replace(policy, allowed_domains=tuple(allowed_media_domains))
        self.policy = policy
        self.limits = limits or FetchLimits()
        self._url_policy = URLPolicy(policy)
        folder = policy.allowed_local_media_path
        self._local_files = None if folder is None else LocalFiles(folder)
        self._owns_connection = connection is None
        self._connection = connection or HttpConnection(limits=self.limits)
        self._download_cache = download_cache
        self._known = KnownPayloads(self.limits.max_known_payloads)
        self.known_texts = KnownTexts(min(self.limits.max_known_payloads, MAX_TEXTS))
        """Base64 texts that came before, and what they were."""
        # What one policy allowed to be downloaded is not another one's to read.
        self._cache_scope = hashlib.sha256(repr(policy).encode()).hexdigest()[:16]
        self._executor = executor
        self._budget = budget
        self._loops: dict[asyncio.AbstractEventLoop, _OnLoop] = {}
        self._portal = Portal(on_stop=self._close_loop)
        self._is_closed = False
        self._is_foreign = is_foreign(type(self))

    @property
    def executor(self) -> MediaExecutor:
        """The media threads that this connector uses."""
        return self._executor or media_executor.global_thread_pool

    # -- one item

    async def fetch_image_async(self, url: MediaURL, media_io: MediaIO[_T]) -> MediaRef[_T]:
        """Fetch one image; its pixels stay encoded."""
        return await self._fetch_one("image", url, media_io, self.limits.image_timeout_s)

    def fetch_image(self, url: MediaURL, media_io: MediaIO[_T]) -> MediaRef[_T]:
        """Blocking form of `fetch_image_async`."""
        return self._portal.call(self.fetch_image_async, url, media_io)

    async def fetch_video_async(self, url: MediaURL, media_io: MediaIO[_T]) -> MediaRef[_T]:
        """Fetch one video; its frames stay encoded."""
        return await self._fetch_one("video", url, media_io, self.limits.video_timeout_s)

    def fetch_video(self, url: MediaURL, media_io: MediaIO[_T]) -> MediaRef[_T]:
        """Blocking form of `fetch_video_async`."""
        return self._portal.call(self.fetch_video_async, url, media_io)

    async def fetch_audio_async(self, url: MediaURL, media_io: MediaIO[_T]) -> MediaRef[_T]:
        """Fetch one audio clip; its samples stay encoded."""
        return await self._fetch_one("audio", url, media_io, self.limits.audio_timeout_s)

    def fetch_audio(self, url: MediaURL, media_io: MediaIO[_T]) -> MediaRef[_T]:
        """Blocking form of `fetch_audio_async`."""
        return self._portal.call(self.fetch_audio_async, url, media_io)

    # -- one payload, two decoders

    async def fetch_video_and_audio_async(
        self, url: MediaURL, video_io: MediaIO[_V], audio_io: MediaIO[_A]
    ) -> tuple[MediaRef[_V], MediaRef[_A]]:
        """Fetch a video once, for its frames and for its audio track.

        One download or read, one payload, one digest pass for both keys; the stricter of the
        decoders' caps and the video time-out apply.
        """
        try:
            with self.contained():
                video, audio = await self._load_refs(
                    url, (video_io, audio_io), self.limits.video_timeout_s
                )
        except LazyDecodeError as exc:
            _name("video", url, exc)
            raise
        return video, audio

    def fetch_video_and_audio(
        self, url: MediaURL, video_io: MediaIO[_V], audio_io: MediaIO[_A]
    ) -> tuple[MediaRef[_V], MediaRef[_A]]:
        """Blocking form of `fetch_video_and_audio_async`."""
        return self._portal.call(self.fetch_video_and_audio_async, url, video_io, audio_io)

    # -- any item

    async def load_from_url_async(
        self, url: MediaURL, media_io: MediaIO[_T], *, timeout_s: float | None = None
    ) -> MediaRef[_T]:
        """Return a ref over what `url` leads to.

        Args:
            url: An `http:`, `https:`, `data:` or `file:` URL.
            media_io: The decoder; its own size cap applies beside the connector's.
            timeout_s: For the whole download. None: the time-out for videos.

        Raises:
            InvalidRequestError: If the URL is malformed or not allowed. A `ValueError`.
            UnprocessableMediaError: If what it leads to cannot be used. A `ValueError`.
            FetchError: If the origin cannot be reached, fails, or is too slow.
        """
        if timeout_s is None:
            timeout_s = self.limits.video_timeout_s
        (ref,) = await self._load_refs(url, (media_io,), timeout_s)
        return ref

    def load_from_url(
        self, url: MediaURL, media_io: MediaIO[_T], *, timeout_s: float | None = None
    ) -> MediaRef[_T]:
        """Blocking form of `load_from_url_async`."""
        return self._portal.call(self.load_from_url_async, url, media_io, timeout_s=timeout_s)

    async def load_base64_async(
        self, media_type: str, data: MediaURL, media_io: MediaIO[_T]
    ) -> MediaRef[_T]:
        """Return a ref over base64 text that came without a URL, by the rules of data URLs.

        Args:
            media_type: What the payload is said to be, for example `audio/wav`.
            data: The text; as bytes or a view it saves a copy.
            media_io: The decoder.

        Raises:
            InvalidRequestError: If the text is not ASCII or the decoder refuses its size.
            UnprocessableMediaError: If it is not base64, empty, or too large.
        """
        if isinstance(data, str):
            if not data.isascii():
                raise BlockedURLError("The base64 data contains characters beyond ASCII.")
            data = data.encode("ascii")
        url = DataURL(media_type.lower(), True, memoryview(data))
        max_bytes = strictest_max_bytes(self.limits, (media_io,))
        (ref,) = await self._load_at_hand(url, (media_io,), max_bytes)
        return ref

    def load_base64(self, media_type: str, data: MediaURL, media_io: MediaIO[_T]) -> MediaRef[_T]:
        """Blocking form of `load_base64_async`."""
        return self._portal.call(self.load_base64_async, media_type, data, media_io)

    async def fetch_payload_async(
        self, url: str, *, max_bytes: int, timeout_s: float
    ) -> MediaPayload:
        """Return the encoded bytes behind a URL that is neither `data:` nor `file:`.

        The seam for other transports: an override handles the schemes it knows, honours both
        limits, and calls this one for the rest.
        """
        parsed = parse_url(url)
        if not isinstance(parsed, HttpURL):
            raise BlockedURLError("The media URL is not an http(s) URL.")
        # Before the look-ups, so that neither the disk nor a flight answers for a URL that
        # would be refused.
        self._url_policy.check_url(parsed)
        flights = self._here().flights
        key = (str(parsed), max_bytes, timeout_s)
        payload, is_shared = await flights.run(
            key, lambda: self._download(parsed, max_bytes, timeout_s)
        )
        if is_shared and (trace := current_trace()):
            trace.source, trace.is_shared = "http", True
        return payload

    async def close(self) -> None:
        """Cancel what is fetched, close connections and threads. The executor is not closed."""
        self._is_closed = True
        await self._close_loop()
        if self._portal.is_running:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.executor.quick, self._portal.close)
        if self._owns_connection:
            await self._connection.close()

    def shutdown(self) -> None:
        """Blocking form of `close`, for a connector that was used in blocking form."""
        self._is_closed = True
        self._portal.close()
        if self._owns_connection:
            self._connection.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _close_loop(self) -> None:
        """End what this connector does on the running loop."""
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is not None:
            await here.flights.close()
        if self._owns_connection:
            await self._connection.close_loop()

    def _here(self) -> _OnLoop:
        if self._is_closed:
            raise RuntimeError("the connector was closed")
        loop = asyncio.get_running_loop()
        here = self._loops.get(loop)
        if here is None:
            for other in [other for other in self._loops if other.is_closed()]:
                del self._loops[other]
            here = self._loops[loop] = _OnLoop()
        return here

    def contained(self) -> AbstractContextManager[None]:
        """Let nothing but our errors out of the block, if this is a plug-in's class."""
        if not self._is_foreign:
            return _NOTHING
        return contain("media connector", self.name or type(self).__name__)

    # -- from URL to refs

    async def _fetch_one(
        self, modality: str, url: MediaURL, media_io: MediaIO[_T], timeout_s: float
    ) -> MediaRef[_T]:
        try:
            if not self._is_foreign:
                return await self.load_from_url_async(url, media_io, timeout_s=timeout_s)
            with self.contained():
                ref = await self.load_from_url_async(url, media_io, timeout_s=timeout_s)
                if not isinstance(ref, MediaRef):
                    raise TypeError(f"load_from_url_async gave a {type(ref).__name__}")
        except LazyDecodeError as exc:
            _name(modality, url, exc)
            raise
        return ref

    async def _fetch_payload(self, url: str, max_bytes: int, timeout_s: float) -> MediaPayload:
        """What `fetch_payload_async` gives, which a plug-in may have replaced."""
        with self.contained():
            payload = await self.fetch_payload_async(url, max_bytes=max_bytes, timeout_s=timeout_s)
            if not isinstance(payload, MediaPayload):
                raise TypeError(f"fetch_payload_async gave a {type(payload).__name__}")
        if len(payload.data) > max_bytes:
            raise MediaTooLargeError(f"the media are larger than {max_bytes} bytes")
        return payload

    def _load_refs(
        self, url: MediaURL, media_ios: Sequence[MediaIO[Any]], timeout_s: float
    ) -> Coroutine[Any, Any, list[MediaRef[Any]]]:
        """Return a ref for each decoder over what `url` leads to."""
        max_bytes = strictest_max_bytes(self.limits, media_ios)
        if is_data_url(url):
            return self._load_at_hand(url, media_ios, max_bytes)
        text = as_text(url).strip(" ")
        if text[:5].lower() == "file:":
            return self._load_file(text, media_ios, max_bytes)
        return self._load_remote(text, media_ios, max_bytes, timeout_s)

    def _load_at_hand(
        self, url: MediaURL | DataURL, media_ios: Sequence[MediaIO[Any]], max_bytes: int
    ) -> Coroutine[Any, Any, list[MediaRef[Any]]]:
        """Return refs over what came with the request."""
        turns = self._here().turns
        return refs_at_hand(
            url, media_ios, max_bytes, texts=self.known_texts, turns=turns, run=self._run
        )

    async def _load_remote(
        self, url: str, media_ios: Sequence[MediaIO[Any]], max_bytes: int, timeout_s: float
    ) -> list[MediaRef[Any]]:
        """Return refs over what is neither in the request nor on this machine."""
        if self._download_cache is not None and len(self._known) and _is_http(url):
            known = await self._find_downloaded(self._download_cache, url, media_ios, max_bytes)
            if known is not None:
                return known
        start = time.perf_counter()
        payload = await self._fetch_payload(url, max_bytes, timeout_s)
        fetched = time.perf_counter()
        refs = await self._run(build_refs, payload, media_ios)
        if self._download_cache is not None and _is_http(url):
            self._known.learn(_download(payload.digest.content()), payload.digest, media_ios, refs)
        if trace := current_trace():
            fill_trace(trace, trace.source, len(payload.data), start, fetched)
        return refs

    async def _load_file(
        self, url: str, media_ios: Sequence[MediaIO[Any]], max_bytes: int
    ) -> list[MediaRef[Any]]:
        """Return refs over a local file; one that is known meets no thread, where that can be."""
        trace = current_trace()
        turns = self._here().turns
        if self._local_files is not None and len(self._known):
            await turns.wait(LOOK_CHARS)
            refs = known_refs_from_file(
                self._local_files, self._known, url, media_ios, max_bytes, trace
            )
            if refs is not None:
                return refs
        return await self._run(
            refs_from_file, self._local_files, self._known, url, media_ios, max_bytes, trace
        )

    async def _find_downloaded(
        self, cache: DownloadCache, url: str, media_ios: Sequence[MediaIO[Any]], max_bytes: int
    ) -> list[MediaRef[Any]] | None:
        """Return refs over what is on disk and was identified before; None if it is not."""
        parsed = parse_url(url)
        assert isinstance(parsed, HttpURL)
        self._url_policy.check_url(parsed)
        start = time.perf_counter()
        key = self._cache_key(parsed)

        def read_again() -> tuple[bytes, PayloadDigest]:
            found = cache.get(key, max_bytes)
            if found is None:
                raise PayloadChangedError("the download cache has lost an entry")
            return found

        def find() -> list[MediaRef[Any]] | None:
            content = cache.peek(key, max_bytes)
            if content is None:
                return None
            return self._known.find(_download(content), media_ios, read_again)

        refs = await self._run(find)
        if refs is not None:
            fill_trace(current_trace(), "disk", refs[0].num_bytes, start, time.perf_counter())
        return refs

    async def _run(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run what is linear in a payload on the media threads.

        A cancelled caller waits for a job that runs: until its end it reads the payload, whose
        memory the caller then gives back.
        """
        return await await_job(self.executor.quick.submit(function, *args, **kwargs))

    async def _download(self, url: HttpURL, max_bytes: int, timeout_s: float) -> MediaPayload:
        """What one flight does: look on disk, else download, digest and keep."""
        trace = current_trace()
        if self._download_cache is not None:
            found = await self._run(self._download_cache.get, self._cache_key(url), max_bytes)
            if found is not None:
                if trace:
                    trace.source = "disk"
                return MediaPayload(*found)
        body = await self._connection.fetch(
            url,
            policy=self._url_policy,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            budget=self._budget,
        )
        if trace:
            trace.source, trace.num_attempts = "http", body.num_attempts
        return await self._run(self._finish, url, body, max_bytes)

    def _finish(self, url: HttpURL, body: HttpBody, max_bytes: int) -> MediaPayload:
        data = decode_content(body, max_bytes)
        digest = PayloadDigest(data)
        if self._download_cache is not None and body.may_store:
            self._download_cache.put(self._cache_key(url), data, digest)
        return MediaPayload(data, digest)

    def _cache_key(self, url: HttpURL) -> str:
        return f"{self._cache_scope} {url}"


_NOTHING: Final = nullcontext()


def _name(modality: str, url: MediaURL, exc: LazyDecodeError) -> None:
    """Name the modality and the URL, without its secrets, in an error about one item."""
    exc.modality = exc.modality or modality
    if exc.parameter is None:
        exc.parameter, exc.value = f"{modality}_url", redact_url(url)


def _is_http(url: str) -> bool:
    return url[:5].lower() in ("http:", "https")


def _download(content: bytes) -> tuple[str, bytes]:
    """Name a payload in the download cache by the digest that is recorded there."""
    return "download", content
