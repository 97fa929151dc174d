from __future__ import annotations

import asyncio
import base64
import gzip
import resource
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme

from lazydecode.errors import (
    BlockedURLError,
    CorruptMediaError,
    FetchError,
    FetchTimeoutError,
    LazyDecodeError,
    MediaTooLargeError,
    OriginRefusedError,
    OverloadedError,
    UnprocessableMediaError,
)
from lazydecode.limits import MIB, FetchLimits, FetchPolicy
from lazydecode.media.budget import ByteBudget
from lazydecode.media.http import HttpBody, HttpConnection, decode_content, parse_retry_after
from lazydecode.media.urls import HttpURL, URLPolicy, parse_url
from tests.origin import Exchange, Gate, Origin, StubResolver, wait_until

CASES = Path(__file__).parent.parent / "cases" / "media"


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


class Client:
    """A connection with defaults; `fetch` returns the decoded body."""

    def __init__(self, origin: Origin, **options: Any) -> None:
        self.policy = FetchPolicy(allowed_private_networks=(origin.netloc,))
        self.connection = HttpConnection(**options)

    async def fetch(
        self,
        url: str,
        *,
        timeout_s: float = 5.0,
        max_bytes: int = MIB,
        budget: ByteBudget | None = None,
        **policy: Any,
    ) -> bytes:
        parsed = parse_url(url)
        assert isinstance(parsed, HttpURL)
        body = await self.connection.fetch(
            parsed,
            policy=URLPolicy(replace(self.policy, **policy)),
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            budget=budget,
        )
        return decode_content(body, max_bytes)


@pytest.fixture
async def client(origin: Origin) -> AsyncIterator[Client]:
    client = Client(origin)
    yield client
    await client.connection.close()


