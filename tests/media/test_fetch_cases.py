"""The case requests about fetching (`r4-*` and others), against the library alone.

What a case says about statuses is checked on the errors' own statuses; the server's tests check
the same on its answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lazydecode.errors import LazyDecodeError
from lazydecode.limits import FetchLimits, FetchPolicy
from lazydecode.media.connector import MediaConnector
from lazydecode.media.http import HttpConnection
from lazydecode.media.image import ImageMediaIO
from tests.origin import Gate, Origin, StubResolver, wait_until

CASES = Path(__file__).parent.parent / "cases"
MEDIA = CASES / "media"
REQUESTS: dict[str, dict[str, Any]] = {
    request["id"]: request
    for request in json.loads((CASES / "requests.json").read_text())["requests"]
}
FETCH_IDS = sorted(
    name
    for name, request in REQUESTS.items()
    if name.startswith("r4-") and "parts" in request["request"]
)
RESOLVER = {
    "mixed.test": ["93.184.215.14", "127.0.0.1"],
    "inside.test": ["127.0.0.1"],
    "example.com.evil.test": ["127.0.0.1"],
    "evil-example.com": ["127.0.0.1"],
}
EXPECT_502 = {"r4-refused"}
"""A judgement of the case that ours replaces: the client's request is fine, the origin is not,
and the same request can succeed later; so it is a retryable 502."""


class World:
    """The media server and the inside server of a case, and what its URLs stand for."""

    def __init__(self, media: Origin, inside: Origin, closed: str) -> None:
        self.media = media
        self.inside = inside
        self.closed = closed

    def url(self, text: str) -> str:
        for name, value in {
            "{media}": self.media.netloc,
            "{inside}": self.inside.netloc,
            "{inside_port}": str(self.inside.port),
            "{closed_port}": self.closed,
            "{tree}": str(MEDIA / "k4_tree"),
            "{out}": str(MEDIA),
        }.items():
            text = text.replace(name, value)
        return text

    @asynccontextmanager
    async def connector(self, config: dict[str, Any]) -> AsyncIterator[MediaConnector]:
        root = config.get("local_root")
        allow = tuple(self.url(entry) for entry in config.get("allow", ()))
        policy = FetchPolicy(
            allowed_domains=(*allow, self.closed) if allow else (),
            allowed_private_networks=(self.media.netloc, self.closed),
            allowed_local_media_path=Path(self.url(root)) if root else None,
        )
        limits = FetchLimits(
            max_bytes=config.get("max_bytes", FetchLimits().max_bytes),
            image_timeout_s=config.get("timeout_s", 5),
            max_retries=config.get("retries", 3),
        )
        connection = HttpConnection(limits=limits, resolve=StubResolver(RESOLVER))
        async with MediaConnector(connection, policy=policy, limits=limits) as connector:
            yield connector
        await connection.close()


@pytest.fixture
def world(origin: Origin, inside: Origin) -> Iterator[World]:
    gray = (MEDIA / "k1_gray.jpg").read_bytes()
    for name in ("k1_gray.jpg", "other-name.jpg", "n/0"):
        origin.serve(f"/{name}", gray)
    for step in range(1, 12):
        origin.redirect(f"/n/{step}", f"/n/{step - 1}")
    origin.serve(
        "/k1_html_error_page.jpg",
        (MEDIA / "k1_html_error_page.jpg").read_bytes(),
        headers={"Content-Type": "image/jpeg"},
    )
    origin.serve(
        "/k4_gzip_bomb.gz",
        (MEDIA / "k4_gzip_bomb.gz").read_bytes(),
        headers={"Content-Encoding": "gzip"},
    )
    origin.redirect("/d/r", "../k1_gray.jpg")
    origin.endless("/big", content_length=1 << 30, pause_s=0.05)
    origin.trickle("/slow", every_s=0.2, in_head=True)
    origin.serve("/s/404", b"gone", status=404)
    origin.serve_in_turn("/flaky", (503, b""), (503, b""), (200, gray))
    origin.serve_in_turn("/once", (404, b""), (200, gray))
    with Origin() as gone:
        closed = gone.netloc
    yield World(origin, inside, closed)


def variants(name: str, url: str) -> list[str]:
    """What the case's text adds to its one URL."""
    if name == "r4-control-chars":
        return [url.replace("\t", char) for char in "\t\r\n\0"]
    if name == "r4-allow-suffix":
        return [url, "http://evil-example.com/a.png"]
    return [url]


