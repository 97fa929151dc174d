"""Videos sent as comma-separated base64 JPEG frames."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pybase64
import pytest
from PIL import Image

from lazydecode.errors import CorruptMediaError, MediaTooLargeError, ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media import ImageMediaIO, MediaRef, VideoHeader, VideoMediaIO, plan_frames
from lazydecode.media.base import decode_base64


def jpeg(level: int, size: tuple[int, int] = (64, 48)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (level, level, level)).save(file, "JPEG", quality=95)
    return file.getvalue()


def sequence(*levels: int, size: tuple[int, int] = (64, 48)) -> str:
    return ",".join(pybase64.b64encode(jpeg(level, size)).decode() for level in levels)


def video_io(image_mode: str = "RGB", **options: Any) -> VideoMediaIO:
    return VideoMediaIO(ImageMediaIO(image_mode), **options)


def load(text: str | bytes | memoryview, **options: Any) -> MediaRef[Any]:
    return video_io(**options).load_base64_ref("video/jpeg", text)


def levels(frames: np.ndarray[Any, Any]) -> list[int]:
    return [round(float(frame.mean())) for frame in frames]


def test_frames_and_metadata() -> None:
    frames, metadata = load(sequence(20, 90, 200)).decode()
    assert frames.shape == (3, 48, 64, 3)
    assert levels(frames) == [20, 90, 200]
    assert metadata == {
        "fps": 1.0,
        "duration": 3.0,
        "total_num_frames": 3,
        "frames_indices": [0, 1, 2],
        "timestamps": [0.0, 1.0, 2.0],
        "video_backend": "jpeg_sequence",
        "do_sample_frames": False,
        "width": 64,
        "height": 48,
    }


@pytest.mark.parametrize("media_type", ["video/jpeg", "VIDEO/JPEG", "Video/Jpeg"])
def test_media_type_in_any_case(media_type: str) -> None:
    ref = video_io().load_base64_ref(media_type, sequence(20, 30))
    assert levels(ref.decode()[0]) == [20, 30]
    assert levels(video_io().load_base64(media_type, sequence(20, 30))[0]) == [20, 30]


@pytest.mark.parametrize("form", [str, str.encode, lambda text: memoryview(text.encode())])
def test_text_may_be_bytes_or_a_view(form: Any) -> None:
    text = sequence(20, 30)
    ref = load(form(text))
    assert ref.data == text.encode()
    assert ref.key == load(text).key
    assert levels(ref.decode()[0]) == [20, 30]


def test_what_the_client_states_is_the_metadata() -> None:
    _, metadata = load(
        sequence(20, 30),
        fps=4,
        frames_indices=[3, 7],
        total_num_frames=12,
        duration=2.5,
        do_sample_frames=True,
    ).decode()
    assert metadata["fps"] == 4.0
    assert metadata["frames_indices"] == [3, 7]
    assert metadata["timestamps"] == [0.75, 1.75]
    assert metadata["total_num_frames"] == 12
    assert metadata["duration"] == 2.5
    assert metadata["do_sample_frames"] is True


def test_duration_without_a_rate_is_zero() -> None:
    _, metadata = load(sequence(20, 30), fps=0).decode()
    assert (metadata["duration"], metadata["timestamps"]) == (0.0, [0.0, 0.0])


def test_only_the_first_frames_are_kept() -> None:
    text = sequence(20, 30, 40)
    ref = load(text + ",!!! not base64", num_frames=2)
    assert ref.data == ",".join(text.split(",")[:2]).encode()
    assert levels(ref.decode()[0]) == [20, 30]
    assert levels(load(text, num_frames=9).decode()[0]) == [20, 30, 40]
    assert levels(load(text, num_frames=-1).decode()[0]) == [20, 30, 40]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_frames": 0}, "num_frames must be greater than 0 or -1"),
        ({"num_frames": -5}, "num_frames must be greater than 0 or -1"),
        ({"frames_indices": "012"}, "list of integers"),
        ({"frames_indices": [0, 1.0]}, "list of integers"),
        ({"frames_indices": [0, True]}, "list of integers"),
        ({"frames_indices": [0]}, "frames_indices length"),
        ({"total_num_frames": 0}, "positive int"),
        ({"total_num_frames": 2.0}, "positive int"),
        ({"total_num_frames": 1}, "must be >="),
        ({"duration": -1}, "must be a non-negative number"),
        ({"duration": "2"}, "must be a non-negative number"),
    ],
)
def test_wrong_options_fail_before_any_frame_is_decoded(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        load("AAAA,AAAA", **options)


def test_frames_are_decoded_later() -> None:
    ref = load(sequence(20, 30) + ",AAAA")
    assert not ref.is_decoded
    with pytest.raises(CorruptMediaError, match="frame 2 of the jpeg sequence"):
        ref.decode()


@pytest.mark.parametrize("bad", ["", "é", "A", "====", "aGVsbG8="])
def test_frame_that_is_no_picture_names_its_number(bad: str) -> None:
    with pytest.raises(CorruptMediaError, match="frame 1 of the jpeg sequence"):
        load(f"{sequence(20)},{bad}").decode()


def test_frames_of_different_sizes_are_an_error() -> None:
    text = sequence(20) + "," + sequence(30, size=(32, 48))
    with pytest.raises(CorruptMediaError, match=r"frame 1 .* has shape"):
        load(text).decode()


def test_key_tells_sequence_from_file_and_frame_decoders_from_each_other() -> None:
    text = sequence(20, 30)
    ref = load(text)
    keys = {
        ref.key,
        video_io().load_bytes_ref(text.encode()).key,
        video_io("L").load_base64_ref("video/jpeg", text).key,
        load(text, fps=2).key,
        load(sequence(20, 31)).key,
    }
    assert len(keys) == 5
    assert load(text).key == ref.key
    assert ref.spec.settings["num_frames"] == 32


def test_cut_tail_is_no_part_of_the_key() -> None:
    text = sequence(20, 30)
    assert load(text + ",AAAA", num_frames=2).key == load(text, num_frames=2).key


def test_grey_frames_stay_grey() -> None:
    frames, metadata = video_io("L").load_base64("video/jpeg", sequence(20, 30))
    assert frames.shape == (2, 48, 64)
    assert (metadata["width"], metadata["height"]) == (64, 48)


def test_limits() -> None:
    text = sequence(20, 30, 40)
    with pytest.raises(MediaTooLargeError, match=r"3 frames .* at most 2"):
        load(text, limits=DecodeLimits(max_video_frames=2))
    few = DecodeLimits(max_video_decoded_bytes=2 * 64 * 48 * 3)
    with pytest.raises(MediaTooLargeError, match="3 frames of 64x48"):
        load(text, limits=few).decode()
    assert len(load(text, num_frames=2, limits=few).decode()[0]) == 2


def test_header_and_plan_need_no_decode() -> None:
    ref = load(sequence(20, 30, 40), fps=2, frames_indices=[0, 5, 9], total_num_frames=10)
    header = ref.header
    assert header == VideoHeader(64, 48, fps=2.0, duration_s=5.0, num_frames=3)
    assert not ref.is_decoded
    assert plan_frames(ref.spec, header) == ref.decode()[1]
    assert load("AAAA").header is None


def test_other_media_types_are_files() -> None:
    with pytest.raises(CorruptMediaError, match="base64"):
        video_io().load_base64_ref("video/mp4", sequence(20, 30))
    ref = video_io().load_base64_ref("image/jpeg", sequence(20))
    assert ref.data == decode_base64(sequence(20))
