"""Parts from elsewhere that fail while a request uses them: its error, and nobody else's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lazydecode.media.video import VIDEO_LOADER_REGISTRY
from tests.builders import make_jpeg
from tests.builders_video import make_mp4
from tests.server.harness import Server, data_url, image, request, text, video

METADATA = {"fps": 1.0, "duration": 1.0, "total_num_frames": 1, "frames_indices": [0]}


def raises(exc: BaseException) -> Any:
    raise exc


BAD: dict[str, Callable[[], Any]] = {
    "raises": lambda: raises(ZeroDivisionError("at 0x7f0012345678 of /opt/secret/key")),
    "raises-key": lambda: raises(KeyError("frame")),
    "gives-nothing": lambda: None,
    "gives-text": lambda: "frames",
    "gives-no-frames": lambda: (np.empty((0, 8, 8, 3), np.uint8), METADATA),
    "gives-flat": lambda: (np.zeros((8, 8), np.uint8), METADATA),
}


@pytest.fixture(autouse=True)
def _backends() -> Iterator[None]:
    for name, work in BAD.items():

        class Backend:
            def load_bytes(self, data: bytes, work: Any = work, **options: Any) -> Any:
                return work()

        VIDEO_LOADER_REGISTRY.add(name, Backend)
    yield
    for name in BAD:
        VIDEO_LOADER_REGISTRY.remove(name)


@pytest.mark.parametrize("name", BAD)
def test_a_backend_that_fails_fails_the_item(render_server: Server, name: str) -> None:
    good = image(data_url(make_jpeg() + os.urandom(8)))
    clip = video(data_url(make_mp4(4, 2), "video/mp4"))
    options = {"video": {"video_backend": name}}
    response = render_server.render(request(good, clip, text(), media_io_kwargs=options))
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert (error["modality"], error["index"]) == ("video", 0)
    assert "0x7f0012345678" not in response.text and "secret" not in response.text
    assert render_server.render(request(good, text())).status_code == 200
    render_server.wait_idle()
    renderer = render_server.context.renderer
    assert renderer.decoded_budget.held_bytes == renderer.encoded_budget.held_bytes == 0
