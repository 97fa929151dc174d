from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazydecode.errors import (
    BlockedURLError,
    CorruptMediaError,
    FetchError,
    LazyDecodeError,
    MediaTooLargeError,
    OriginRefusedError,
    OverloadedError,
    UnprocessableMediaError,
    ValidationError,
)
from lazydecode.limits import MIB, DecodeLimits, DownloadCacheLimits, FetchLimits, FetchPolicy
from lazydecode.media import at_once, base, payloads
from lazydecode.media import connector as connector_module
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import MediaIO, MediaRef, PayloadDigest
from lazydecode.media.budget import ByteBudget
from lazydecode.media.connector import (
    MediaConnector,
    MediaPayload,
    trace_fetch,
)
from lazydecode.media.connector_registry import MEDIA_CONNECTOR_REGISTRY, MediaConnectorRegistry
from lazydecode.media.download_cache import DownloadCache
from lazydecode.media.executor import LazyThreadPool, MediaExecutor, global_thread_pool
from lazydecode.media.http import HttpConnection
from lazydecode.media.identity import derive_media_key
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import VideoMediaIO
from tests.builders import make_image, make_jpeg, make_png, make_wav
from tests.builders_video import make_mp4
from tests.origin import Exchange, Gate, Origin, StubResolver, wait_until

REPEATS = int(os.environ.get("LAZYDECODE_TEST_REPEATS", "1"))


class RawIO(MediaIO[bytes]):
    """The identity as a decoder, with a size cap and a spec of its own."""

    def __init__(self, max_bytes: int | None = None, **settings: Any) -> None:
        self.max_bytes = max_bytes
        self.settings = settings

    def get_max_bytes(self) -> int | None:
        return self.max_bytes

    def get_decode_spec(self) -> base.DecodeSpec:
        return base.DecodeSpec(self.settings)

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        return base64.b64decode(data)

    def load_file(self, filepath: Path) -> bytes:
        return filepath.read_bytes()


RAW = RawIO()

# fmt: off
_PIECES = st.lists(
    st.sampled_from([
        "http", "https", "data", "file", "s3", ":", "//", "/", "@", "127.0.0.1", "[::1]", "x.test",
        "%", "?", "#", "\\", " ", ",", ";base64", "..", ":80", "\ud800", "é", "\0",
    ]),
    max_size=8,
).map("".join)
# fmt: on


def data_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def make_connector(*origins: Origin, **options: Any) -> MediaConnector:
    policy = options.pop("policy", {})
    networks = tuple(origin.netloc for origin in origins)
    return MediaConnector(
        policy=FetchPolicy(**{"allowed_private_networks": networks, **policy}), **options
    )


@pytest.fixture
async def connector(origin: Origin) -> AsyncIterator[MediaConnector]:
    async with make_connector(origin) as connector:
        yield connector


# -- the three kinds, by every scheme, in both forms


async def test_each_kind_comes_by_each_scheme_as_the_same_media(
    origin: Origin, tmp_path: Path
) -> None:
    media: list[tuple[str, bytes, MediaIO[Any]]] = [
        ("image", make_png((40, 30)), ImageMediaIO()),
        ("audio", make_wav(), AudioMediaIO()),
        ("video", make_mp4(), VideoMediaIO(ImageMediaIO())),
    ]
    async with make_connector(origin, allowed_local_media_path=tmp_path) as connector:
        for modality, data, media_io in media:
            (tmp_path / "item").write_bytes(data)
            data_url = f"data:{modality}/x;base64,{base64.b64encode(data).decode()}"
            urls = [origin.serve("/item", data), f"file://{tmp_path}/item", data_url]
            fetch = getattr(connector, f"fetch_{modality}_async")
            refs = [await fetch(url, media_io) for url in [*urls, data_url.encode()]]
            for ref in refs:
                assert isinstance(ref, MediaRef)
                assert not ref.is_decoded
                assert ref.data == data
                assert ref.spec == media_io.get_decode_spec()
            assert len({ref.key for ref in refs}) == 1
            refs[0].decode()


def test_blocking_forms_forward(origin: Origin) -> None:
    png = make_png((40, 30))
    url = origin.serve("/a.png", png)
    wav = origin.serve("/a.wav", make_wav())
    mp4 = origin.serve("/a.mp4", make_mp4())
    before = set(threading.enumerate())
    with make_connector(origin) as connector:
        image_io, audio_io = ImageMediaIO(), AudioMediaIO()
        video_io = VideoMediaIO(image_io)
        assert connector.fetch_image(url, image_io).decode().size == (40, 30)
        assert connector.fetch_audio(wav, audio_io).decode()[0].ndim == 1
        assert connector.fetch_video(mp4, video_io).decode()[0].ndim == 4
        assert connector.load_from_url(url, RAW).decode() == png
        assert connector.load_base64("image/png", base64.b64encode(png), RAW).decode() == png
        video, audio = connector.fetch_video_and_audio(mp4, RAW, RawIO(x=1))
        assert video.data is audio.data
        with pytest.raises(OriginRefusedError):
            connector.fetch_image(origin.url("/missing"), image_io)
    started = set(threading.enumerate()) - before
    assert "lazydecode-portal" not in {thread.name for thread in started}
    with pytest.raises(RuntimeError):
        connector.fetch_image(url, image_io)


