"""Frames stand upright, and are gone once they were converted."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import ExifTags, Image

from lazydecode.media import ImageMediaIO, VideoMediaIO
from lazydecode.media.video_backends.pixels import Orientation
from tests.builders_video import make_mp4, turn

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("how", [0, 90])
def test_decoded_frames_do_not_wait_for_the_collector(how: int) -> None:
    data = turn(make_mp4(frames=8), how)
    frames, _ = VideoMediaIO(ImageMediaIO(), num_frames=8).load_bytes(data)
    assert len(frames) == 8
    assert not [kept for kept in gc.get_objects() if type(kept) is av.VideoFrame]


@pytest.mark.parametrize(
    ("degrees", "turned"), [(0, 0), (90, 1), (-90, -1), (180, 2), (-180, 2), (85, 1)]
)
def test_an_angle_counts_counterclockwise(degrees: int, turned: int) -> None:
    picture = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    upright = Orientation.from_angle(degrees).apply(picture)
    np.testing.assert_array_equal(upright, np.rot90(picture, turned))


@pytest.mark.parametrize(
    ("orientation", "upper_left"), [(None, RED), (1, RED), (3, BLUE), (6, BLUE), (8, RED)]
)
def test_motion_jpeg_with_exif_is_decoded(
    orientation: int | None, upper_left: tuple[int, int, int]
) -> None:
    """FFmpeg hands the EXIF on beside the frame, as a kind of data that PyAV has no name for."""
    frames, _ = VideoMediaIO(ImageMediaIO()).load_bytes(_motion_jpeg(orientation))
    size = (64, 48) if orientation in (6, 8) else (48, 64)
    assert frames.shape == (2, *size, 3)
    np.testing.assert_allclose(frames[0, 4, 4], upper_left, atol=8)


def _motion_jpeg(orientation: int | None) -> bytes:
    """Two pictures of 64x48, red above blue, as they are stored."""
    picture = Image.new("RGB", (64, 48), RED)
    picture.paste(BLUE, (0, 24, 64, 48))
    exif = Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    jpeg, avi = io.BytesIO(), io.BytesIO()
    picture.save(jpeg, "JPEG", exif=exif, quality=95)
    with av.open(avi, "w", format="avi") as output:
        stream = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for number in range(2):
            packet = av.Packet(jpeg.getvalue())
            packet.stream, packet.time_base = stream, Fraction(1, 10)
            packet.pts = packet.dts = number
            packet.is_keyframe = True
            output.mux(packet)
    return avi.getvalue()
