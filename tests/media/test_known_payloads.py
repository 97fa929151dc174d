"""Payloads that are known: nothing is read for a hit, and no change goes unnoticed."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazydecode.errors import MediaTooLargeError, PayloadChangedError, UnprocessableMediaError
from lazydecode.limits import DecodeLimits, DownloadCacheLimits, FetchLimits, FetchPolicy
from lazydecode.media import at_once, download_cache, local_files, payloads
from lazydecode.media import connector as connector_module
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import MediaIO, MediaRef, PayloadDigest
from lazydecode.media.connector import MediaConnector
from lazydecode.media.download_cache import DownloadCache
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.known_payloads import KnownPayloads
from lazydecode.media.urls import FileURL
from lazydecode.media.video import VideoMediaIO
from tests.builders import make_exif, make_jpeg, make_png, make_wav
from tests.builders_video import make_mp4
from tests.origin import Origin

IMAGES = ImageMediaIO()
SETTLED_S = 0.05
"""In these tests; many ticks of a kernel's clock all the same."""


@pytest.fixture(autouse=True)
def quickly_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "_SETTLED_NS", int(SETTLED_S * 1e9))


class Reads:
    """Counts payloads that are read from disk, and can hold one up."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Callable[[], object] = lambda: None


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    counted = Reads()
    read_up_to = local_files.read_up_to

    def read(descriptor: int, num_bytes: int) -> bytes:
        counted.count += 1
        counted.before()
        return read_up_to(descriptor, num_bytes)

    monkeypatch.setattr(local_files, "read_up_to", read)
    monkeypatch.setattr(download_cache, "read_up_to", read)
    return counted


@pytest.fixture
def connector(tmp_path: Path) -> Iterator[MediaConnector]:
    with MediaConnector(allowed_local_media_path=tmp_path) as opened:
        yield opened


def settle() -> None:
    time.sleep(SETTLED_S * 1.2)


def fetch(connector: MediaConnector, path: Path, media_io: MediaIO[Any] = IMAGES) -> MediaRef[Any]:
    return connector.load_from_url(f"file://{path}", media_io)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    settle()
    return path


@pytest.mark.parametrize(
    ("data", "media_io"),
    [
        (make_jpeg(), ImageMediaIO()),
        (make_jpeg(exif=make_exif(image_id="5c9a9d1e-2b0f-4a51-8a86-2f4f2d2f6a10")), IMAGES),
        (make_png() + b"end", ImageMediaIO("L")),
        (b"no picture at all", IMAGES),
        (make_wav(), AudioMediaIO()),
        (make_mp4(), VideoMediaIO(IMAGES, num_frames=4)),
    ],
    ids=["jpeg", "image-id", "png", "corrupt", "wav", "mp4"],
)
def test_a_known_file_is_not_read_and_is_all_that_its_bytes_are(
    connector: MediaConnector,
    reads: Reads,
    tmp_path: Path,
    data: bytes,
    media_io: MediaIO[Any],
) -> None:
    path = write(tmp_path / "file", data)
    fetch(connector, path, media_io)
    assert reads.count == 1
    ref, truth = fetch(connector, path, media_io), media_io.load_bytes_ref(data)
    assert (ref.key, ref.spec, ref.key_covers_spec) == (
        truth.key,
        truth.spec,
        truth.key_covers_spec,
    )
    assert (ref.num_bytes, ref.is_loaded, reads.count) == (len(data), False, 1)
    # Forks, renewed and mapped refs share one payload, and read nothing either.
    others = [ref.fork(), ref.renew(), ref.map(lambda media: media)]
    assert all(other.payload is ref.payload for other in others)
    assert repr(ref) == f"<MediaRef undecoded, {len(data)} bytes>"
    assert reads.count == 1
    assert ref.header == truth.header
    assert ref.data == data
    assert all(other.is_loaded for other in others)
    if truth.header is None:
        with pytest.raises(UnprocessableMediaError):
            ref.decode()
    else:
        assert type(ref.decode()) is type(truth.decode())
        # The header is known from then on.
        later = fetch(connector, path, media_io)
        assert later.knows_header
        assert later.header == truth.header
        assert not later.is_loaded
    assert reads.count == 2


def test_a_known_file_meets_no_thread_and_a_change_is_seen(
    reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "file", make_png())
    asked: list[str] = []
    refs_from_file = connector_module.refs_from_file

    def on_thread(*args: Any) -> list[MediaRef[Any]]:
        asked.append(threading.current_thread().name)
        return refs_from_file(*args)

    monkeypatch.setattr(connector_module, "refs_from_file", on_thread)
    with MediaConnector(allowed_local_media_path=tmp_path) as connector:
        first = fetch(connector, path)
        assert connector._local_files is not None
        if connector._local_files.look(FileURL(str(path))) is None:
            pytest.skip("the file system of temporary files may have to wait")
        assert fetch(connector, path).key == first.key
        assert len(asked) == 1
        small = DecodeLimits(max_image_pixels=1)
        for _ in range(2):  # a decoder that was not asked before
            with pytest.raises(MediaTooLargeError):
                fetch(connector, path, ImageMediaIO(limits=small))
        path.write_bytes(make_png() + b"new")
        assert fetch(connector, path).key != first.key
        assert len(asked) == 4
        settle()
        fetch(connector, path)
        assert not fetch(connector, path).is_loaded
        assert len(asked) == 5
        path.unlink()
        with pytest.raises(UnprocessableMediaError, match="does not exist"):
            fetch(connector, path)
    assert all(name.startswith("lazydecode-media") for name in asked)
    assert reads.count == 5


async def test_of_many_known_files_few_are_looked_at_in_one_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, iteration = f"file://{write(tmp_path / 'file', make_png())}", 0
    looks: Counter[int] = Counter()

    def known_refs_from_file(*args: Any) -> Any:
        looks[iteration] += 1
        return payloads.known_refs_from_file(*args)

    async with MediaConnector(allowed_local_media_path=tmp_path) as connector:
        key = (await connector.load_from_url_async(url, IMAGES)).key
        monkeypatch.setattr(connector_module, "known_refs_from_file", known_refs_from_file)
        fetches = [connector.load_from_url_async(url, IMAGES) for _ in range(100)]
        tasks = [asyncio.create_task(one) for one in fetches]
        while not all(task.done() for task in tasks):
            iteration += 1
            await asyncio.sleep(0)
    assert {task.result().key for task in tasks} == {key}
    assert looks.total() == 100
    assert max(looks.values()) <= at_once.QUICK_CHARS // at_once.LOOK_CHARS


def test_other_options_read_once_more(
    connector: MediaConnector, reads: Reads, tmp_path: Path
) -> None:
    path = write(tmp_path / "file", make_png())
    for media_io in (ImageMediaIO("RGB"), ImageMediaIO("L"), ImageMediaIO("RGB")):
        assert fetch(connector, path, media_io).key == media_io.load_bytes_ref(make_png()).key
    assert reads.count == 2
    limited = ImageMediaIO(limits=DecodeLimits(max_image_pixels=10))
    for _ in range(2):
        with pytest.raises(MediaTooLargeError, match="limit of 10 pixels"):
            fetch(connector, path, limited)


def test_a_decoder_that_may_go_by_more_is_asked_each_time(
    connector: MediaConnector, reads: Reads, tmp_path: Path
) -> None:
    class Salted(ImageMediaIO):
        salt = b"1"

        def load_bytes_ref(
            self, data: bytes, *, digest: PayloadDigest | None = None
        ) -> MediaRef[Any]:
            return super().load_bytes_ref(data + self.salt)

    path, media_io = write(tmp_path / "file", make_png()), Salted()
    keys = {fetch(connector, path, media_io).key}
    media_io.salt = b"2"
    keys.add(fetch(connector, path, media_io).key)
    assert len(keys) == reads.count == 2


@pytest.mark.parametrize("how", ["in_place", "mapped", "replaced", "times_restored", "appended"])
def test_a_change_is_noticed(connector: MediaConnector, tmp_path: Path, how: str) -> None:
    old, new = make_png() + b"old", make_png() + b"new"
    path = write(tmp_path / "file", old)
    fetch(connector, path)
    assert not fetch(connector, path).is_loaded
    status = path.stat()
    match how:
        case "in_place":
            with path.open("r+b") as file:
                file.seek(-3, os.SEEK_END)
                file.write(b"new")
        case "mapped":
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                memory[-3:] = b"new"
                memory.flush()
        case "replaced":
            (tmp_path / "other").write_bytes(new)
            os.replace(tmp_path / "other", path)
        case "times_restored":
            path.write_bytes(new)
        case "appended":
            new = old + b"more"
            path.write_bytes(new)
    # Whoever changes a file can set its times back, but not the kernel's time of the change.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fetch(connector, path).key == IMAGES.load_bytes_ref(new).key
    settle()
    assert [fetch(connector, path).key for _ in range(2)] == [IMAGES.load_bytes_ref(new).key] * 2


def test_a_file_that_was_just_written_is_read_each_time(
    connector: MediaConnector, reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "_SETTLED_NS", int(60e9))
    path = write(tmp_path / "file", make_png())
    assert [fetch(connector, path).is_loaded for _ in range(3)] == [True] * 3
    assert reads.count == 3


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    connector: MediaConnector, reads: Reads, tmp_path: Path
) -> None:
    path = write(tmp_path / "file", make_png() + b"old")

    def change() -> None:
        reads.before = lambda: None
        path.write_bytes(make_png() + b"new")

    reads.before = change
    fetch(connector, path)
    settle()
    new = IMAGES.load_bytes_ref(make_png() + b"new").key
    assert [fetch(connector, path).key for _ in range(2)] == [new] * 2
    assert reads.count == 2


@pytest.mark.parametrize("how", ["other", "longer", "gone", "folder", "refused"])
def test_a_changed_file_is_never_decoded_under_the_key_of_the_first(
    connector: MediaConnector, tmp_path: Path, how: str
) -> None:
    path = write(tmp_path / "file", make_png())
    fetch(connector, path)
    ref = fetch(connector, path)
    path.unlink()
    match how:
        case "other":
            path.write_bytes(make_png(size=(32, 32)))
        case "longer":
            path.write_bytes(make_png() + b"1")
        case "folder":
            path.mkdir()
        case "refused":
            path.symlink_to("/etc/hostname")
    assert ref.header == IMAGES.load_bytes_ref(make_png()).header
    for use in (ref.decode, lambda: ref.data, ref.fork().decode):
        with pytest.raises(PayloadChangedError, match="changed after it was identified") as raised:
            use()
        assert str(tmp_path) not in str(raised.value)
        assert (raised.value.status, raised.value.retryable) == (422, True)
    assert not ref.is_loaded


def test_the_same_bytes_in_another_file_are_the_same(
    connector: MediaConnector, reads: Reads, tmp_path: Path
) -> None:
    path = write(tmp_path / "file", make_png())
    fetch(connector, path)
    ref = fetch(connector, path)
    (tmp_path / "copy").write_bytes(make_png())
    os.replace(tmp_path / "copy", path)
    assert ref.data == make_png()
    assert reads.count == 2


def test_threads_read_a_payload_once(
    connector: MediaConnector, reads: Reads, tmp_path: Path
) -> None:
    path = write(tmp_path / "file", make_png())
    fetch(connector, path)
    ref, started = fetch(connector, path), threading.Barrier(8)
    found: list[bytes] = []

    def load() -> None:
        started.wait(120)
        found.append(ref.renew().data)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [make_png()] * 8
    assert reads.count == 2


def test_a_video_and_its_sound_share_a_known_payload(
    connector: MediaConnector, reads: Reads, tmp_path: Path
) -> None:
    path = write(tmp_path / "file", make_mp4())
    url, decoders = f"file://{path}", (VideoMediaIO(IMAGES, num_frames=4), AudioMediaIO())
    first = connector.fetch_video_and_audio(url, *decoders)
    again = connector.fetch_video_and_audio(url, *decoders)
    assert [ref.key for ref in again] == [ref.key for ref in first]
    assert again[0].payload is again[1].payload
    assert reads.count == 1


def test_a_released_ref_holds_no_payload(connector: MediaConnector, tmp_path: Path) -> None:
    path = write(tmp_path / "file", make_png())
    fetch(connector, path)
    ref = fetch(connector, path)
    assert ref.data
    ref.release()
    assert (ref.num_bytes, ref.data, ref.is_loaded) == (0, b"", True)


def test_the_table_is_bounded_and_can_be_off(tmp_path: Path, reads: Reads) -> None:
    paths = [write(tmp_path / str(number), make_png()) for number in range(3)]
    for entries, expected in ((2, 1), (0, 3)):
        reads.count = 0
        limits = FetchLimits(max_known_payloads=entries)
        with MediaConnector(limits=limits, allowed_local_media_path=tmp_path) as connector:
            for path in (*paths, *paths[1:], paths[0]):
                fetch(connector, path)
            assert len(connector._known) == entries
        assert reads.count == 3 + expected


def test_options_without_end_do_not_fill_an_entry() -> None:
    known, data = KnownPayloads(4), make_png()
    digest = PayloadDigest(data)

    def read() -> tuple[bytes, PayloadDigest]:
        return data, digest

    decoders = [ImageMediaIO(rgba_background_color=[grey] * 3) for grey in range(20)]
    for media_io in decoders:
        known.learn("source", digest, [media_io], [media_io.load_bytes_ref(data)])
    held = [known.find("source", [media_io], read) is not None for media_io in decoders]
    assert held == [False] * 12 + [True] * 8
    assert known.find("other", decoders[-1:], read) is None
    known.forget("source")
    assert known.find("source", decoders[-1:], read) is None


def test_subclasses_have_no_scope_by_inheritance() -> None:
    scopes: list[Hashable] = []
    for decoder in (ImageMediaIO, AudioMediaIO):
        scopes.append(type("Sub", (decoder,), {})().identity_scope())
    assert scopes == [None, None]


# -- any sequence of changes

NAMES = ("a", "b")
CONTENTS = (make_png() + b"1", make_png() + b"2", make_png() + b"33")
STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(NAMES), st.sampled_from(CONTENTS)),
    st.tuples(st.just("replace"), st.sampled_from(NAMES), st.sampled_from(CONTENTS)),
    st.tuples(st.just("touch"), st.sampled_from(NAMES), st.sampled_from([0, 10**18])),
    st.tuples(st.just("rename"), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("delete"), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("settle"), st.none(), st.none()),
    st.tuples(st.just("fetch"), st.sampled_from(NAMES), st.booleans()),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(STEPS, max_size=14))
def test_keys_are_always_those_of_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any, Any]]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    with MediaConnector(allowed_local_media_path=folder) as connector:
        for what, name, value in [*steps, ("fetch", "a", True), ("fetch", "b", True)]:
            path = folder / (name or "")
            other = folder / ("b" if name == "a" else "a")
            if what == "write":
                path.write_bytes(value)
            elif what == "replace":
                (folder / "new").write_bytes(value)
                os.replace(folder / "new", path)
            elif what == "settle":
                settle()
            elif not path.exists():
                if what == "fetch":
                    with pytest.raises(UnprocessableMediaError, match="does not exist"):
                        fetch(connector, path)
            elif what == "touch":
                os.utime(path, ns=(value, value))
            elif what == "rename":
                path.rename(other)
            elif what == "delete":
                path.unlink()
            else:
                data = path.read_bytes()
                ref = fetch(connector, path)
                assert ref.key == IMAGES.load_bytes_ref(data).key
                if value:
                    assert ref.data == data


# -- downloads


@pytest.fixture
def disk(tmp_path: Path) -> DownloadCache:
    return DownloadCache(DownloadCacheLimits(tmp_path / "cache", max_age_s=3600))


def open_connector(origin: Origin, disk: DownloadCache) -> MediaConnector:
    policy = FetchPolicy(allowed_private_networks=(origin.netloc,))
    return MediaConnector(policy=policy, download_cache=disk)


def test_a_download_that_is_known_is_not_read(
    origin: Origin, disk: DownloadCache, reads: Reads
) -> None:
    url = origin.serve("/a", make_png())
    with open_connector(origin, disk) as connector:
        first = connector.load_from_url(url, IMAGES)
        again = connector.load_from_url(url, IMAGES)
        assert (again.key, again.num_bytes) == (first.key, len(make_png()))
        assert (again.is_loaded, reads.count) == (False, 0)
        assert again.data == make_png()
        assert reads.count == 1
        with pytest.raises(MediaTooLargeError):
            connector.load_from_url(url, _Capped(10))
    assert origin.hits("/a") == 1
    # Another process knows the digest, but not what it made of the bytes.
    with open_connector(origin, disk) as connector:
        assert connector.load_from_url(url, IMAGES).is_loaded
        assert not connector.load_from_url(url, IMAGES).is_loaded
    assert (origin.hits("/a"), reads.count) == (1, 2)


class _Capped(ImageMediaIO):
    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes

    def get_max_bytes(self) -> int:
        return self.max_bytes


def test_a_download_that_is_replaced_expired_or_damaged_is_fetched_anew(
    origin: Origin, disk: DownloadCache, tmp_path: Path
) -> None:
    url = origin.serve("/a", make_png())
    with open_connector(origin, disk) as connector:
        connector.load_from_url(url, IMAGES)
        known = connector.load_from_url(url, IMAGES)
        (entry,) = (tmp_path / "cache").iterdir()
        entry.write_bytes(entry.read_bytes()[:-1] + b"?")
        with pytest.raises(PayloadChangedError):
            known.decode()
        assert connector.load_from_url(url, IMAGES).data == make_png()
        assert origin.hits("/a") == 2

        known = connector.load_from_url(url, IMAGES)
        os.utime(entry, (time.time() - 4000,) * 2)
        with pytest.raises(PayloadChangedError):
            known.decode()
        other = make_png(size=(32, 32))
        origin.serve("/a", other)
        assert connector.load_from_url(url, IMAGES).key == IMAGES.load_bytes_ref(other).key
        assert connector.load_from_url(url, IMAGES).data == other
        assert origin.hits("/a") == 3