@pytest.mark.parametrize("name", FETCH_IDS)
async def test_case(world: World, name: str) -> None:
    case = REQUESTS[name]
    expected = case["expected"]
    redirects = {"r4-redirect-metadata": "http://169.254.169.254/latest/meta-data/"}
    world.media.redirect("/r", redirects.get(name, "file:///etc/hostname"))
    urls = [
        part["image_url"]["url"] for part in case["request"]["parts"] if part["type"] == "image_url"
    ]
    async with world.connector(case["config"]) as connector:
        for url in variants(name, world.url(urls[-1])):
            start = time.monotonic()
            status, size = 200, None
            try:
                ref = await connector.fetch_image_async(url, ImageMediaIO())
                size = list(ref.decode().size)
            except LazyDecodeError as exc:
                status = exc.status
            if "within_s" in expected:
                assert time.monotonic() - start < expected["within_s"]
            if name in EXPECT_502:
                assert status == 502
            elif expected["outcome"] == "ok":
                assert (status, size) == (200, expected["size"])
            else:
                assert 400 <= status < 500 or status == 504
                if "504" not in expected["http"]:
                    assert status < 500
                assert status == expected.get("settled_status", status)
    assert world.inside.num_connections == 0
    if "requests_seen" in expected:
        assert world.media.hits() == expected["requests_seen"]
    if "bytes_read_at_most" in expected:
        assert world.media.bytes_sent <= 1024 * 1024
    if "max_requests_seen" in expected:
        assert world.media.hits() <= expected["max_requests_seen"]


async def test_r5_one_identity(world: World) -> None:
    import base64

    case = REQUESTS["r5-one-identity"]
    data = base64.b64encode((MEDIA / "k1_gray.jpg").read_bytes()).decode()
    keys = set()
    async with world.connector({**case["config"], "local_root": "{out}"}) as connector:
        for request in case["request"]["sequence"]:
            url = world.url(request["parts"][0]["image_url"]["url"])
            url = url.replace("{dataurl:k1_gray.jpg}", f"data:image/jpeg;base64,{data}")
            keys.add((await connector.fetch_image_async(url, ImageMediaIO())).key)
    assert len(keys) == case["expected"]["identities"]


async def test_r5_failure_not_cached(world: World) -> None:
    async with world.connector(REQUESTS["r5-failure-not-cached"]["config"]) as connector:
        url = world.media.url("/once")
        with pytest.raises(LazyDecodeError) as caught:
            await connector.fetch_image_async(url, ImageMediaIO())
        assert caught.value.status == 422
        assert (await connector.fetch_image_async(url, ImageMediaIO())).decode()


async def test_r6_first_waiter_cancelled(world: World) -> None:
    body = (MEDIA / "k1_gray.jpg").read_bytes()

    gate = Gate()
    world.media.serve("/late", body, gate=gate)
    async with world.connector({}) as connector:
        url = world.media.url("/late")
        first, second = (
            asyncio.create_task(connector.fetch_image_async(url, ImageMediaIO())) for _ in range(2)
        )
        await gate.wait_arrived_async()
        first.cancel()
        await asyncio.wait((first,))
        gate.open()
        assert (await second).decode().size == (224, 224)
        assert first.cancelled()
    assert world.media.hits("/late") == 1


async def test_r6_hangup_in_fetch(world: World) -> None:
    async with world.connector({}) as connector:
        url = world.media.endless("/endless", pause_s=0.05)
        fetch = asyncio.create_task(connector.fetch_image_async(url, ImageMediaIO()))
        await wait_until(lambda: world.media.bytes_sent > 0)
        fetch.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await wait_until(lambda: world.media.open_connections == 0)
        assert time.monotonic() - start < 20


DATA_URL_CASES = sorted(MEDIA.glob("k4_dataurl_*.txt"))


@pytest.mark.parametrize("path", DATA_URL_CASES, ids=lambda path: path.stem)
async def test_data_url_file(world: World, path: Path) -> None:
    async with world.connector({}) as connector:
        fetch: Callable[[], Awaitable[Any]] = lambda: connector.fetch_image_async(  # noqa: E731
            path.read_bytes(), ImageMediaIO()
        )
        if path.stem == "k4_dataurl_empty":
            with pytest.raises(LazyDecodeError) as caught:
                await fetch()
            assert 400 <= caught.value.status < 500
        else:
            assert (await fetch()).decode().size == (24, 16)
