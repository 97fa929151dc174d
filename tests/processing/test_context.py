"""Which decoder a model's media get, and how many items it takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazydecode.errors import TooManyItemsError
from lazydecode.limits import DecodeLimits
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import VideoMediaIO
from lazydecode.processing import context
from lazydecode.processing.context import (
    BaseProcessingInfo,
    InputProcessingContext,
    ModelConfig,
    MultiModalConfig,
    get_video_processor_cls_name,
)
from tests.builders import make_jpeg


def info(model_config: object = None, **options: Any) -> BaseProcessingInfo:
    return BaseProcessingInfo(InputProcessingContext(model_config, None, **options))


def test_decoders_get_the_options_of_their_modality() -> None:
    options = {"image": {"image_mode": "L"}, "video": {"num_frames": 5}, "audio": {"x": 1}}
    image = info().get_media_io("image", options)
    assert isinstance(image, ImageMediaIO) and image.image_mode == "L"
    audio = info().get_media_io("audio", options)
    assert isinstance(audio, AudioMediaIO)
    assert audio.get_decode_spec().settings["x"] == 1
    video = info().get_media_io("video", options)
    assert isinstance(video, VideoMediaIO)
    assert video.get_decode_spec().settings["num_frames"] == 5
    assert video.image_io.image_mode == "L"
    with pytest.raises(ValueError, match="'smell'"):
        info().get_media_io("smell")


def test_limits_reach_the_decoders() -> None:
    tight = info(decode_limits=DecodeLimits(max_image_pixels=10))
    with pytest.raises(ValueError, match="exceed"):
        tight.get_media_io("image").load_bytes_ref(make_jpeg())


@pytest.mark.parametrize(
    ("kind", "setting", "asked", "backend"),
    [
        (None, None, None, "pyav"),
        ("Qwen2VLVideoProcessor", None, None, "qwen2_vl"),
        ("Qwen2VLVideoProcessor", "pyav", None, "qwen2_vl"),
        ("OtherVideoProcessor", None, None, "pyav"),
        ("OtherVideoProcessor", "qwen2_vl", None, "qwen2_vl"),
        ("Qwen2VLVideoProcessor", None, "pyav", "pyav"),
    ],
)
def test_the_video_backend_follows_request_then_model_then_setting(
    monkeypatch: pytest.MonkeyPatch,
    kind: str | None,
    setting: str | None,
    asked: str | None,
    backend: str,
) -> None:
    monkeypatch.setattr(context, "get_video_processor_cls_name", lambda model_config: kind)
    options = {"video": {"video_backend": asked}} if asked else None
    media_io = info(object(), video_loader_backend=setting).get_media_io("video", options)
    assert isinstance(media_io, VideoMediaIO)
    assert media_io.video_loader_backend == backend


def test_the_class_name_is_read_from_the_model_folder(tmp_path: Path) -> None:
    model = ModelConfig(str(tmp_path))
    assert get_video_processor_cls_name(model) is None
    (tmp_path / "video_preprocessor_config.json").write_text("not json")
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"video_processor": {"video_processor_type": "NestedVideoProcessor"}})
    )
    assert get_video_processor_cls_name(model) == "NestedVideoProcessor"
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"video_processor_type": "OwnVideoProcessor"})
    )
    assert get_video_processor_cls_name(model) == "OwnVideoProcessor"
    assert get_video_processor_cls_name(SimpleNamespace(model="hub/name")) is None
    stated = ModelConfig("hub/name", video_processor_cls_name="Stated")
    assert get_video_processor_cls_name(stated) == "Stated"


def test_too_many_items_are_refused_by_the_lower_limit() -> None:
    class Limited(BaseProcessingInfo):
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"image": None, "video": 1}

    config = ModelConfig("m", multimodal_config=MultiModalConfig(limit_per_prompt={"image": 2}))
    limited = Limited(InputProcessingContext(config, None))
    assert limited.get_allowed_mm_limits() == {"image": 2, "video": 1}
    limited.parse_mm_data({"image": [None, None]})
    with pytest.raises(TooManyItemsError, match="3 image items; at most 2") as caught:
        limited.parse_mm_data({"image": [None] * 3})
    assert caught.value.index == 2
    limited.parse_mm_data({"image": [None] * 3}, validate=False)
    assert limited.model_id == "m"
