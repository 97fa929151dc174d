"""Base64 texts that came before: nothing is decoded for a hit, and no two are taken for one."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazydecode.errors import LazyDecodeError, PayloadChangedError, ValidationError
from lazydecode.limits import DecodeLimits, FetchLimits
from lazydecode.media import at_once, known_texts
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import MediaIO, MediaRef
from lazydecode.media.connector import MediaConnector, trace_fetch
from lazydecode.media.data_urls import parse_data_url
from lazydecode.media.executor import MediaExecutor
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.known_texts import KnownTexts
from lazydecode.media.video import VideoMediaIO
from tests.builders import make_jpeg, make_png, make_wav
from tests.builders_video import make_mp4

IMAGES = ImageMediaIO()
MIN_CHARS = 32 * 1024
TAIL = bytes(range(256)) * 256
"""Behind a picture: nobody reads it who decodes, and it makes the text long enough."""
PICTURE = make_jpeg() + TAIL


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember texts that are short for a test."""
    for module in (known_texts, at_once):
        monkeypatch.setattr(module, "MIN_CHARS", MIN_CHARS)


def data_url(data: bytes, media_type: str = "image/jpeg") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


class Work:
    """Counts what was decoded from base64, and what was digested."""

    def __init__(self) -> None:
        self.decoded: list[int] = []
        self.digested: list[int] = []

    def take(self) -> tuple[int, int]:
        """Return how many there were of each, and begin anew."""
        counts = len(self.decoded), len(self.digested)
        self.decoded.clear()
        self.digested.clear()
        return counts


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()
    decode, sha256 = pybase64.b64decode, hashlib.sha256

    def b64decode(text: Any, **options: Any) -> bytes:
        counted.decoded.append(len(text))
        return decode(text, **options)

    def begin(data: bytes = b"") -> Any:
        counted.digested.append(len(data))
        return sha256(data)

    monkeypatch.setattr(pybase64, "b64decode", b64decode)
    monkeypatch.setattr(hashlib, "sha256", begin)
    return counted


@pytest.fixture
def connector() -> Iterator[MediaConnector]:
    with MediaConnector() as opened:
        yield opened


@pytest.mark.parametrize(
    ("data", "media_io"),
    [
        (PICTURE, IMAGES),
        (make_png() + TAIL, ImageMediaIO("L")),
        (b"no picture at all" + TAIL, IMAGES),
        (make_wav(seconds=2), AudioMediaIO()),
        (make_mp4() + TAIL, VideoMediaIO(IMAGES, num_frames=4)),
    ],
    ids=["jpeg", "png", "corrupt", "wav", "mp4"],
)
@pytest.mark.parametrize("kind", [str, bytes, memoryview])
def test_a_known_text_is_not_decoded_and_is_all_that_its_bytes_are(
    connector: MediaConnector, work: Work, data: bytes, media_io: MediaIO[Any], kind: type
) -> None:
    text = data_url(data)
    assert len(text) > MIN_CHARS

    def fetch() -> MediaRef[Any]:
        url: Any = text if kind is str else kind(text.encode())
        return connector.load_from_url(url, media_io)

    truth = media_io.load_bytes_ref(data)
    work.take()
    first = fetch()
    assert work.take() == (1, 1)
    assert (first.is_loaded, first.held_bytes) == (True, len(data))
    ref = fetch()
    assert work.take() == (0, 0)
    assert (ref.key, ref.spec, ref.key_covers_spec, ref.recipe) == (
        truth.key,
        truth.spec,
        truth.key_covers_spec,
        truth.recipe,
    )
    num_chars = len(text) - text.index(",") - 1
    assert (ref.num_bytes, ref.is_loaded, ref.held_bytes) == (len(data), False, num_chars)
    others = [ref.fork(), ref.renew(), ref.map(lambda media: media)]
    assert all(other.payload is ref.payload for other in others)
    assert ref.header == truth.header
    assert ref.data == data
    assert (ref.is_loaded, ref.held_bytes, work.take()) == (True, len(data), (1, 1))
    if truth.header is None:
        with pytest.raises(LazyDecodeError) as ours:
            ref.decode()
        with pytest.raises(type(ours.value), match=str(ours.value)):
            truth.decode()
    else:
        assert type(ref.decode()) is type(truth.decode())
    assert work.take()[0] == 0