def test_many_threads_share_one_download(origin: Origin) -> None:
    gate = Gate()
    url = origin.serve("/a", b"payload", gate=gate)
    with make_connector(origin) as connector:
        refs: list[MediaRef[bytes]] = []
        users = [
            threading.Thread(target=lambda: refs.append(connector.fetch_image(url, RAW)))
            for _ in range(8)
        ]
        for user in users:
            user.start()
        gate.wait_arrived()
        deadline = time.monotonic() + 120
        while sum(here.flights.num_waiting for here in connector._loops.values()) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        gate.open()
        for user in users:
            user.join()
        assert len(refs) == 8
        assert origin.hits("/a") == 1


def test_an_unclosed_connector_does_not_keep_the_interpreter(origin: Origin) -> None:
    url = origin.serve("/a", make_png((4, 3)))
    script = f"""
from lazydecode.limits import FetchPolicy
from lazydecode.media import ImageMediaIO, MediaConnector
connector = MediaConnector(policy=FetchPolicy(allowed_private_networks=({origin.netloc!r},)))
print(connector.fetch_image({url!r}, ImageMediaIO()).decode().size)
"""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (0, "(4, 3)\n"), result.stderr
    assert result.stderr == ""


def test_one_connector_serves_one_loop_after_the_other(origin: Origin) -> None:
    url = origin.serve("/a", b"payload")
    connector = make_connector(origin)

    async def once() -> bytes:
        ref = await connector.fetch_image_async(url, RAW)
        await connector._close_loop()
        return ref.decode()

    assert [asyncio.run(once()) for _ in range(2)] == [b"payload"] * 2
    assert connector.fetch_image(url, RAW).decode() == b"payload"
    asyncio.run(connector.close())


# -- one payload, two decoders


async def test_a_pair_has_one_payload_and_one_digest_by_every_scheme(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"container" * 100
    (tmp_path / "a.mp4").write_bytes(data)
    digests: list[int] = []

    class Counted(PayloadDigest):
        __slots__ = ()

        def __init__(self, data: bytes) -> None:
            digests.append(len(data))
            super().__init__(data)

    for module in (base, connector_module, payloads, at_once):
        monkeypatch.setattr(module, "PayloadDigest", Counted)
    video_io, audio_io = RawIO(kind="video"), RawIO(kind="audio")
    async with make_connector(origin, allowed_local_media_path=tmp_path) as connector:
        for url in (
            origin.serve("/a.mp4", data),
            f"file://{tmp_path}/a.mp4",
            "data:video/mp4;base64," + base64.b64encode(data).decode(),
        ):
            digests.clear()
            video, audio = await connector.fetch_video_and_audio_async(url, video_io, audio_io)
            assert video.data is audio.data
            assert video.data == data
            assert digests == [len(data)]
            assert video.key == base.derive_media_key(data, video_io.get_decode_spec())
            assert audio.key == base.derive_media_key(data, audio_io.get_decode_spec())
            assert video.key != audio.key
    assert origin.hits("/a.mp4") == 1


async def test_a_pair_takes_the_strictest_cap_and_the_videos_time_out(
    origin: Origin, tmp_path: Path
) -> None:
    data = bytes(1000)
    (tmp_path / "a").write_bytes(data)
    urls = (
        origin.serve("/a", data),
        f"file://{tmp_path}/a",
        "data:;base64," + base64.b64encode(data).decode(),
    )
    limits = FetchLimits(audio_timeout_s=0.01, image_timeout_s=0.01, video_timeout_s=5)
    async with make_connector(origin, allowed_local_media_path=tmp_path, limits=limits) as c:
        for url in urls:
            for video_cap, audio_cap in ((None, 999), (999, None), (999, 5000)):
                with pytest.raises(MediaTooLargeError, match="999"):
                    await c.fetch_video_and_audio_async(url, RawIO(video_cap), RawIO(audio_cap))
            await c.fetch_video_and_audio_async(url, RawIO(), RawIO(1000))


# -- size


@pytest.mark.parametrize("scheme", ["http", "data", "data-percent", "data-wrapped", "file"])
async def test_caps_hold_for_every_scheme(origin: Origin, tmp_path: Path, scheme: str) -> None:
    data = bytes(range(256)) * 4
    text = base64.b64encode(data).decode()
    (tmp_path / "a").write_bytes(data)
    url = {
        "http": origin.serve("/a", data),
        "file": f"file://{tmp_path}/a",
        "data": f"data:;base64,{text}",
        "data-percent": "data:," + "".join(f"%{byte:02x}" for byte in data),
        "data-wrapped": "data:;base64," + "\n".join(text[i : i + 4] for i in range(0, 1368, 4)),
    }[scheme]
    limits = FetchLimits(max_bytes=1024)
    async with make_connector(origin, allowed_local_media_path=tmp_path, limits=limits) as c:
        assert (await c.fetch_image_async(url, RAW)).decode() == data
        with pytest.raises(MediaTooLargeError, match="1023 bytes") as caught:
            await c.fetch_image_async(url, RawIO(1023))
        assert caught.value.status == 422
    limits = FetchLimits(max_bytes=1023)
    async with make_connector(origin, allowed_local_media_path=tmp_path, limits=limits) as c:
        with pytest.raises(MediaTooLargeError, match="1023 bytes"):
            await c.fetch_image_async(url, RawIO(5000))


async def test_an_oversized_payload_is_not_decoded_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "decode_data_url", lambda _: pytest.fail("decoded"))
    async with MediaConnector() as connector:
        url = "data:;base64," + "A" * 4000
        with pytest.raises(MediaTooLargeError):
            await connector.fetch_image_async(url, RawIO(2000))


