"""The guarded HTTP client: check, resolve once, connect to what was checked, read within limits.

Redirects are followed here, hop by hop, each through the same checks. A fetch has one deadline
for all its hops, attempts and pauses, so that its caller knows how long it can take.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import random
import socket
import ssl
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, NoReturn
from urllib.parse import unquote_to_bytes

import aiohttp
import yarl

from lazydecode import __version__
from lazydecode.errors import (
    CorruptMediaError,
    FetchError,
    FetchTimeoutError,
    LazyDecodeError,
    MediaTooLargeError,
    OriginRefusedError,
    UnprocessableMediaError,
)
from lazydecode.limits import FetchLimits
from lazydecode.media.budget import ByteBudget, Reservation
from lazydecode.media.faults import shortage
from lazydecode.media.resolver import GuardedResolver, Resolve, SystemResolver
from lazydecode.media.urls import HttpURL, URLPolicy, resolve_redirect

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_TRANSIENT_4XX: Final = frozenset({408, 429})
_HEADERS: Final = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "User-Agent": f"lazydecode/{__version__}",
}
_FIRST_PAUSE_S: Final = 0.2
_MAX_CONNECTIONS: Final = 512
_MAX_CONNECTIONS_PER_HOST: Final = 64
_KEEPALIVE_S: Final = 15.0
_FIRST_HOLD: Final = 1024 * 1024
"""Bytes held of a budget for a body of unknown length, before it turns out to be larger."""


@dataclass(frozen=True, slots=True)
class HttpBody:
    """The body of a complete answer with status 200; neither empty nor over the cap."""

    data: bytes
    """As it came; still compressed if `content_encoding` says so."""
    content_encoding: str
    """`gzip`, `deflate`, or empty."""
    may_store: bool
    """False if the origin forbids keeping it (`Cache-Control: no-store`)."""
    num_attempts: int

    def __repr__(self) -> str:
        return f"<HttpBody, {len(self.data)} bytes, attempt {self.num_attempts}>"


class _AttemptError(Exception):
    """An attempt failed in a way that can pass; holds the error for the caller if it does not."""

    def __init__(self, error: FetchError) -> None:
        super().__init__(error.message)
        self.error = error


class HttpConnection:
    """Fetches bodies over http(s), under the policy that comes with each fetch.

    May be shared by connectors and used from several event loops: each pair of loop and policy
    has a pool of kept-alive connections of its own, so that a connection which one policy
    allowed never serves another.

    Args:
        limits: Idle time-out and number of attempts.
        resolve: Finds the addresses of a host name. None: the system's resolver.
        ssl_context: Which certificates are trusted. None: the system's.
    """

    def __init__(
        self,
        *,
        limits: FetchLimits | None = None,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits or FetchLimits()
        self._system_resolver = SystemResolver() if resolve is None else None
        self._resolve: Resolve = resolve or self._system_resolver  # type: ignore[assignment]
        self._ssl_context = ssl_context
        self._sessions: dict[
            tuple[asyncio.AbstractEventLoop, URLPolicy], aiohttp.ClientSession
        ] = {}
        self._is_closed = False

    async def fetch(
        self,
        url: HttpURL,
        *,
        policy: URLPolicy,
        timeout_s: float,
        max_bytes: int,
        budget: ByteBudget | None = None,
    ) -> HttpBody:
        """Return the body that `url` leads to.

        Args:
            url: Credentials in it go to its own origin only.
            policy: What every hop must pass.
            timeout_s: For everything: hops, attempts and pauses between them.
            max_bytes: Largest body, whatever `Content-Length` claims.
            budget: Holds the bytes of the body while it arrives. The time spent waiting for it
                counts.

        Raises:
            BlockedURLError: If the policy refuses a hop.
            OriginRefusedError: If the origin answers 4xx other than 408 and 429.
            UnprocessableMediaError: If the answer is no complete body: another status, too many
                redirects, empty, or an unknown encoding.
            MediaTooLargeError: If the body is larger than `max_bytes`.
            FetchError: If the origin cannot be reached or fails, after all attempts.
            FetchTimeoutError: If it does not deliver in time.
            OverloadedError: If the budget has no room, or this process no descriptor left.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        idle_s = self._limits.idle_timeout_s
        timeout = aiohttp.ClientTimeout(
            total=None,
            # A connection that does not come about is given up in time for a second attempt.
            sock_connect=min(idle_s, timeout_s / 2),
            sock_read=idle_s,
        )
        attempt = 0
        while True:
            attempt += 1
            timer = asyncio.timeout_at(deadline)
            try:
                async with timer:
                    return await self._follow(url, policy, timeout, max_bytes, attempt, budget)
            except _AttemptError as failed:
                error, cause = failed.error, failed.__cause__
            except TimeoutError:
                assert timer.expired()
                raise FetchTimeoutError(
                    f"the origin did not deliver within {timeout_s:g} s"
                ) from None
            if attempt >= self._limits.max_retries:
                raise error from cause
            pause_s = _FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)  # noqa: S311
            pause_s = max(pause_s, error.retry_after_s or 0.0)
            if asyncio.get_running_loop().time() + pause_s >= deadline:
                raise error from cause
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Close the connections of the running loop, and take no more fetches on any."""
        self.stop()
        await self.close_loop()

    def stop(self) -> None:
        """Take no more fetches; connections are closed by `close_loop`, on each loop."""
        self._is_closed = True
        if self._system_resolver is not None:
            self._system_resolver.close()

    async def close_loop(self) -> None:
        """Close the connections of the running loop; it may open new ones."""
        running = asyncio.get_running_loop()
        for loop, policy in list(self._sessions):
            if loop is running:
                await self._sessions.pop((loop, policy)).close()
            elif loop.is_closed():
                del self._sessions[loop, policy]

    def _session(self, policy: URLPolicy) -> aiohttp.ClientSession:
        if self._is_closed:
            raise RuntimeError("the HTTP connection was closed")
        key = (asyncio.get_running_loop(), policy)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=GuardedResolver(policy, self._resolve),
                    use_dns_cache=False,
                    ssl=self._ssl_context or True,
                    limit=_MAX_CONNECTIONS,
                    limit_per_host=_MAX_CONNECTIONS_PER_HOST,
                    keepalive_timeout=_KEEPALIVE_S,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                auto_decompress=False,
                # A proxy would resolve names for itself; .netrc holds our credentials.
                trust_env=False,
            )
        return session

    async def _follow(
        self,
        first: HttpURL,
        policy: URLPolicy,
        timeout: aiohttp.ClientTimeout,
        max_bytes: int,
        attempt: int,
        budget: ByteBudget | None,
    ) -> HttpBody:
        """One attempt: follow redirects from `first`, read the body."""
        url = first
        limits = policy.policy
        for _ in range(limits.max_redirects + 1 if limits.allow_redirects else 1):
            policy.check_url(url)
            authorization = _authorization(first) if url.origin == first.origin else {}
            try:
                async with self._session(policy).get(
                    yarl.URL(str(url.without_userinfo), encoded=True),
                    allow_redirects=False,
                    timeout=timeout,
                    headers=authorization,
                ) as response:
                    if response.status not in _REDIRECTS:
                        return await _read_body(response, max_bytes, attempt, budget)
                    location = response.headers.get("Location", "")
            except (aiohttp.ClientError, OSError) as exc:
                _raise_translated(exc)
            if not location:
                raise UnprocessableMediaError("the origin redirected to nowhere")
            url = resolve_redirect(url, location)
        if not limits.allow_redirects:
            raise UnprocessableMediaError("the origin redirected, which is not allowed")
        raise UnprocessableMediaError(
            f"the origin redirected more than {limits.max_redirects} times"
        )


async def _read_body(
    response: aiohttp.ClientResponse, max_bytes: int, attempt: int, budget: ByteBudget | None
) -> HttpBody:
    _check_status(response)
    encoding = response.headers.get("Content-Encoding", "").strip().lower().removeprefix("x-")
    if encoding not in ("", "identity", "gzip", "deflate"):
        raise UnprocessableMediaError("the origin sent the media in an unknown content encoding")
    stated = response.content_length
    if (stated or 0) > max_bytes:
        raise _too_large(max_bytes)
    if budget is None:
        data = await _read_up_to(response.content, max_bytes, None)
    else:
        async with budget.reserve(stated or min(_FIRST_HOLD, max_bytes)) as reservation:
            data = await _read_up_to(response.content, max_bytes, reservation)
    if not data:
        raise UnprocessableMediaError("the origin sent an empty body")
    return HttpBody(
        data,
        encoding if encoding != "identity" else "",
        "no-store" not in response.headers.get("Cache-Control", "").lower(),
        attempt,
    )


async def _read_up_to(
    stream: aiohttp.StreamReader, max_bytes: int, reservation: Reservation | None
) -> bytes:
    # BytesIO hands its buffer over in `getvalue`: the body is never held twice. Closed at once
    # when reading fails, so that no traceback keeps what has arrived.
    with io.BytesIO() as body:
        async for chunk in stream.iter_any():
            size = body.tell() + len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            if reservation is not None and size > reservation.nbytes:
                reservation.grow(min(max(size, 2 * reservation.nbytes), max_bytes))
            body.write(chunk)
        return body.getvalue()


def _check_status(response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status == 200:
        return
    if status in _TRANSIENT_4XX or 500 <= status < 600:
        retry_after_s = parse_retry_after(response.headers.get("Retry-After", ""))
        raise _AttemptError(
            FetchError(f"the origin answered with status {status}", retry_after_s=retry_after_s)
        )
    if 400 <= status < 500:
        raise OriginRefusedError(f"the origin answered with status {status}")
    raise UnprocessableMediaError(f"the origin answered with status {status} instead of 200")


def _raise_translated(exc: aiohttp.ClientError | OSError) -> NoReturn:
    """Raise our error for a failed exchange; the texts name neither addresses nor URLs."""
    lacking = shortage(exc) or (exc.__cause__ and shortage(exc.__cause__))
    if lacking:
        raise lacking from exc
    if isinstance(exc, aiohttp.ClientConnectorDNSError):
        # A resolver that cannot open its files may say that there is no such name.
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as none_left:
            if lacking := shortage(none_left):
                raise lacking from exc
        error = FetchError("the origin's host name cannot be resolved")
        if isinstance(exc.__cause__, OSError) and exc.__cause__.errno == socket.EAI_AGAIN:
            raise _AttemptError(error) from exc
        raise error from exc
    if isinstance(exc, aiohttp.ServerTimeoutError):
        is_connect = isinstance(exc, aiohttp.ConnectionTimeoutError)
        what = "accept a connection" if is_connect else "send anything"
        raise _AttemptError(FetchTimeoutError(f"the origin did not {what} in time")) from exc
    if isinstance(exc, aiohttp.ClientSSLError):
        raise FetchError("the origin's TLS certificate or protocol was not accepted") from exc
    if isinstance(exc, aiohttp.ClientPayloadError):
        raise _AttemptError(FetchError("the origin cut its answer off")) from exc
    if isinstance(exc, aiohttp.ClientConnectorError):
        raise _AttemptError(FetchError("the origin cannot be connected to")) from exc
    if isinstance(exc, aiohttp.ServerDisconnectedError | OSError):
        raise _AttemptError(FetchError("the connection to the origin broke")) from exc
    # Without its cause: that one's text can hold the URL with its query.
    raise FetchError("the origin's answer is not valid HTTP") from None


def _authorization(url: HttpURL) -> dict[str, str]:
    if not url.userinfo:
        return {}
    user, _, password = url.userinfo.partition(":")
    credentials = unquote_to_bytes(user) + b":" + unquote_to_bytes(password)
    return {"Authorization": f"Basic {base64.b64encode(credentials).decode('ascii')}"}


def parse_retry_after(value: str) -> float | None:
    """Return the seconds that a `Retry-After` header asks for; None if it says nothing usable.

    Source:
        RFC 9110, section 10.2.3: seconds or an HTTP date.
    """
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def decode_content(body: HttpBody, max_bytes: int) -> bytes:
    """Undo the content encoding, holding no more than `max_bytes`; linear in the result.

    Raises:
        MediaTooLargeError: If the decoded body is larger.
        CorruptMediaError: If it is damaged or empty.
    """
    if not body.content_encoding:
        return body.data
    out: list[bytes] = []
    left = max_bytes
    rest = body.data
    # Bit 5 (32): gzip or zlib, by what is there. Some origins send bare deflate instead.
    bare = body.content_encoding == "deflate" and (rest[0] & 0x0F != 8 or len(rest) < 2)
    try:
        while rest:
            decoder = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
            out.append(decoder.decompress(rest, left + 1))
            left -= len(out[-1])
            if left < 0:
                raise _too_large(max_bytes)
            if not decoder.eof:
                raise CorruptMediaError("the origin's compressed body ends early")
            rest = decoder.unused_data.lstrip(b"\0")
    except zlib.error as exc:
        raise CorruptMediaError("the origin's compressed body is damaged") from exc
    data = out[0] if len(out) == 1 else b"".join(out)
    if not data:
        raise UnprocessableMediaError("the origin sent an empty body")
    return data


def _too_large(max_bytes: int) -> LazyDecodeError:
    return MediaTooLargeError(f"the encoded media is larger than {max_bytes} bytes")