def test_a_picture_whose_header_was_read_is_known_with_it(connector: MediaConnector) -> None:
    refs = [connector.load_from_url(data_url(PICTURE), IMAGES) for _ in range(2)]
    assert (refs[1].knows_header, refs[1].is_loaded) == (True, False)
    assert refs[1].header == refs[0].header == IMAGES.load_bytes_ref(PICTURE).header


class Memory(bytearray):
    """Memory whose end can be seen."""


def test_the_text_goes_when_it_was_decoded_or_is_not_wanted_any_more(
    connector: MediaConnector,
) -> None:
    for use in (lambda ref: ref.data, lambda ref: ref.release()):
        connector.load_from_url(data_url(PICTURE), IMAGES)
        text = Memory(data_url(PICTURE).encode())
        held = weakref.ref(text)
        ref = connector.load_from_url(memoryview(text), IMAGES)
        del text
        gc.collect()
        assert held() is not None
        use(ref)
        gc.collect()
        assert held() is None


def test_other_options_are_another_identity_of_the_same_text(
    connector: MediaConnector, work: Work
) -> None:
    grey, url = ImageMediaIO("L"), data_url(PICTURE)
    for media_io in (IMAGES, grey, IMAGES, grey):
        ref = connector.load_from_url(url, media_io)
        assert ref.key == media_io.load_bytes_ref(PICTURE).key
    assert len(work.decoded) == 2


def test_a_video_and_its_sound_share_a_known_text(connector: MediaConnector, work: Work) -> None:
    url = data_url(make_mp4() + TAIL, "video/mp4")
    decoders = VideoMediaIO(IMAGES, num_frames=4), AudioMediaIO()
    first = connector.fetch_video_and_audio(url, *decoders)
    assert work.take()[0] == 1
    again = connector.fetch_video_and_audio(url, *decoders)
    assert [ref.key for ref in again] == [ref.key for ref in first]
    assert again[0].payload is again[1].payload
    assert work.take() == (0, 0)


class OwnImages(ImageMediaIO):
    """A plug-in's decoder, of which nobody knows what it goes by."""


@pytest.mark.parametrize(
    ("url", "media_io"),
    [
        (data_url(make_jpeg()), IMAGES),
        (data_url(PICTURE).replace("base64,", "base64, "), IMAGES),
        (data_url(PICTURE) + "\n\n\n\n", IMAGES),
        (data_url(PICTURE).replace("/", "%2F").replace("image%2F", "image/"), IMAGES),
        (data_url(PICTURE), OwnImages()),
    ],
    ids=["short", "space", "lines", "percent", "plug-in"],
)
def test_what_is_not_remembered(
    connector: MediaConnector, work: Work, url: str, media_io: MediaIO[Any]
) -> None:
    refs = [connector.load_from_url(url, media_io) for _ in range(2)]
    assert refs[0].key == refs[1].key
    assert all(ref.is_loaded for ref in refs)
    assert len(work.decoded) >= 2


def test_a_text_of_the_url_safe_alphabet_is_known_by_itself(
    connector: MediaConnector, work: Work
) -> None:
    standard = data_url(PICTURE)
    head, comma, text = standard.partition(",")
    url_safe = head + comma + text.replace("+", "-").replace("/", "_")
    keys = {connector.load_from_url(url, IMAGES).key for url in (standard, url_safe)}
    assert len(keys) == 1
    work.take()
    assert {connector.load_from_url(url, IMAGES).key for url in (standard, url_safe)} == keys
    assert work.take() == (0, 0)


def test_wrong_base64_is_wrong_again(connector: MediaConnector) -> None:
    for _ in range(2):
        with pytest.raises(LazyDecodeError, match="base64"):
            connector.load_from_url(data_url(PICTURE) + "@@@@", IMAGES)