async def test_audio_over_its_own_limit_is_a_validation_error_unless_downloaded(
    origin: Origin, tmp_path: Path
) -> None:
    audio_io = AudioMediaIO(limits=DecodeLimits(max_audio_clip_bytes=MIB))
    data = bytes(2 * MIB)
    (tmp_path / "a.wav").write_bytes(data)
    async with make_connector(origin, allowed_local_media_path=tmp_path) as connector:
        for url in (
            f"file://{tmp_path}/a.wav",
            "data:audio/wav;base64," + base64.b64encode(data).decode(),
        ):
            with pytest.raises(ValidationError, match="Maximum file size exceeded") as caught:
                await connector.fetch_audio_async(url, audio_io)
            assert caught.value.parameter == "audio_filesize_mb"
            assert caught.value.value == pytest.approx(2, abs=0.01)
            assert caught.value.modality == "audio"
        with pytest.raises(MediaTooLargeError):
            await connector.fetch_audio_async(origin.serve("/a.wav", data), audio_io)


# -- errors


async def test_errors_name_the_modality_and_no_secret(origin: Origin) -> None:
    async with make_connector(origin, policy={"allowed_local_media_path": None}) as connector:
        url = f"http://me:SECRET@{origin.netloc}/a.png?sig=SECRET#SECRET"
        with pytest.raises(OriginRefusedError) as caught:
            await connector.fetch_image_async(url, RAW)
        error = caught.value.at("image", 3)
        assert (error.modality, error.index, error.parameter) == ("image", 3, "image_url")
        assert error.value == f"http://{origin.netloc}/a.png"
        for bad, shown in (
            ("file:///home/SECRET.png", "file:"),
            ("data:image/png;base64,SECRET!", "data:"),
            ("http://[SECRET/", "an invalid URL"),
        ):
            with pytest.raises(LazyDecodeError) as caught_bad:
                await connector.fetch_video_async(bad, RAW)
            error = caught_bad.value
            assert (error.modality, error.parameter) == ("video", "video_url")
            assert error.value == shown
            assert "SECRET" not in f"{error} {error!r} {error.value}"


