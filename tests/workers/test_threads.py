"""A server without worker processes: the time limit holds for threads, which go on all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazydecode.media.image import ImageMediaIO
from tests.builders import make_jpeg
from tests.server.harness import Server, data_url, image, request, text

LIMIT_S = 2.0
"""More than a picture takes on a busy machine, once the libraries are loaded."""
SLOW = (40, 30)
"""Size of the picture whose decode hangs."""


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    model = tiny_model("qwen2_5_vl", weights=False)
    with Server(model, engine="none", media_decode_timeout=LIMIT_S) as server:
        yield server


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """Lets the decode that hangs go on; at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("skips_cache", [False, True])
def test_a_decode_that_hangs_is_named_and_hurts_no_other_item(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    go_on: threading.Event,
    skips_cache: bool,
) -> None:
    ended = threading.Event()
    original = ImageMediaIO._decode

    def decode(self: ImageMediaIO, data: bytes, facts: Any) -> Any:
        if facts.oriented_size == SLOW:
            assert go_on.wait(60)
            ended.set()
        return original(self, data, facts)

    monkeypatch.setattr(ImageMediaIO, "_decode", decode)
    fields = {"skip_mm_cache": skips_cache}
    first = request(image(data_url(make_jpeg((48, 48), comment=str(skips_cache)))), text())
    assert server.render(first).status_code in (200, 504)  # what is slow once is slow here
    good, slow = data_url(make_jpeg()), data_url(make_jpeg(SLOW, comment=str(skips_cache)))
    answer = server.render(request(image(good), image(slow), text(), **fields))
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["modality"], error["index"]) == ("image", 1)
    assert f"longer than the {LIMIT_S:g} s" in error["message"]
    server.wait_idle()
    assert server.context.renderer.decoded_budget.held_bytes == 0
    assert not ended.is_set()
    assert server.render(request(image(good), text(), **fields)).status_code == 200
    go_on.set()
    assert ended.wait(60)
    assert server.render(request(image(slow), text(), **fields)).status_code == 200


def test_a_request_that_passes_the_cache_by_is_processed_off_the_ordered_worker(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = server.context.renderer.frontend.mm_processor
    assert processor is not None
    threads: list[str] = []
    original = processor.process_single

    def process(inputs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(inputs)

    monkeypatch.setattr(processor, "process_single", process)
    body = request(image(data_url(make_jpeg((64, 64)))), text())
    cached = server.render(body).json()["features"]["kwargs_data"]
    passed = server.render({**body, "skip_mm_cache": True}).json()["features"]["kwargs_data"]
    assert passed == cached
    assert len(threads) == 2
    assert all(name.startswith("lazydecode-process") for name in threads)