def test_a_known_text_is_refused_where_it_is_too_large(connector: MediaConnector) -> None:
    url = data_url(make_wav(seconds=2), "audio/wav")
    connector.load_from_url(url, AudioMediaIO())
    assert not connector.load_from_url(url, AudioMediaIO()).is_loaded
    with pytest.raises(ValidationError, match="Maximum file size"):
        connector.load_from_url(url, AudioMediaIO(limits=DecodeLimits(max_audio_clip_bytes=1000)))


def test_the_memory_can_be_off(work: Work) -> None:
    with MediaConnector(limits=FetchLimits(max_known_payloads=0)) as connector:
        work.take()
        refs = [connector.load_from_url(data_url(PICTURE), IMAGES) for _ in range(2)]
    assert all(ref.is_loaded for ref in refs)
    assert work.take() == (2, 2)


async def test_tenants_do_not_know_of_each_other(work: Work) -> None:
    async with MediaConnector() as connector:
        url = memoryview(data_url(PICTURE).encode())
        tag = connector.known_texts.tag(url[len("data:image/jpeg;base64,") :])
        assert tag is not None
        work.take()
        for tenant, num_decodes in (("a", 1), ("a", 0), (None, 1), ("b", 1), (None, 0), ("b", 0)):
            assert connector.known_texts.holds(tag, tenant) == (not num_decodes)
            with trace_fetch(tenant, url, tag):
                await connector.fetch_image_async(url, IMAGES)
            assert (tenant, *work.take()) == (tenant, num_decodes, num_decodes)


class Negatives(MediaConnector):
    """A plug-in that fetches something else than it was asked for."""

    key = 0

    async def load_from_url_async(self, url: Any, *args: Any, **options: Any) -> Any:
        head, _, text = bytes(url).partition(b",")
        data = base64.b64decode(text)[:-1] + bytes([self.key])
        return await super().load_from_url_async(
            head + b"," + base64.b64encode(data), *args, **options
        )


async def test_a_tag_is_not_taken_for_that_of_another_url() -> None:
    url = memoryview(data_url(PICTURE).encode())
    async with Negatives() as connector:
        tag = connector.known_texts.tag(url[len("data:image/jpeg;base64,") :])
        for key in (1, 1, 2):
            connector.key = key
            with trace_fetch(None, url, tag) as trace:
                ref = await connector.fetch_image_async(url, IMAGES)
            changed = PICTURE[:-1] + bytes([key])
            assert (ref.key, ref.data) == (IMAGES.load_bytes_ref(changed).key, changed)
            assert trace.url is None


async def test_a_tag_of_another_part_of_the_url_is_not_gone_by() -> None:
    """What a server takes for the payload need not be it: a header may hold a comma."""
    text = base64.b64encode(PICTURE).decode()
    odd = memoryview(f"data:image/jpeg,x;base64,{text}".encode())
    async with MediaConnector() as connector:
        await connector.fetch_image_async(data_url(PICTURE), IMAGES)
        tag = connector.known_texts.tag(memoryview(text.encode()))
        with trace_fetch(None, odd, tag):
            ref = await connector.fetch_image_async(odd, IMAGES)
        assert ref.data == b"x;base64," + text.encode()


async def test_a_long_text_with_a_tag_is_nobodys_work(work: Work) -> None:
    data = PICTURE + bytes(at_once.SLICED_CHARS)
    url = memoryview(data_url(data).encode())
    with MediaExecutor() as executor:
        async with MediaConnector(executor=executor) as connector:
            tag = connector.known_texts.tag(url[len("data:image/jpeg;base64,") :])
            work.take()
            tagged: list[int] = []
            connector.known_texts.tag = tagged.append  # type: ignore[assignment]
            for is_known in (False, True):
                with trace_fetch("a", url, tag):
                    ref = await connector.fetch_image_async(url, IMAGES)
                assert ref.is_loaded is not is_known
        assert tagged == []
        assert work.take() == (1, 1)


