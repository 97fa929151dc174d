"""Decode options that nobody knows are refused, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazydecode.config import Settings
from lazydecode.errors import ValidationError
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import VIDEO_LOADER_REGISTRY, VideoMediaIO
from lazydecode.media.video_backends.pyav import PyAVVideoLoader
from lazydecode.server.loading import load_context
from tests.builders import make_jpeg
from tests.builders_video import make_mp4
from tests.server.harness import Server, data_url, image, request, text, video

PARTS = {
    "image": image(data_url(make_jpeg())),
    "video": video(data_url(make_mp4(frames=8, fps=4, size=(64, 64)), "video/mp4")),
}


@pytest.mark.parametrize("sent", ["image", "video"])
@pytest.mark.parametrize(
    ("modality", "name", "known"),
    [
        ("image", "x", "image_mode, jpeg_scale, rgba_background_color"),
        ("image", "frames_indices", "image_mode"),
        ("image", "data", "image_mode"),
        ("video", "max_duration", "frame_recovery, frames_indices"),
        ("video", "backend", "video_backend"),
        ("video", "", "num_frames"),
        ("audio", "sample_rate", "audio_backend"),
    ],
)
def test_an_unknown_option_is_named_with_those_that_are_known(
    render_server: Server, sent: str, modality: str, name: str, known: str
) -> None:
    options = {modality: {name: 1}}
    response = render_server.render(request(PARTS[sent], text(), media_io_kwargs=options))
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["param"], error["modality"]) == ("media_io_kwargs", modality)
    assert error.get("index") == (0 if sent == modality else None)
    assert repr(name) in error["message"] and known in error["message"]


@pytest.mark.parametrize("options", [{"video_backend": "vhs"}, {"device": 1}], ids=str)
def test_what_no_item_may_have_names_the_first_one(render_server: Server, options: Any) -> None:
    body = request(PARTS["image"], *[PARTS["video"]] * 2, media_io_kwargs={"video": options})
    response = render_server.render(body)
    error = response.json()["error"]
    assert (response.status_code, error["modality"], error["index"]) == (400, "video", 0)
    assert error["param"] == min(options)


@pytest.mark.parametrize(
    "options", [{"frame_indices": [1, 8]}, {"start_time": 2}, {"timestamps": [0.1, 2.5]}], ids=str
)
def test_what_does_not_fit_one_video_names_it_whether_it_is_decoded_or_not(
    render_server: Server, options: Any
) -> None:
    long, short = (video(data_url(make_mp4(n, 4), "video/mp4")) for n in (12, 6))
    body = request(long, PARTS["image"], short, media_io_kwargs={"video": options})
    messages = set()
    for path, payload in (("/render", "tensors"), ("/render", "none"), ("/count", None)):
        asked = body if payload is None else {**body, "mm_payload": payload}
        response = render_server.post(f"/v1/chat/completions{path}", asked)
        error = response.json()["error"]
        assert (response.status_code, error["modality"], error["index"]) == (400, "video", 1)
        messages.add(error["message"])
    assert len(messages) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"image": {"image_mode": "L", "rgba_background_color": [1, 2, 3]}},
        {"video": {"video_backend": "qwen2_vl", "min_frames": 4, "fps": 2.0}},
        {"video": {"video_backend": "pyav", "num_frames": 4, "max_frames": 4}},
        {"video": {"video_backend": "pyav", "start_time": 0, "end_time": 1}},
        {"video": {"video_backend": "pyav", "frame_indices": [0, 2], "frame_recovery": True}},
        {"video": {"do_sample_frames": False, "total_num_frames": 8, "duration": 2}},
    ],
)
def test_known_options_pass(render_server: Server, options: Any) -> None:
    (modality,) = options
    body = request(PARTS[modality], text(), media_io_kwargs=options)
    assert render_server.render(body).status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": {"x": 1}}, "'x' is no option"),
        ({"video": {"video_backend": "pyav", "min_frames": 4}}, "'min_frames' is no option"),
        ({"smell": {}}, "smell"),
    ],
)
def test_the_server_does_not_start_with_options_that_mean_nothing(
    tiny_model: Callable[..., Path], options: Any, message: str
) -> None:
    model = tiny_model("qwen2_5_vl", weights=False)
    with pytest.raises(ValidationError, match=message) as caught:
        load_context(str(model), Settings(engine="none", media_io_kwargs=options))
    assert caught.value.parameter == "media_io_kwargs"


class FromElsewhere:
    """A backend that is no `VideoLoader`, and says nothing about its options."""

    def load_bytes(self, data: bytes, num_frames: int = -1, **options: Any) -> Any:
        raise NotImplementedError


class WithOptions(PyAVVideoLoader):
    own_options = frozenset({"denoise"})


@pytest.fixture
def backends() -> Iterator[None]:
    VIDEO_LOADER_REGISTRY.add("elsewhere", FromElsewhere)
    VIDEO_LOADER_REGISTRY.add("options", WithOptions)
    yield
    VIDEO_LOADER_REGISTRY.remove("elsewhere")
    VIDEO_LOADER_REGISTRY.remove("options")


def test_backends_name_their_own_options(backends: None) -> None:
    def names(backend: str) -> frozenset[str] | None:
        return VideoMediaIO(ImageMediaIO(), video_backend=backend).option_names()

    plain, own = names("pyav"), names("options")
    assert plain is not None and own == plain | {"denoise"}
    assert names("elsewhere") is None
