"""Parts from elsewhere that fail while a request uses them: its error, and nobody else's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazydecode.cache import (
    PROCESSOR_CACHE_REGISTRY,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ProcessorCaches,
)
from lazydecode.cache.base import CachedItem, ProcessedItem
from lazydecode.errors import BlockedURLError
from lazydecode.media import MediaPayload
from lazydecode.media.connector import MediaConnector
from lazydecode.media.connector_registry import MEDIA_CONNECTOR_REGISTRY
from lazydecode.media.video import VIDEO_LOADER_REGISTRY
from tests.builders import make_jpeg
from tests.builders_video import make_mp4
from tests.server.harness import Server, data_url, image, request, text, video

METADATA = {"fps": 1.0, "duration": 1.0, "total_num_frames": 1, "frames_indices": [0]}
SECRET = "at 0x7f0012345678 of /opt/secret/key"


def raises(exc: BaseException) -> Any:
    raise exc


NARROW = 67
"""A width that no other picture has."""


# -- video backends


BAD: dict[str, Callable[[], Any]] = {
    "raises": lambda: raises(ZeroDivisionError(SECRET)),
    "raises-key": lambda: raises(KeyError("frame")),
    "leaves": lambda: raises(SystemExit(3)),
    "finds-damage": lambda: raises(ValueError(f"no keyframe {SECRET}")),
    "gives-nothing": lambda: None,
    "gives-text": lambda: "frames",
    "gives-no-frames": lambda: (np.empty((0, 8, 8, 3), np.uint8), METADATA),
    "gives-flat": lambda: (np.zeros((8, 8), np.uint8), METADATA),
    "cannot-be-made": lambda: None,
}


@pytest.fixture(autouse=True)
def _backends() -> Iterator[None]:
    for name, work in BAD.items():

        class Backend:
            def __init__(self, name: str = name) -> None:
                if name == "cannot-be-made":
                    raise KeyError(SECRET)

            def load_bytes(self, data: bytes, work: Any = work, **options: Any) -> Any:
                return work()

        VIDEO_LOADER_REGISTRY.add(name, Backend)
    yield
    for name in BAD:
        VIDEO_LOADER_REGISTRY.remove(name)


@pytest.mark.parametrize("name", BAD)
def test_a_backend_that_fails_fails_the_item(
    render_server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = image(data_url(make_jpeg() + os.urandom(8)))
    clip = video(data_url(make_mp4(4, 2), "video/mp4"))
    options = {"video": {"video_backend": name}}
    response = render_server.render(request(good, clip, text(), media_io_kwargs=options))
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert (error["modality"], error["index"]) == ("video", 0)
    assert "0x7f0012345678" not in response.text and "secret" not in response.text
    if name != "finds-damage":  # which decoders may say of a file
        assert f"the video backend {name!r} failed: " in error["message"]
        assert f"the video backend {name!r} failed" in caplog.text
    assert render_server.render(request(good, text())).status_code == 200
    assert_nothing_held(render_server)


# -- connectors and caches


class FragileConnector(MediaConnector):
    """Does with `fragile:NAME` what NAME says."""

    async def fetch_payload_async(
        self, url: str, *, max_bytes: int, timeout_s: float
    ) -> MediaPayload:
        scheme, _, name = url.partition(":")
        if scheme == "fragile":
            given: MediaPayload = FETCHES[name]()
            return given
        return await super().fetch_payload_async(url, max_bytes=max_bytes, timeout_s=timeout_s)


FETCHES: dict[str, Callable[[], Any]] = {
    "key": lambda: raises(KeyError(SECRET)),
    "value": lambda: raises(ValueError(SECRET)),
    "system": lambda: raises(OSError(SECRET)),
    "time": lambda: raises(TimeoutError(SECRET)),
    "exit": lambda: raises(SystemExit(3)),
    "cancel": lambda: raises(asyncio.CancelledError()),
    "nothing": lambda: None,
    "bytes": lambda: b"bytes",
    "refused": lambda: raises(BlockedURLError("that bucket is closed")),
}


class Faults:
    """What the caches below raise in which of their methods."""

    def __init__(self) -> None:
        self.methods: dict[str, BaseException] = {}

    @contextmanager
    def __call__(self, method: str, exc: BaseException) -> Iterator[None]:
        self.methods[method] = exc
        try:
            yield
        finally:
            del self.methods[method]

    def meet(self, method: str) -> None:
        if (exc := self.methods.get(method)) is not None:
            raise exc


FAULTS = Faults()


class FragileCache(MultiModalProcessorOnlyCache):
    def is_cached_item(self, mm_hash: str) -> bool:
        FAULTS.meet("is_cached_item")
        return super().is_cached_item(mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        FAULTS.meet("touch_sender_cache_item")
        super().touch_sender_cache_item(mm_hash)

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> CachedItem:
        found = super().get_and_update_item(mm_item, mm_hash)
        FAULTS.meet("get_and_update_item")
        return found


@pytest.fixture(scope="module")
def fragile_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    MEDIA_CONNECTOR_REGISTRY.register("fragile")(FragileConnector)
    PROCESSOR_CACHE_REGISTRY.add(
        "fragile",
        ProcessorCaches(
            render=FragileCache,
            sender=MultiModalProcessorSenderCache,
            receiver=MultiModalReceiverCache,
        ),
    )
    with Server(
        tiny_model("qwen2_5_vl", weights=False),
        engine="none",
        media_connector="fragile",
        mm_processor_cache="fragile",
    ) as server:
        yield server
    MEDIA_CONNECTOR_REGISTRY.remove("fragile")
    PROCESSOR_CACHE_REGISTRY.remove("fragile")


@pytest.mark.parametrize("name", FETCHES)
def test_a_connector_that_fails_fails_the_item(
    fragile_server: Server, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = image(data_url(make_jpeg() + os.urandom(8)))
    bad = image(f"fragile:{name}")
    with ThreadPoolExecutor(4) as pool:
        failing = [pool.submit(fragile_server.render, request(good, bad, text())) for _ in "12"]
        other = pool.submit(fragile_server.render, request(good, text()))
        alone = fragile_server.render(request(bad, text()))
        responses = [future.result() for future in failing]
        assert other.result().status_code == 200
    for response, index in ((alone, 0), (responses[0], 1), (responses[1], 1)):
        error = response.json()["error"]
        assert (error["modality"], error["index"]) == ("image", index)
        assert "0x7f0012345678" not in response.text and "secret" not in response.text
        if name == "refused":  # an error of ours, which the connector means
            assert response.status_code == 400
            assert error["message"] == f"image {index}: that bucket is closed"
        else:
            assert response.status_code == 422, response.text
            assert f"image {index}: the media connector 'fragile' failed: " in error["message"]
            assert f"request {error['request_id']}: the media connector" in caplog.text
    assert fragile_server.render(request(good, text())).status_code == 200
    assert_nothing_held(fragile_server)


@pytest.mark.parametrize("exc", [KeyError(SECRET), SystemExit(3)], ids=["key", "exit"])
@pytest.mark.parametrize(
    "method", ["is_cached_item", "touch_sender_cache_item", "get_and_update_item"]
)
def test_a_cache_that_fails_fails_the_request_and_keeps_nothing_of_it(
    fragile_server: Server, method: str, exc: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    cache = fragile_server.context.renderer.render_cache
    assert cache is not None
    body = request(image(data_url(make_jpeg() + os.urandom(8))), text())
    before = cache.snapshot()
    with FAULTS(method, exc):
        response = fragile_server.render(body)
    assert response.status_code == 500
    assert "0x7f0012345678" not in response.text and "fragile" not in response.text
    assert "the processor cache 'fragile' failed" in caplog.text
    assert cache.snapshot() == before
    assert_nothing_held(fragile_server)
    answer = fragile_server.render(body).json()
    assert fragile_server.render(body).json()["features"] == answer["features"]
    assert len(cache) == len(before) + 1


# -- classes of the model's folder


@pytest.mark.parametrize("exc", [KeyError(SECRET), SystemExit(3)], ids=["key", "exit"])
def test_a_models_class_that_fails_fails_the_item(
    fragile_server: Server,
    exc: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    image_class: Any = type(fragile_server.context.frontend.processor.image_processor)
    process = image_class.preprocess

    def fails_on_narrow(self: Any, images: Any, *args: Any, **options: Any) -> Any:
        if NARROW in {side for each in images for side in getattr(each, "shape", each.size)}:
            raise exc
        return process(self, images, *args, **options)

    monkeypatch.setattr(image_class, "preprocess", fails_on_narrow)
    good = image(data_url(make_jpeg() + os.urandom(8)))
    narrow = image(data_url(make_jpeg((NARROW, 120)) + os.urandom(8)))
    response = fragile_server.render(request(good, narrow, text()))
    error = response.json()["error"]
    assert (response.status_code, error["modality"], error["index"]) == (400, "image", 1)
    assert "0x7f0012345678" not in response.text and "secret" not in response.text
    assert f"processor fails on an item: {type(exc).__name__}" in caplog.text
    assert fragile_server.render(request(good, text())).status_code == 200
    assert_nothing_held(fragile_server)


def assert_nothing_held(server: Server) -> None:
    server.wait_idle()
    renderer = server.context.renderer
    assert renderer.decoded_budget.held_bytes == renderer.encoded_budget.held_bytes == 0