def test_long_texts_are_known_too_and_are_a_threads_work(
    connector: MediaConnector, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: set[str] = set()
    monkeypatch.setattr(
        "lazydecode.media.payloads.yield_to_others",
        lambda: paused.add(threading.current_thread().name),
    )
    data = PICTURE + bytes(at_once.SLICED_CHARS)
    refs = [connector.load_from_url(data_url(data), IMAGES) for _ in range(2)]
    assert (refs[0].key, refs[1].is_loaded) == (refs[1].key, False)
    assert work.take() == (1, 1)
    assert paused
    assert all(name.startswith("lazydecode") for name in paused)
    assert refs[1].data == data


async def test_of_many_known_texts_few_are_looked_for_in_one_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tagged: dict[int, int] = {}
    parsed: dict[int, int] = {}  # a copy of a `str`
    iteration = 0
    tag = KnownTexts.tag

    def count(texts: KnownTexts, text: memoryview, **options: Any) -> Any:
        tagged[iteration] = tagged.get(iteration, 0) + len(text)
        return tag(texts, text, **options)

    def parse(url: Any) -> Any:
        parsed[iteration] = parsed.get(iteration, 0) + len(url)
        return parse_data_url(url)

    monkeypatch.setattr(KnownTexts, "tag", count)
    monkeypatch.setattr(at_once, "parse_data_url", parse)
    data = PICTURE + bytes(at_once.QUICK_CHARS // 2)
    async with MediaConnector() as connector:
        await connector.fetch_image_async(data_url(data), IMAGES)
        tagged.clear()
        parsed.clear()
        tasks = [
            asyncio.create_task(connector.fetch_image_async(data_url(data), IMAGES))
            for _ in range(40)
        ]
        while not all(task.done() for task in tasks):
            iteration += 1
            await asyncio.sleep(0)
        assert not any(task.result().is_loaded for task in tasks)
    assert max(tagged.values()) <= at_once.QUICK_CHARS * at_once._TAG_SHARE
    assert max(parsed.values()) <= at_once.QUICK_CHARS * at_once._TAG_SHARE


def test_bytes_that_are_not_the_remembered_ones_are_not_decoded(
    connector: MediaConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should two texts have one tag after all, which nobody can bring about."""
    monkeypatch.setattr(KnownTexts, "_tag", lambda *_: bytes(16))
    connector.load_from_url(data_url(PICTURE + b"a"), IMAGES)
    ref = connector.load_from_url(data_url(PICTURE + b"b"), IMAGES)
    with pytest.raises(PayloadChangedError):
        ref.decode()
    # It is forgotten then.
    again = connector.load_from_url(data_url(PICTURE + b"b"), IMAGES)
    assert again.data == PICTURE + b"b"


# -- tags

_PIECE = known_texts._PIECE_CHARS
SIZES = st.sampled_from([MIN_CHARS, MIN_CHARS + 1, _PIECE, _PIECE + 1, 2 * _PIECE, 2 * _PIECE + 5])


@settings(max_examples=40, deadline=None)
@given(size=SIZES, at=st.floats(0, 1), other=st.integers(1, 255), end=st.integers(1, 40))
def test_a_tag_is_that_of_one_text(size: int, at: float, other: int, end: int) -> None:
    texts = KnownTexts(1)
    text = bytearray(bytes(range(251)) * (size // 251 + 1))[:size]
    tag = texts.tag(memoryview(text))
    assert tag is not None
    assert sys.getsizeof(tag.code) < 64
    assert texts.tag(memoryview(bytes(text))) == tag
    changed = bytearray(text)
    changed[min(int(at * size), size - 1)] ^= other
    others = [changed, text + bytes(end), bytes(end) + text, text[::-1]]
    if size >= 2 * _PIECE:
        others.append(text[_PIECE : 2 * _PIECE] + text[:_PIECE] + text[2 * _PIECE :])
    found = [texts.tag(memoryview(text)) for text in others]
    assert None not in found
    assert len({tag, *found}) == 1 + len(others)
    # Another process has other tags.
    assert KnownTexts(1).tag(memoryview(text)) != tag


def test_short_texts_have_no_tag() -> None:
    texts = KnownTexts(1)
    assert texts.tag(memoryview(bytes(MIN_CHARS - 1))) is None
    assert KnownTexts(0).tag(memoryview(bytes(MIN_CHARS))) is None