async def test_local_files_are_off_by_default(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    async with MediaConnector() as connector:
        with pytest.raises(BlockedURLError, match="Cannot load local files"):
            await connector.fetch_image_async(f"file://{tmp_path}/a", RAW)


async def test_spaces_around_a_url_do_not_matter(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    async with make_connector(origin, allowed_local_media_path=tmp_path) as connector:
        for url in (origin.serve("/a", b"x"), f"file://{tmp_path}/a"):
            assert (await connector.fetch_image_async(f"  {url} ", RAW)).data == b"x"


@pytest.mark.parametrize("url", ["ftp://x.test/a", "//x.test/a", "/etc/hostname", "", "s3://b/k"])
async def test_other_schemes_are_refused(url: str) -> None:
    async with MediaConnector() as connector:
        with pytest.raises(BlockedURLError, match="either a HTTP, data or file URL"):
            await connector.fetch_image_async(url, RAW)


@given(_PIECES)
@settings(deadline=None)
def test_whatever_a_url_says_the_error_is_ours(text: str) -> None:
    async def fetch() -> None:
        connection = HttpConnection(resolve=StubResolver({}))
        async with MediaConnector(connection, allowed_local_media_path="/usr") as connector:
            url: Any = text if len(text) % 2 else text.encode("utf-8", "surrogatepass")
            try:
                await connector.fetch_image_async(url, RAW)
            except LazyDecodeError as exc:
                assert exc.status < 600
        await connection.close()

    asyncio.run(fetch())


def test_misuse_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        MediaConnector(allowed_local_media_path=str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="must be a host"):
        MediaConnector(allowed_media_domains=["http://x"])


async def test_errors_of_a_decoder_pass_unchanged(origin: Origin) -> None:
    class Strange(RawIO):
        def load_bytes_ref(
            self, data: bytes, *, digest: PayloadDigest | None = None
        ) -> MediaRef[bytes]:
            raise KeyError("strange")

    async with make_connector(origin) as connector:
        for url in (origin.serve("/a", b"x"), "data:,x"):
            with pytest.raises(KeyError, match="strange"):
                await connector.fetch_image_async(url, Strange())


# -- single flight


async def test_concurrent_fetches_share_one_request_and_one_payload(
    origin: Origin, connector: MediaConnector
) -> None:
    gate = Gate()
    url = origin.serve("/a", b"payload", gate=gate)
    fetches = [asyncio.create_task(connector.fetch_image_async(url, RAW)) for _ in range(64)]
    await gate.wait_arrived_async()
    gate.open()
    refs = await asyncio.gather(*fetches)
    assert origin.hits("/a") == 1
    assert len({id(ref.data) for ref in refs}) == 1
    assert len({id(ref) for ref in refs}) == 64  # Each may release its own.
    refs[0].release()
    assert refs[1].decode() == b"payload"


async def test_other_caps_and_other_queries_are_other_flights(
    origin: Origin, connector: MediaConnector
) -> None:
    gate = Gate()
    url = origin.serve("/a", b"payload", gate=gate)
    fetches = [
        asyncio.create_task(connector.fetch_image_async(u, io))
        for u, io in ((url, RAW), (url, RawIO(3)), (url + "?q", RAW), (url + "#f", RAW))
    ]
    await wait_until(lambda: origin.hits("/a") == 3)
    gate.open()
    outcomes = await asyncio.gather(*fetches, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [
        MediaRef,
        MediaTooLargeError,
        MediaRef,
        MediaRef,
    ]


async def test_a_failure_reaches_each_with_its_own_error(
    origin: Origin, connector: MediaConnector
) -> None:
    gate = Gate()
    url = origin.serve("/a", b"", status=404, gate=gate)
    fetches = [asyncio.create_task(connector.fetch_image_async(url, RAW)) for _ in range(3)]
    await gate.wait_arrived_async()
    gate.open()
    errors = await asyncio.gather(*fetches, return_exceptions=True)
    assert {type(error) for error in errors} == {OriginRefusedError}
    assert len({id(error) for error in errors}) == 3
    assert origin.hits("/a") == 1


async def test_a_cancelled_first_fetch_does_not_harm_the_second(
    origin: Origin, connector: MediaConnector
) -> None:
    gate = Gate()
    url = origin.serve("/a", b"payload", gate=gate)
    first, second = (asyncio.create_task(connector.fetch_image_async(url, RAW)) for _ in range(2))
    await gate.wait_arrived_async()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.open()
    assert (await second).decode() == b"payload"
    assert origin.hits("/a") == 1


async def test_a_cancelled_fetch_ends_with_the_thread_that_reads_its_payload(
    connector: MediaConnector,
) -> None:
    started, go_on = threading.Event(), threading.Event()

    class Held(RawIO):
        def load_bytes_ref(
            self, data: bytes, *, digest: PayloadDigest | None = None
        ) -> base.MediaRef[bytes]:
            started.set()
            assert go_on.wait(60)
            return super().load_bytes_ref(data, digest=digest)

    url = "data:;base64," + base64.b64encode(b"payload").decode()
    fetch = asyncio.create_task(connector.fetch_image_async(url, Held()))
    await wait_until(started.is_set)
    for _ in range(2):
        fetch.cancel()
        done, _ = await asyncio.wait((fetch,), timeout=0.02)
        assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetch


async def test_when_all_have_left_the_connection_closes(
    origin: Origin, connector: MediaConnector
) -> None:
    url = origin.endless("/a", pause_s=0.01)
    fetches = [asyncio.create_task(connector.fetch_image_async(url, RAW)) for _ in range(2)]
    await wait_until(lambda: origin.bytes_sent > 0)
    fetches[0].cancel()
    await asyncio.sleep(0)
    assert origin.open_connections == 1
    fetches[1].cancel()
    await asyncio.gather(*fetches, return_exceptions=True)
    await wait_until(lambda: origin.open_connections == 0)


async def test_closing_ends_what_is_fetched(origin: Origin) -> None:
    connector = make_connector(origin)
    fetch = asyncio.create_task(connector.fetch_image_async(origin.stall("/a"), RAW))
    await wait_until(lambda: origin.hits("/a"))
    await connector.close()
    with pytest.raises(RuntimeError, match="closed"):
        await fetch
    await wait_until(lambda: origin.open_connections == 0)
    for url in (origin.serve("/b", b"x"), "data:,x", "file:///tmp/x"):
        with pytest.raises(RuntimeError, match="closed"):
            await connector.fetch_image_async(url, RAW)


@pytest.mark.stress
async def test_any_mix_of_fetches_and_cancellations_leaves_nothing(origin: Origin) -> None:
    async def slow(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Length": "2000"})
        for _ in range(4):
            await asyncio.sleep(0.001)
            await exchange.send(bytes(500))

    for number in range(4):
        origin.route(f"/slow{number}", slow)
    origin.serve("/gone", b"", status=404)
    origin.serve("/quick", bytes(2000))
    budget = ByteBudget(MIB)
    async with make_connector(origin, budget=budget) as connector:
        rng = random.Random(7)
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(150 * REPEATS):
            path = rng.choice(["/slow0", "/slow1", "/slow2", "/slow3", "/gone", "/quick"])
            tasks.append(asyncio.create_task(connector.fetch_image_async(origin.url(path), RAW)))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.004)
                rng.choice(tasks).cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, MediaRef | OriginRefusedError | asyncio.CancelledError)
            if isinstance(outcome, MediaRef):
                assert outcome.data == bytes(2000)
        assert budget.held_bytes == budget.num_waiting == 0
        assert sum(len(here.flights) for here in connector._loops.values()) == 0
        others = [task for task in asyncio.all_tasks() if task.get_name() == "fetch"]
        assert others == []
    await wait_until(lambda: origin.open_connections == 0)


# -- the download cache


@pytest.fixture
def disk(tmp_path: Path) -> DownloadCache:
    return DownloadCache(DownloadCacheLimits(tmp_path / "cache", max_bytes=MIB))


async def test_a_second_fetch_comes_from_disk(origin: Origin, disk: DownloadCache) -> None:
    url = origin.serve("/a.png", b"payload")
    for _ in range(2):
        async with make_connector(origin, download_cache=disk) as connector:
            with trace_fetch() as trace:
                first = await connector.fetch_image_async(url + "?sig=1", RAW)
            assert first.decode() == b"payload"
            assert first.key == base.derive_media_key(b"payload", RAW.get_decode_spec())
    assert trace.source == "disk"
    assert origin.hits() == 1
    async with make_connector(origin, download_cache=disk) as connector:
        await connector.fetch_image_async(url + "?sig=2", RAW)
        with pytest.raises(MediaTooLargeError):
            await connector.fetch_image_async(url + "?sig=1", RawIO(3))
    assert origin.hits() == 2


async def test_failures_and_partial_bodies_are_not_kept(
    origin: Origin, disk: DownloadCache, tmp_path: Path
) -> None:
    once = origin.serve_in_turn("/once", (404, b"not found"), (200, b"good"))
    cut = origin.cut_off("/cut", bytes(1000), after=999)
    empty = origin.serve("/empty", b"")
    bomb = origin.serve("/bomb", b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    async with make_connector(origin, download_cache=disk) as connector:
        for url in (once, cut, empty, bomb):
            with pytest.raises((UnprocessableMediaError, FetchError)):
                await connector.fetch_image_async(url, RAW)
        assert list((tmp_path / "cache").iterdir()) == []
        assert (await connector.fetch_image_async(once, RAW)).decode() == b"good"
    assert len(list((tmp_path / "cache").iterdir())) == 1


async def test_what_the_origin_forbids_to_keep_is_not_kept(
    origin: Origin, disk: DownloadCache
) -> None:
    url = origin.serve("/a", b"x", headers={"Cache-Control": "private, No-Store"})
    async with make_connector(origin, download_cache=disk) as connector:
        for _ in range(2):
            await connector.fetch_image_async(url, RAW)
    assert origin.hits("/a") == 2


async def test_what_one_policy_downloaded_is_not_another_ones(
    origin: Origin, disk: DownloadCache
) -> None:
    url = origin.serve("/a", b"x")
    async with make_connector(origin, download_cache=disk) as connector:
        await connector.fetch_image_async(url, RAW)
    async with make_connector(download_cache=disk) as connector:
        with pytest.raises(BlockedURLError):
            await connector.fetch_image_async(url, RAW)
    named = FetchPolicy(allowed_private_networks=(f"media.test:{origin.port}",))
    connection = HttpConnection(resolve=StubResolver({"media.test": ["127.0.0.1"]}))
    url = origin.url("/a", host="media.test")
    async with MediaConnector(connection, policy=named, download_cache=disk) as connector:
        await connector.fetch_image_async(url, RAW)
    async with MediaConnector(connection, download_cache=disk) as connector:
        with pytest.raises(BlockedURLError):
            await connector.fetch_image_async(url, RAW)
    await connection.close()


async def test_a_compressed_body_is_kept_as_it_was_meant(
    origin: Origin, disk: DownloadCache
) -> None:
    data = b"payload" * 50
    url = origin.serve("/a", gzip.compress(data), headers={"Content-Encoding": "gzip"})
    async with make_connector(origin, download_cache=disk) as connector:
        for _ in range(2):
            assert (await connector.fetch_image_async(url, RAW)).data == data
    assert origin.hits("/a") == 1


# -- threads, traces, the budget


async def test_work_on_payloads_is_done_on_the_media_threads(
    origin: Origin, tmp_path: Path
) -> None:
    threads: set[str] = set()

    class Watching(RawIO):
        def load_bytes_ref(
            self, data: bytes, *, digest: PayloadDigest | None = None
        ) -> MediaRef[bytes]:
            threads.add(threading.current_thread().name)
            return super().load_bytes_ref(data, digest=digest)

    (tmp_path / "a").write_bytes(b"x")
    with MediaExecutor(1) as executor:
        options = {"executor": executor, "allowed_local_media_path": tmp_path}
        async with make_connector(origin, **options) as connector:
            assert connector.executor is executor
            for url in (origin.serve("/a", b"x"), "data:,x", f"file://{tmp_path}/a"):
                await connector.fetch_image_async(url, Watching())
    assert threads
    assert all(name.startswith("lazydecode-media") for name in threads)
    assert MediaConnector().executor is global_thread_pool


@pytest.mark.parametrize(
    ("data", "media_io"),
    [
        (make_jpeg(), ImageMediaIO()),
        (make_png(), ImageMediaIO()),
        (make_wav(seconds=0.1), AudioMediaIO()),
        (make_mp4(frames=2), VideoMediaIO(ImageMediaIO())),
    ],
)
async def test_a_short_payload_is_the_same_and_meets_no_thread(
    data: bytes, media_io: MediaIO[Any]
) -> None:
    with MediaExecutor(1) as executor:
        async with MediaConnector(executor=executor) as connector:
            ref = await connector.load_from_url_async(data_url(data), media_io)
            bare = await connector.load_base64_async("x/y", base64.b64encode(data), media_io)
            assert ref.key == bare.key == media_io.load_bytes_ref(data).key
            assert ref.data == data
            assert ref.header == media_io.load_bytes_ref(data).header
        assert isinstance(executor.quick, LazyThreadPool)
        assert executor.quick._pool is None


@pytest.mark.parametrize(
    "url",
    [
        data_url(make_jpeg() + bytes(at_once.SLICED_CHARS)),  # long
        data_url(make_image("GIF")),  # a format that may take long to look at
        data_url(make_jpeg()).replace("/", "%2F"),
        "data:,hello",
    ],
)
async def test_a_long_or_unusual_payload_is_a_threads_work(url: str) -> None:
    with MediaExecutor(1) as executor:
        async with MediaConnector(executor=executor) as connector:
            await connector.fetch_image_async(url, ImageMediaIO())
        assert isinstance(executor.quick, LazyThreadPool)
        assert executor.quick._pool is not None


async def test_a_longer_payload_that_comes_alone_is_digested_in_slices() -> None:
    data = make_jpeg() + bytes(range(256)) * (3 * 4096)
    iterations = 0

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    with MediaExecutor(1) as executor:
        async with MediaConnector(executor=executor) as connector:
            counting = asyncio.create_task(count())
            await asyncio.sleep(0)
            begun = iterations
            ref = await connector.load_from_url_async(data_url(data), ImageMediaIO())
            assert iterations - begun >= 3  # base64, then three slices, each in its iteration
            assert ref.key == derive_media_key(data, ref.spec)
            assert ref.data == data
            assert isinstance(executor.quick, LazyThreadPool)
            assert executor.quick._pool is None
            others = [data_url(data + end) for end in (b"a", b"b")]
            both = [connector.load_from_url_async(url, ImageMediaIO()) for url in others]
            first, second = await asyncio.gather(*both)
            assert len({ref.key, first.key, second.key}) == 3
            assert executor.quick._pool is not None  # the one that came second
            counting.cancel()


async def test_a_longer_payload_beside_another_is_a_threads_work() -> None:
    long = data_url(make_jpeg() + bytes(at_once.QUICK_CHARS))
    unusual, wrong = data_url(make_image("GIF")), "data:;base64,@@@@"
    with MediaExecutor(1) as executor:
        async with MediaConnector(executor=executor) as connector:
            turns = connector._here().turns
            gate = threading.Event()
            for _ in range(16):
                executor.quick.submit(gate.wait)  # no thread is free
            begun = [
                asyncio.create_task(connector.fetch_image_async(url, ImageMediaIO()))
                for url in (unusual, wrong, unusual)
            ]
            await asyncio.sleep(0)
            begun[2].cancel()
            assert turns.num_running == 3  # all are threads' work
            assert not turns.allow_now(long)
            gate.set()
            results = await asyncio.gather(*begun, return_exceptions=True)
            kinds = [type(result) for result in results]
            assert kinds == [MediaRef, CorruptMediaError, asyncio.CancelledError]
            assert turns.num_running == 0
            await asyncio.sleep(0)
            assert turns.allow_now(long)


async def test_a_payload_whose_header_is_for_a_thread_is_decoded_from_base64_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    decode = pybase64.b64decode

    def b64decode(text: Any, **options: Any) -> bytes:
        lengths.append(len(text))
        return decode(text, **options)

    monkeypatch.setattr(pybase64, "b64decode", b64decode)
    url = data_url(make_image("GIF"))
    async with MediaConnector() as connector:
        await connector.fetch_image_async(url, ImageMediaIO())
    assert lengths == [len(url) - url.index(",") - 1]


@pytest.mark.parametrize("num_bytes", [15_000, 300_000])
async def test_of_many_short_payloads_few_are_identified_in_one_iteration(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_thread, iteration = threading.get_ident(), 0
    worked: Counter[int] = Counter()

    decode_plain = at_once._decode_plain

    def decode(url: Any, *args: Any) -> Any:
        assert threading.get_ident() == loop_thread
        worked[iteration] += at_once._num_chars(url)
        return decode_plain(url, *args)

    monkeypatch.setattr(at_once, "_decode_plain", decode)
    urls = [data_url(make_jpeg() + bytes(num_bytes) + bytes([number])) for number in range(100)]
    async with MediaConnector() as connector:
        tasks = [
            asyncio.create_task(connector.fetch_image_async(url, ImageMediaIO())) for url in urls
        ]
        tasks.append(asyncio.create_task(asyncio.sleep(0)))
        tasks[50].cancel()
        while not all(task.done() for task in tasks):
            iteration += 1
            await asyncio.sleep(0)
    keys = {task.result().key for task in tasks[:50] + tasks[51:100]}
    assert len(keys) == 99
    assert tasks[50].cancelled()
    assert max(worked.values()) <= at_once.QUICK_CHARS


async def test_a_trace_tells_where_bytes_came_from(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(7))
    gate = Gate()
    flaky = origin.serve_in_turn("/flaky", (503, b""), (200, bytes(7)))
    shared = origin.serve("/shared", bytes(7), gate=gate)
    async with make_connector(origin, allowed_local_media_path=tmp_path) as connector:

        async def traced(url: str) -> tuple[str, bool, int, int]:
            with trace_fetch() as trace:
                await connector.fetch_image_async(url, RAW)
            assert trace.fetch_s > 0
            assert trace.digest_s > 0
            return trace.source, trace.is_shared, trace.num_bytes, trace.num_attempts

        assert await traced("data:,1234567") == ("data", False, 7, 0)
        assert await traced(f"file://{tmp_path}/a") == ("file", False, 7, 0)
        assert await traced(flaky) == ("http", False, 7, 2)
        both = asyncio.gather(traced(shared), traced(shared))
        await gate.wait_arrived_async()
        gate.open()
        assert await both == [("http", False, 7, 1), ("http", True, 7, 0)]


async def test_the_budget_bounds_downloads_together(origin: Origin) -> None:
    budget = ByteBudget(1000, max_waiting=0)
    gate = Gate()

    async def half(exchange: Exchange) -> None:
        await exchange.head(200, {"Content-Length": "800"})
        await gate.passed()
        await exchange.send(bytes(800))

    origin.route("/a", half)
    async with make_connector(origin, budget=budget) as connector:
        first = asyncio.create_task(connector.fetch_image_async(origin.url("/a?1"), RAW))
        await wait_until(lambda: budget.held_bytes == 800)
        with pytest.raises(OverloadedError):
            await connector.fetch_image_async(origin.url("/a?2"), RAW)
        gate.open()
        assert len((await first).data) == 800
        assert budget.held_bytes == 0


async def test_released_refs_leave_no_payload(origin: Origin, connector: MediaConnector) -> None:
    ref = await connector.fetch_image_async(origin.serve("/a", bytes(64_000)), RAW)
    data = ref.data
    ref.release()
    # This function's name for it, and the argument; a thread lets go of its job when it has told
    # of it.
    until = time.monotonic() + 5
    while (count := sys.getrefcount(data)) > 2 and time.monotonic() < until:
        await asyncio.sleep(0.01)
        gc.collect()
    assert count == 2


# -- base64 without a URL, JPEG sequences


async def test_bare_base64_follows_the_rules_of_data_urls(connector: MediaConnector) -> None:
    for text in ("QUJD", b"QUJD", memoryview(b" QU\nJD "), "QUJD\n"):
        assert (await connector.load_base64_async("audio/wav", text, RAW)).decode() == b"ABC"
    for bad in ("", "Q", "QUJD!", "data:;base64,QUJD"):
        with pytest.raises(CorruptMediaError):
            await connector.load_base64_async("audio/wav", bad, RAW)
    with pytest.raises(BlockedURLError):
        await connector.load_base64_async("audio/wav", "QU\u00e9D", RAW)
    with pytest.raises(MediaTooLargeError):
        await connector.load_base64_async("audio/wav", "QUJD", RawIO(2))


async def test_a_jpeg_sequence_reaches_the_decoder_as_text(connector: MediaConnector) -> None:
    frames = [base64.b64encode(make_jpeg((16, 16))).decode() for _ in range(3)]
    url = "data:Video/JPEG;base64," + ",".join(frames)
    media_io = VideoMediaIO(ImageMediaIO(), num_frames=-1)
    ref = await connector.fetch_video_async(url, media_io)
    array, metadata = ref.decode()
    assert array.shape == (3, 16, 16, 3)
    assert metadata["video_backend"] == "jpeg_sequence"


# -- plug-ins


async def test_a_subclass_adds_a_transport_for_every_kind(origin: Origin) -> None:
    class S3Like(MediaConnector):
        async def fetch_payload_async(
            self, url: str, *, max_bytes: int, timeout_s: float
        ) -> MediaPayload:
            if url.startswith("s3://"):
                data = url.removeprefix("s3://").encode()
                return MediaPayload(data, PayloadDigest(data))
            return await super().fetch_payload_async(url, max_bytes=max_bytes, timeout_s=timeout_s)

    registry = MediaConnectorRegistry()
    registry.register("s3")(S3Like)
    policy = FetchPolicy(allowed_private_networks=(origin.netloc,))
    async with registry.load("s3", policy=policy) as connector:
        assert (await connector.fetch_image_async("s3://bucket/key", RAW)).data == b"bucket/key"
        video, audio = await connector.fetch_video_and_audio_async("s3://b/k", RAW, RAW)
        assert video.data is audio.data
        url = origin.serve("/a", b"x")
        assert (await connector.fetch_image_async(url, RAW)).data == b"x"


def test_a_subclass_may_replace_loading_for_both_forms() -> None:
    class Constant(MediaConnector):
        async def load_from_url_async(
            self, url: Any, media_io: MediaIO[Any], *, timeout_s: float | None = None
        ) -> MediaRef[Any]:
            return media_io.load_bytes_ref(f"{url} {timeout_s}".encode())

    with Constant() as connector:
        assert connector.fetch_image("x", RAW).decode() == b"x 5.0"
        assert connector.fetch_video("x", RAW).decode() == b"x 30.0"
        assert connector.fetch_audio("x", RAW).decode() == b"x 10.0"


def test_the_registry_knows_its_names() -> None:
    connector = MEDIA_CONNECTOR_REGISTRY.load("http", limits=FetchLimits(max_bytes=7))
    assert type(connector) is MediaConnector
    assert connector.limits.max_bytes == 7
    with pytest.raises(ValueError, match=r"'ftp'.*known are: http"):
        MEDIA_CONNECTOR_REGISTRY.load("ftp")
    registry = MediaConnectorRegistry()
    registry.register("x")(MediaConnector)
    registry.register("x")(MediaConnector)
    with pytest.raises(TypeError, match="subclass"):
        registry.register("y")(dict)
    with pytest.raises(ValueError, match="refuses its options"):
        MEDIA_CONNECTOR_REGISTRY.load("http", colour="red")
    with pytest.raises(ValueError, match="exists already"):
        registry.register("x")(type("Other", (MediaConnector,), {}))
