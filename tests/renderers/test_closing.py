"""A renderer ends all it started, also where a part from another package does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lazydecode.cache import (
    PROCESSOR_CACHE_REGISTRY,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ProcessorCaches,
)
from lazydecode.media.connector import MediaConnector
from lazydecode.media.connector_registry import MEDIA_CONNECTOR_REGISTRY
from lazydecode.renderers.timeline import Timeline
from tests.builders import make_jpeg
from tests.renderers.conftest import OpenRenderer
from tests.renderers.test_renderer import make_request
from tests.server.harness import data_url, image


class StubbornConnector(MediaConnector):
    async def close(self) -> None:
        await super().close()
        raise KeyError("connector")


class StubbornCache(MultiModalProcessorOnlyCache):
    def close(self) -> None:
        super().close()
        raise KeyError("cache")


@pytest.fixture
def stubborn_parts() -> Iterator[None]:
    MEDIA_CONNECTOR_REGISTRY.register("stubborn")(StubbornConnector)
    caches = ProcessorCaches(
        render=StubbornCache,
        sender=MultiModalProcessorSenderCache,
        receiver=MultiModalReceiverCache,
    )
    PROCESSOR_CACHE_REGISTRY.add("stubborn", caches)
    yield
    MEDIA_CONNECTOR_REGISTRY.remove("stubborn")
    PROCESSOR_CACHE_REGISTRY.remove("stubborn")


@pytest.mark.usefixtures("stubborn_parts")
async def test_parts_that_fail_to_close_keep_nothing_else_open(
    open_renderer: OpenRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    settings = {"media_connector": "stubborn", "mm_processor_cache": "stubborn"}
    async with open_renderer(**settings) as renderer:
        request = make_request(image(data_url(make_jpeg())))
        async with renderer.open(request, timeline=Timeline()) as rendered:
            await rendered.render(with_payload=True)
        assert {t.name for t in set(threading.enumerate()) - before} >= {"lazydecode-mm_0"}
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("lazydecode")}
    assert "the media connector 'stubborn' failed" in caplog.text
    assert "the processor cache 'stubborn' failed" in caplog.text
