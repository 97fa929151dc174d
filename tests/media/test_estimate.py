"""Estimates of decoded size, from headers."""

from __future__ import annotations

import numpy as np
import pytest

from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import MediaRef, VideoHeader
from lazydecode.media.estimate import estimate_decoded_bytes
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import VideoMediaIO
from tests.builders import make_av_audio, make_jpeg, make_wav
from tests.cases import FOLDER


def test_an_image_is_four_bytes_a_pixel() -> None:
    ref = ImageMediaIO().load_bytes_ref(make_jpeg((64, 48), orientation=6))
    assert estimate_decoded_bytes(ref) == 64 * 48 * 4
    assert not ref.is_decoded


def test_audio_is_four_bytes_a_sample_and_channel() -> None:
    ref = AudioMediaIO().load_bytes_ref(make_wav(freqs=(440.0, 880.0), rate=8000, seconds=1))
    assert estimate_decoded_bytes(ref) == 8000 * 2 * 4
    webm = AudioMediaIO().load_bytes_ref(make_av_audio("webm", "libopus", seconds=1))
    assert estimate_decoded_bytes(webm) == pytest.approx(48_000 * 4, rel=0.05)


@pytest.mark.parametrize("num_frames", [1, 4, -1])
def test_a_video_is_its_planned_frames(num_frames: int) -> None:
    data = (FOLDER / "k3_plain.mp4").read_bytes()
    ref = VideoMediaIO(ImageMediaIO(), num_frames=num_frames).load_bytes_ref(data)
    frames, _ = ref.fork().decode()
    assert estimate_decoded_bytes(ref) == np.asarray(frames).nbytes


def test_a_video_whose_header_says_little_is_what_was_asked_for() -> None:
    header = VideoHeader(width=10, height=5)
    spec = VideoMediaIO(ImageMediaIO(), num_frames=3).get_decode_spec()
    ref: MediaRef[None] = MediaRef(lambda: None, b"x", spec, header_probe=lambda: header)
    assert estimate_decoded_bytes(ref) == 3 * 10 * 5 * 3


def test_without_a_header_it_follows_from_the_payload() -> None:
    ref = ImageMediaIO().load_bytes_ref(b"x" * 100)
    assert estimate_decoded_bytes(ref) == 800
    ref.release()
    assert estimate_decoded_bytes(ref) == 0