def no_secrets(error: BaseException) -> bool:
    """Whether neither the error nor what it was raised from shows a query or credentials."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{cause!r} {cause}")
        cause = cause.__cause__
    return "SECRET" not in " ".join(texts)


# -- bodies


async def test_a_body_arrives_whole(origin: Origin, client: Client) -> None:
    body = bytes(range(256)) * 2048
    assert await client.fetch(origin.serve("/a.bin", body)) == body
    request = origin.requests[0]
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["host"] == origin.netloc
    assert not {"cookie", "authorization", "referer", "range"} & set(request.headers)


async def test_the_target_is_sent_as_it_was_signed(origin: Origin, client: Client) -> None:
    origin.serve("/a%2Fb/~c.png", b"x")
    await client.fetch(origin.url("/a%2Fb/~c.png?X-Sig=a%2Bb%3D%3D&e=(1)'*~;,#frag"))
    assert origin.requests[0].target == "/a%2Fb/~c.png?X-Sig=a%2Bb%3D%3D&e=(1)'*~;,"


async def test_connections_are_kept_and_reused(origin: Origin, client: Client) -> None:
    url = origin.serve("/a", b"x")
    for _ in range(5):
        await client.fetch(url)
    assert origin.num_connections == 1
    await client.connection.close()
    await wait_until(lambda: origin.open_connections == 0)


async def test_a_chunked_body_arrives_whole(origin: Origin, client: Client) -> None:
    async def chunked(exchange: Exchange) -> None:
        await exchange.head(200, {"Transfer-Encoding": "chunked"})
        for piece in (b"one", b"two", b"three"):
            await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await exchange.send(b"0\r\n\r\n")

    origin.route("/a", chunked)
    assert await client.fetch(origin.url("/a")) == b"onetwothree"


@pytest.mark.parametrize("status", [201, 202, 203, 204, 205, 206, 300, 304, 305, 306])
async def test_only_status_200_has_a_body(origin: Origin, client: Client, status: int) -> None:
    body = b"" if status in (204, 304) else b"partial"
    with pytest.raises(UnprocessableMediaError, match=str(status)):
        await client.fetch(origin.serve("/a", body, status=status))
    assert origin.hits("/a") == 1


async def test_an_empty_body_is_an_error(origin: Origin, client: Client) -> None:
    with pytest.raises(UnprocessableMediaError, match="empty"):
        await client.fetch(origin.serve("/a", b""))
    assert origin.hits("/a") == 1


# -- size


async def test_a_stated_length_over_the_cap_is_refused_unread(
    origin: Origin, client: Client
) -> None:
    with pytest.raises(MediaTooLargeError, match="1048576"):
        await client.fetch(origin.endless("/big", content_length=1 << 30))
    await wait_until(lambda: origin.open_connections == 0)
    assert origin.hits("/big") == 1


@pytest.mark.parametrize("stated", [None, MIB - 1])
async def test_reading_stops_at_the_cap(origin: Origin, client: Client, stated: int | None) -> None:
    url = origin.endless("/big", content_length=stated)
    if stated is None:
        with pytest.raises(MediaTooLargeError):
            await client.fetch(url)
    else:  # What comes after the stated length is not ours.
        assert len(await client.fetch(url)) == stated
    await wait_until(lambda: origin.open_connections == 0)


async def test_a_body_of_exactly_the_cap_is_fine(origin: Origin, client: Client) -> None:
    body = bytes(1000)
    assert await client.fetch(origin.serve("/a", body), max_bytes=1000) == body
    with pytest.raises(MediaTooLargeError):
        await client.fetch(origin.serve("/a", body), max_bytes=999)


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", "deflate"])
async def test_a_compressed_body_is_decoded(origin: Origin, client: Client, encoding: str) -> None:
    body = b"media" * 1000
    packed = zlib.compress(body) if encoding == "deflate" else gzip.compress(body)
    url = origin.serve("/a", packed, headers={"Content-Encoding": encoding})
    assert await client.fetch(url) == body
    with pytest.raises(MediaTooLargeError):
        await client.fetch(url, max_bytes=len(body) - 1)


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "nonsense"])
async def test_other_encodings_are_refused(origin: Origin, client: Client, encoding: str) -> None:
    url = origin.serve("/a", b"xxx", headers={"Content-Encoding": encoding})
    with pytest.raises(UnprocessableMediaError, match="encoding"):
        await client.fetch(url)


async def test_a_gzip_bomb_does_not_expand_past_the_cap(origin: Origin, client: Client) -> None:
    packed = (CASES / "k4_gzip_bomb.gz").read_bytes()
    url = origin.serve("/bomb", packed, headers={"Content-Encoding": "gzip"})
    before = psutil.Process().memory_info().rss
    with pytest.raises(MediaTooLargeError):
        await client.fetch(url, max_bytes=8 * MIB)
    assert psutil.Process().memory_info().rss - before < 48 * MIB


def _body(data: bytes, encoding: str) -> HttpBody:
    return HttpBody(data, encoding, True, 1)


def test_content_decoding_knows_its_variants() -> None:
    whole = b"abc" * 100
    raw = zlib.compressobj(wbits=-15)
    bare = raw.compress(whole) + raw.flush()
    assert decode_content(_body(bare, "deflate"), 300) == whole
    members = gzip.compress(whole[:150]) + gzip.compress(whole[150:])
    assert decode_content(_body(members, "gzip"), 300) == whole
    with pytest.raises(MediaTooLargeError):
        decode_content(_body(members, "gzip"), 299)
    for damaged in (b"\x1f", gzip.compress(whole)[:-9], b"garbage", gzip.compress(whole) + b"x"):
        with pytest.raises(CorruptMediaError):
            decode_content(_body(damaged, "gzip"), 300)
    with pytest.raises(UnprocessableMediaError, match="empty"):
        decode_content(_body(gzip.compress(b""), "gzip"), 300)


# -- what can pass is tried again


async def test_503_twice_and_then_the_body(origin: Origin, client: Client) -> None:
    url = origin.serve_in_turn("/flaky", (503, b""), (503, b""), (200, b"good"))
    assert await client.fetch(url) == b"good"
    assert origin.hits("/flaky") == 3


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_a_failing_origin_is_asked_as_often_as_allowed(
    origin: Origin, client: Client, status: int
) -> None:
    with pytest.raises(FetchError, match=str(status)) as caught:
        await client.fetch(origin.serve("/s?SECRET".partition("?")[0], b"", status=status))
    assert caught.value.status == 502
    assert caught.value.retryable
    assert origin.hits("/s") == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410, 418, 451])
async def test_a_refusal_is_final(origin: Origin, client: Client, status: int) -> None:
    with pytest.raises(OriginRefusedError, match=str(status)) as caught:
        await client.fetch(origin.serve("/s", b"", status=status))
    assert caught.value.status == 422
    assert origin.hits("/s") == 1


async def test_the_number_of_attempts_is_a_setting(origin: Origin) -> None:
    client = Client(origin, limits=FetchLimits(max_retries=1))
    with pytest.raises(FetchError):
        await client.fetch(origin.serve("/s", b"", status=503))
    assert origin.hits("/s") == 1
    await client.connection.close()


async def test_a_body_that_is_cut_off_is_fetched_again(origin: Origin, client: Client) -> None:
    body = b"x" * 1000
    answers = iter([400, 999, 1000])

    async def cut(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Length": "1000"})
        await exchange.send(body[: next(answers)])
        exchange.close()

    origin.route("/a", cut)
    assert await client.fetch(origin.url("/a")) == body
    assert origin.hits("/a") == 3


async def test_a_body_that_is_always_cut_off_is_no_body(origin: Origin, client: Client) -> None:
    with pytest.raises(FetchError, match="cut"):
        await client.fetch(origin.cut_off("/a", b"x" * 1000, after=999))


async def test_a_chunked_body_without_its_end_is_no_body(origin: Origin, client: Client) -> None:
    async def unfinished(exchange: Exchange) -> None:
        await exchange.head(200, {"Transfer-Encoding": "chunked"})
        await exchange.send(b"3\r\nabc\r\n")
        exchange.close()

    origin.route("/a", unfinished)
    with pytest.raises(FetchError, match="cut"):
        await client.fetch(origin.url("/a"))


async def test_a_refused_connection_is_a_bad_gateway(origin: Origin, client: Client) -> None:
    with Origin() as gone:
        url = gone.url("/a.png?SECRET")
        netloc = gone.netloc
    with pytest.raises(FetchError, match="connected") as caught:
        await client.fetch(url, allowed_private_networks=(netloc,))
    assert (caught.value.status, type(caught.value)) == (502, FetchError)
    assert "127.0.0.1" not in str(caught.value)
    assert no_secrets(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_process_without_descriptors_blames_no_origin(
    origin: Origin, client: Client, host: str
) -> None:
    url = origin.url("/a", host=host)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OverloadedError, match="try again later"):
            await client.fetch(url)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_resolver_that_cannot_open_its_files_blames_no_name(origin: Origin) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    client = Client(origin, resolve=resolve)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(FetchError, match="cannot be resolved"):
        await client.fetch(origin.url("/a", host="a.test"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OverloadedError, match="try again later"):
            await client.fetch(origin.url("/a", host="a.test"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await client.connection.close()


async def test_retry_after_is_kept_to(origin: Origin, client: Client) -> None:
    answers = iter([(503, {"Retry-After": "1"}), (200, {})])
    times: list[float] = []

    async def handler(exchange: Exchange) -> None:
        times.append(asyncio.get_running_loop().time())
        status, headers = next(answers)
        await exchange.answer(b"good", status, headers)

    origin.route("/a", handler)
    assert await client.fetch(origin.url("/a")) == b"good"
    assert times[1] - times[0] >= 1.0


async def test_a_retry_after_beyond_the_time_out_is_passed_on(
    origin: Origin, client: Client
) -> None:
    url = origin.serve("/a", b"", status=429, headers={"Retry-After": "120"})
    with pytest.raises(FetchError) as caught:
        await client.fetch(url)
    assert caught.value.retry_after_s == 120
    assert origin.hits("/a") == 1


def test_retry_after_is_seconds_or_a_date() -> None:
    assert parse_retry_after("7") == 7
    assert parse_retry_after("") is None
    assert parse_retry_after("-1") is None
    assert parse_retry_after("soon") is None
    assert parse_retry_after("٣") is None
    later = parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=90)))
    assert later is not None
    assert 80 < later <= 90
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


async def test_what_is_not_http_is_an_error(origin: Origin, client: Client) -> None:
    async def garbage(exchange: Exchange) -> None:
        await exchange.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        exchange.close()

    async def endless_head(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await exchange.send(b"X-Header: " + b"x" * 1000 + b"\r\n")
            await asyncio.sleep(0)

    async def one_long_line(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nX-Header: ")
        while True:
            await exchange.send(b"x" * 1000)
            await asyncio.sleep(0)

    for name, handler in (("/g", garbage), ("/e", endless_head), ("/l", one_long_line)):
        origin.route(name, handler)
        with pytest.raises(FetchError) as caught:
            await client.fetch(origin.url(name + "?SECRET"))
        assert caught.value.status == 502
        assert no_secrets(caught.value)
    await wait_until(lambda: origin.open_connections == 0)


# -- time


async def test_a_trickle_is_cut_off(origin: Origin, client: Client) -> None:
    for in_head in (False, True):
        path = f"/slow-{in_head}"
        url = origin.trickle(path, every_s=0.05, in_head=in_head)
        while not origin.hits(path):  # on a machine that stood still it asked for nothing
            with pytest.raises(FetchTimeoutError, match=r"within 0\.4 s") as caught:
                await client.fetch(url, timeout_s=0.4)
            assert caught.value.status == 504
            await wait_until(lambda: origin.open_connections == 0)


async def test_a_silent_origin_is_asked_again(origin: Origin) -> None:
    client = Client(origin, limits=FetchLimits(idle_timeout_s=0.2))
    for before_head in (False, True):
        url = origin.stall("/silent", before_head=before_head)
        with pytest.raises(FetchTimeoutError, match="send anything"):
            await client.fetch(url)
    await wait_until(lambda: origin.hits("/silent") == 6)
    await client.connection.close()
    await wait_until(lambda: origin.open_connections == 0)


async def test_the_time_out_covers_all_attempts(origin: Origin) -> None:
    client = Client(origin, limits=FetchLimits(idle_timeout_s=0.3, max_retries=100))
    start = asyncio.get_running_loop().time()
    with pytest.raises(FetchTimeoutError):
        await client.fetch(origin.stall("/silent"), timeout_s=0.8)
    assert asyncio.get_running_loop().time() - start < 15  # a hundred attempts take 30 s
    await client.connection.close()


async def test_a_slow_name_is_given_up(origin: Origin) -> None:
    async def slow(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    client = Client(origin, resolve=slow)
    with pytest.raises(FetchTimeoutError):
        await client.fetch("http://slow.test/", timeout_s=0.2)
    await client.connection.close()


async def test_cancelling_closes_the_connection(origin: Origin, client: Client) -> None:
    origin.endless("/e", pause_s=0.01)
    for path in ("/e", "/silent"):
        origin.stall("/silent", before_head=True)
        task = asyncio.create_task(client.fetch(origin.url(path), max_bytes=1 << 40))
        await wait_until(lambda path=path: origin.hits(path))  # type: ignore[misc]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: origin.open_connections == 0)


# -- redirects


async def test_a_relative_redirect_is_followed(origin: Origin, client: Client) -> None:
    origin.serve("/k1_gray.jpg", b"picture")
    assert await client.fetch(origin.redirect("/d/r", "../k1_gray.jpg")) == b"picture"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_all_kinds_of_redirect_are_followed_by_get(
    origin: Origin, client: Client, status: int
) -> None:
    origin.serve("/a", b"x")
    assert await client.fetch(origin.redirect("/r", "/a", status=status)) == b"x"
    assert [request.method for request in origin.requests] == ["GET", "GET"]


async def test_ten_redirects_are_the_most(origin: Origin, client: Client) -> None:
    assert await client.fetch(origin.redirect_chain("/n", 10, b"x")) == b"x"
    seen = origin.hits()
    with pytest.raises(UnprocessableMediaError, match="more than 10"):
        await client.fetch(origin.redirect_chain("/n", 11, b"x"))
    assert origin.hits() - seen == 11
    with pytest.raises(UnprocessableMediaError, match="more than 0"):
        await client.fetch(origin.redirect("/r", "/a"), max_redirects=0)


async def test_redirects_can_be_turned_off(origin: Origin, client: Client) -> None:
    with pytest.raises(UnprocessableMediaError, match="not allowed"):
        await client.fetch(origin.redirect("/r", "/a"), allow_redirects=False)
    assert origin.hits("/a") == 0


async def test_a_redirect_without_a_target_is_an_error(origin: Origin, client: Client) -> None:
    with pytest.raises(UnprocessableMediaError, match="nowhere"):
        await client.fetch(origin.serve("/r", b"", status=302))


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/hostname",
        "data:image/png;base64,AAAA",
        "http://127.0.0.1:{inside}/secret.png",
        "http://2130706433:{inside}/secret.png",
        "http://[::ffff:127.0.0.1]:{inside}/secret.png",
        "http://me:pw@127.0.0.1:{origin}/a",
        "//127.0.0.1:{inside}/secret.png",
        "http:\\\\127.0.0.1:{inside}\\secret.png",
        "http://inside.test:{inside}/secret.png",
    ],
)
async def test_a_redirect_passes_the_same_checks(
    origin: Origin, inside: Origin, location: str
) -> None:
    client = Client(origin, resolve=StubResolver({"inside.test": ["127.0.0.1"]}))
    origin.serve("/a", b"x")
    url = origin.redirect("/r", location.format(inside=inside.port, origin=origin.port))
    with pytest.raises(BlockedURLError):
        await client.fetch(url)
    assert inside.num_connections == 0
    assert origin.hits() == 1
    await client.connection.close()


async def test_a_redirect_stays_among_the_allowed_domains(origin: Origin, inside: Origin) -> None:
    resolver = StubResolver({"good.test": ["127.0.0.1"], "evil.test": ["127.0.0.1"]})
    client = Client(origin, resolve=resolver)
    policy: dict[str, Any] = {
        "allowed_domains": ("good.test",),
        "allowed_private_networks": ("127.0.0.0/8",),
    }
    origin.serve("/a", b"x")
    good, evil = (origin.url("/a", host=f"{name}.test") for name in ("good", "evil"))
    origin.redirect("/good", good)
    origin.redirect("/evil", evil)
    assert await client.fetch(origin.url("/good", host="good.test"), **policy) == b"x"
    with pytest.raises(BlockedURLError, match="allowed domains"):
        await client.fetch(origin.url("/evil", host="good.test"), **policy)
    assert "evil.test" not in resolver.queries
    await client.connection.close()


async def test_credentials_go_to_their_own_origin_only(origin: Origin, inside: Origin) -> None:
    client = Client(origin)
    networks = (origin.netloc, inside.netloc)
    inside.serve("/b", b"x")
    origin.redirect("/a", "/again")
    origin.redirect("/again", inside.url("/b"))
    url = f"http://me:p%40ss@{origin.netloc}/a"
    assert await client.fetch(url, allowed_private_networks=networks) == b"x"
    expected = "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert [request.headers.get("authorization") for request in origin.requests] == [expected] * 2
    assert "authorization" not in inside.requests[0].headers
    await client.connection.close()


async def test_cookies_are_not_kept(origin: Origin, client: Client) -> None:
    async def set_cookie(exchange: Exchange) -> None:
        headers = {"Set-Cookie": "id=1; Path=/", "Location": "/a"}
        await exchange.answer(b"", 302, headers)

    origin.serve("/a", b"x")
    origin.route("/r", set_cookie)
    for _ in range(2):
        await client.fetch(origin.url("/r"))
    assert not any("cookie" in request.headers for request in origin.requests)


# -- names and addresses


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "localhost",
        "localhost.",
        "inside.test",
        "mixed.test",
        "mixed6.test",
        "2130706433",
        "0x7f.1",
        "127.0.0.%31",
    ],
)
async def test_nothing_inside_is_reached(inside: Origin, host: str) -> None:
    resolver = StubResolver(
        {
            "inside.test": ["127.0.0.1"],
            "localhost": ["127.0.0.1", "::1"],
            "mixed.test": ["93.184.215.14", "127.0.0.1"],
            "mixed6.test": ["2606:4700::1", "::ffff:127.0.0.1"],
        }
    )
    connection = HttpConnection(resolve=resolver)
    with pytest.raises(BlockedURLError) as caught:
        url = parse_url(f"http://{host}:{inside.port}/secret.png")
        assert isinstance(url, HttpURL)
        await connection.fetch(url, policy=URLPolicy(FetchPolicy()), timeout_s=5, max_bytes=MIB)
    assert caught.value.status == 400
    assert "127" not in str(caught.value)
    assert inside.num_connections == 0
    await connection.close()


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6")
async def test_ipv6_is_spoken() -> None:
    with Origin(host="::1") as six:
        client = Client(six, resolve=StubResolver({"six.test": ["::1"]}))
        url = six.serve("/a", b"x")
        assert await client.fetch(url) == b"x"
        assert six.requests[0].headers["host"] == six.netloc
        named = six.url("/a", host="six.test")
        assert await client.fetch(named, allowed_private_networks=("::1/128",)) == b"x"
        with pytest.raises(BlockedURLError):
            await client.fetch(named)
        await client.connection.close()


async def test_a_name_that_changes_its_mind_changes_nothing(origin: Origin, inside: Origin) -> None:
    """One query per hop: the answer that was checked is the one that is connected to."""
    resolver = StubResolver({"rebind.test": [["127.0.0.1"], ["10.0.0.1"], ["10.0.0.1"]]})
    client = Client(origin, resolve=resolver)
    policy = {"allowed_private_networks": ("127.0.0.1/32",)}
    url = origin.url("/a", host="rebind.test")
    origin.serve("/a", b"x", headers={"Connection": "close"})
    assert await client.fetch(url, **policy) == b"x"
    assert resolver.queries == ["rebind.test"]
    assert origin.requests[0].headers["host"] == f"rebind.test:{origin.port}"
    await wait_until(lambda: origin.open_connections == 0)
    with pytest.raises(BlockedURLError):
        await client.fetch(url, **policy)
    await client.connection.close()


async def test_a_connection_of_one_policy_serves_no_other(origin: Origin) -> None:
    client = Client(origin, resolve=StubResolver({"media.test": ["127.0.0.1"]}))
    origin.serve("/a", b"x")
    url = origin.url("/a", host="media.test")
    assert await client.fetch(url, allowed_private_networks=("127.0.0.0/8",)) == b"x"
    with pytest.raises(BlockedURLError):
        await client.fetch(url, allowed_private_networks=("10.0.0.0/8",))
    assert origin.num_connections == 1
    await client.connection.close()


async def test_a_name_without_addresses_is_a_bad_gateway(origin: Origin) -> None:
    resolver = StubResolver({"empty.test": []})
    client = Client(origin, resolve=resolver)
    for host in ("empty.test", "unknown.test"):
        with pytest.raises(FetchError) as caught:
            await client.fetch(f"http://{host}/?SECRET")
        assert caught.value.status == 502
        assert no_secrets(caught.value)
    assert resolver.queries.count("empty.test") == 1
    await client.connection.close()


async def test_a_resolver_that_fails_for_now_is_asked_again(origin: Origin) -> None:
    queries: list[str] = []

    async def busy(host: str, port: int) -> list[str]:
        queries.append(host)
        if len(queries) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return ["127.0.0.1"]

    client = Client(origin, resolve=busy)
    origin.serve("/a", b"x")
    url = origin.url("/a", host="busy.test")
    assert await client.fetch(url, allowed_private_networks=("127.0.0.0/8",)) == b"x"
    await client.connection.close()


async def test_the_environments_proxy_is_not_used(
    origin: Origin, inside: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{inside.netloc}")
    client = Client(origin)
    assert await client.fetch(origin.serve("/a", b"x")) == b"x"
    assert inside.num_connections == 0
    await client.connection.close()


async def test_the_systems_resolver_is_the_default(origin: Origin) -> None:
    client = Client(origin)
    networks = (f"localhost:{origin.port}",)
    url = origin.url("/a", host="localhost")
    origin.serve("/a", b"x")
    assert await client.fetch(url, allowed_private_networks=networks) == b"x"
    await client.connection.close()


# -- TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secure(authority: trustme.CA) -> Iterator[Origin]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("media.test").configure_cert(context)
    with Origin(ssl_context=context) as origin:
        yield origin


async def test_tls_names_the_host_of_the_url(secure: Origin, authority: trustme.CA) -> None:
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    resolver = StubResolver({"media.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]})
    client = Client(secure, resolve=resolver, ssl_context=trusted)
    policy: dict[str, Any] = {"allowed_private_networks": ("127.0.0.0/8",), "https_only": True}
    secure.serve("/a", b"x")
    assert await client.fetch(secure.url("/a", host="media.test"), **policy) == b"x"
    assert secure.requests[0].server_name == "media.test"
    with pytest.raises(FetchError, match="TLS"):  # The certificate is for another name.
        await client.fetch(secure.url("/a", host="other.test"), **policy)
    with pytest.raises(FetchError, match="TLS"):
        await client.fetch(secure.url("/a"), **policy)
    assert secure.hits() == 1
    await client.connection.close()


async def test_an_unknown_authority_is_not_trusted(secure: Origin) -> None:
    client = Client(secure, resolve=StubResolver({"media.test": ["127.0.0.1"]}))
    with pytest.raises(FetchError, match="TLS"):
        await client.fetch(
            secure.url("/a", host="media.test"), allowed_private_networks=("127.0.0.0/8",)
        )
    assert secure.num_connections <= 1  # No second attempt.
    await client.connection.close()


async def test_https_only_holds_for_every_hop(origin: Origin, client: Client) -> None:
    with pytest.raises(BlockedURLError, match="https"):
        await client.fetch(origin.serve("/a", b"x"), https_only=True)
    assert origin.num_connections == 0


# -- the budget


async def test_a_budget_holds_what_arrives(origin: Origin, client: Client) -> None:
    budget = ByteBudget(3 * MIB)
    held: list[int] = []
    gate = Gate()

    async def handler(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Length": str(2 * MIB)})
        await exchange.send(bytes(1000))
        await gate.passed()
        await exchange.send(bytes(2 * MIB - 1000))

    origin.route("/a", handler)
    fetches = [
        asyncio.create_task(client.fetch(origin.url("/a"), max_bytes=4 * MIB, budget=budget))
        for _ in range(2)
    ]
    await wait_until(lambda: origin.hits("/a") == 2 and budget.num_waiting == 1)
    held.append(budget.held_bytes)
    gate.open()
    assert [len(body) for body in await asyncio.gather(*fetches)] == [2 * MIB] * 2
    held.append(budget.held_bytes)
    assert held == [2 * MIB, 0]


async def test_a_body_that_outgrows_the_budget_is_given_up(origin: Origin, client: Client) -> None:
    budget = ByteBudget(3 * MIB)
    with pytest.raises(OverloadedError):
        await client.fetch(origin.endless("/e"), max_bytes=64 * MIB, budget=budget)
    assert budget.held_bytes == 0
    with pytest.raises(MediaTooLargeError):
        url = origin.endless("/f", content_length=4 * MIB)
        await client.fetch(url, max_bytes=64 * MIB, budget=budget)
    assert budget.held_bytes == 0


# -- several loops


def test_a_connection_serves_several_loops(origin: Origin) -> None:
    client = Client(origin)
    url = origin.serve("/a", b"x")

    async def once() -> bytes:
        try:
            return await client.fetch(url)
        finally:
            await client.connection.close_loop()

    assert [asyncio.run(once()) for _ in range(2)] == [b"x"] * 2
    asyncio.run(client.connection.close())


async def test_a_closed_connection_says_so(origin: Origin, client: Client) -> None:
    await client.connection.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.fetch(origin.serve("/a", b"x"))


def test_the_errors_of_this_module_are_ours() -> None:
    for error in (FetchError, FetchTimeoutError, OriginRefusedError, MediaTooLargeError):
        assert issubclass(error, LazyDecodeError)
