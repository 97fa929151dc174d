"""The offline helpers: plain decoded objects, by every scheme."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pybase64
import pytest
from PIL import Image

from lazydecode.errors import BlockedURLError, CorruptMediaError, MediaTooLargeError
from lazydecode.limits import FetchLimits, FetchPolicy
from lazydecode.media.connector import MediaConnector
from lazydecode.utils import fetch_audio, fetch_image, fetch_video
from tests.builders import corners, make_png, make_wav
from tests.cases import FOLDER
from tests.origin import Origin


def data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{pybase64.b64encode(data).decode()}"


def test_an_image_is_decoded() -> None:
    image = fetch_image(data_url("image/png", make_png()), {"image_mode": "L"})
    assert type(image) is Image.Image
    assert (image.mode, image.size) == ("L", (64, 48))


def test_audio_is_decoded() -> None:
    samples, rate = fetch_audio(data_url("audio/wav", make_wav()))
    assert (samples.dtype, samples.shape, rate) == (np.float32, (8000,), 16_000)


def test_a_video_is_decoded() -> None:
    data = (FOLDER / "k3_plain.mp4").read_bytes()
    frames, metadata = fetch_video(data_url("video/mp4", data), {"num_frames": 4})
    assert frames.shape[0] == len(metadata["frames_indices"]) == 4
    assert frames.dtype == np.uint8


def test_a_file_below_the_allowed_folder(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(make_png())
    image = fetch_image(path.as_uri(), allowed_local_media_path=tmp_path)
    assert corners(image)["tl"] == (220, 30, 30)
    with pytest.raises(BlockedURLError):
        fetch_image(path.as_uri())


def test_the_connector_that_is_given_fetches_and_stays_open() -> None:
    with Origin() as origin:
        url = origin.serve("/a.png", make_png())
        policy = FetchPolicy(allowed_private_networks=("127.0.0.0/8",))
        with MediaConnector(policy=policy) as connector:
            assert fetch_image(url, connector=connector).size == (64, 48)
            assert fetch_image(url, connector=connector).size == (64, 48)
        assert origin.hits("/a.png") == 2
        with pytest.raises(BlockedURLError):
            fetch_image(url)
        small = MediaConnector(policy=policy, limits=FetchLimits(max_bytes=10))
        with small, pytest.raises(MediaTooLargeError):
            fetch_image(url, connector=small)


def test_what_does_not_decode_is_our_error() -> None:
    with pytest.raises(CorruptMediaError):
        fetch_image(data_url("image/png", b"no picture"))
    with pytest.raises(CorruptMediaError):
        fetch_audio(data_url("audio/wav", make_png()))
