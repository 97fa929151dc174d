"""RawVideoMediaIO: the bytes themselves, under an identity of their own, once they are a video."""

from __future__ import annotations

import base64

import pytest

from lazydecode.errors import CorruptMediaError, MediaTooLargeError
from lazydecode.limits import DecodeLimits
from lazydecode.media import ImageMediaIO, VideoHeader, VideoMediaIO
from lazydecode.media.raw_video import RawVideo, RawVideoMediaIO
from tests.builders import make_jpeg
from tests.builders_video import make_audio_only_mp4, make_mp4, with_index_first


def raw_io(limits: DecodeLimits | None = None) -> RawVideoMediaIO:
    return RawVideoMediaIO(VideoMediaIO(ImageMediaIO()), limits=limits or DecodeLimits())


def test_a_decode_gives_the_payload_itself_and_its_header() -> None:
    data = make_mp4(12, 6, (64, 48))
    ref = raw_io().load_bytes_ref(data)
    assert not ref.is_decoded
    video = ref.decode()
    assert isinstance(video, RawVideo)
    assert video.data is data
    assert video.header == ref.header
    header = video.header
    assert (header.width, header.height, header.num_frames, header.fps) == (64, 48, 12, 6.0)


def test_the_identity_is_not_that_of_decoded_frames() -> None:
    data = make_mp4()
    raw, frames = raw_io(), VideoMediaIO(ImageMediaIO())
    assert raw.load_bytes_ref(data).key == raw_io().load_bytes_ref(data).key
    assert raw.load_bytes_ref(data).key != frames.load_bytes_ref(data).key
    assert raw.get_decode_spec().settings["video_decode"] == "raw_bytes"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no video", "it is text"),
        (make_jpeg(), "cannot be opened"),
        (make_audio_only_mp4(), "no video stream: it has only audio"),
        (make_mp4()[:300], "cannot be opened"),
        (with_index_first(make_mp4(40, 10, (256, 192)))[:-1500], "the video is cut off"),
    ],
    ids=["text", "picture", "sound", "head", "cut"],
)
def test_what_is_no_whole_video_is_refused_at_the_decode(data: bytes, reason: str) -> None:
    ref = raw_io().load_bytes_ref(data)
    with pytest.raises(CorruptMediaError, match=reason):
        ref.decode()
    assert not ref.is_decoded


def test_a_picture_over_the_limit_is_refused() -> None:
    ref = raw_io(DecodeLimits(max_image_pixels=1000)).load_bytes_ref(make_mp4())
    with pytest.raises(MediaTooLargeError, match="64 x 48 pixels exceed"):
        ref.decode()


def test_a_jpeg_sequence_is_decoded_as_it_is_no_container() -> None:
    frames = [base64.b64encode(make_jpeg((32, 24))).decode() for _ in range(3)]
    ref = raw_io().load_base64_ref("video/jpeg", ",".join(frames))
    assert isinstance(ref.header, VideoHeader)
    decoded = ref.decode()
    assert not isinstance(decoded, RawVideo)
    assert decoded[0].shape == (3, 24, 32, 3)
