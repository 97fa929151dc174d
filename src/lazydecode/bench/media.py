"""Media for benchmarks, built from code: the same bytes on every machine with the same encoders."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.base import MediaIO
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.video import VideoMediaIO

IMAGE_SIZES: Final = {
    "512²": (512, 512),
    "1024²": (1024, 1024),
    "2048²": (2048, 2048),
    "3840x2160": (3840, 2160),
}
_NOT_SHORT: Final = ("PNG 1024²", "PNG 2048²", "PNG 3840x2160", "WAV 3 s")
_SPEECH_RATE_HZ: Final = 48_000
"""Opus knows no 44.1 kHz; one rate for all keeps the rows comparable."""


@dataclass(frozen=True, slots=True)
class BenchItem:
    """One encoded item, and what decodes it."""

    name: str
    modality: str
    kind: str
    """Encoding: jpeg, png, wav, mp3, opus, mp4."""
    data: bytes
    media_io: MediaIO[Any]

    def __repr__(self) -> str:
        return f"<BenchItem {self.name}, {len(self.data)} bytes>"


def picture(size: tuple[int, int], seed: int = 0) -> NDArray[np.uint8]:
    """Return RGB pixels of (width, height) `size`: gradients, edges and fine noise.

    JPEG at quality 90 makes about 0.3 to 0.5 bytes of a pixel, as of a photograph. Different
    seeds differ in nearly all pixels.
    """
    width, height = size
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 6, width, dtype=np.float32)
    y = np.linspace(0, 4, height, dtype=np.float32)[:, None]
    base = 120 + 70 * np.sin(x + seed) * np.cos(y + 0.7 * seed)
    base[height // 4 : height // 2, width // 3 : width // 2] += 50
    # A tile of noise, repeated: as hard to compress as fresh noise, and ten times as cheap.
    tile = rng.normal(0, 7, (256, 256, 3)).astype(np.float32)
    noise = np.tile(tile, (-(-height // 256), -(-width // 256), 1))[:height, :width]
    pixels = base[..., None] + noise + np.array([20, 0, -20], np.float32)
    clipped: NDArray[np.uint8] = np.clip(pixels, 0, 255).astype(np.uint8)
    return clipped


def encode_picture(size: tuple[int, int], kind: str = "jpeg", seed: int = 0) -> bytes:
    """Return `picture(size, seed)` as JPEG (quality 90) or PNG (fastest compression)."""
    buffer = io.BytesIO()
    image = Image.fromarray(picture(size, seed))
    if kind == "jpeg":
        image.save(buffer, "JPEG", quality=90)
    else:
        image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def encode_sound(seconds: float, kind: str = "wav", seed: int = 0) -> bytes:
    """Return a stereo clip of tones and noise: 16-bit WAV, MP3, or Opus in Ogg."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * _SPEECH_RATE_HZ)) / _SPEECH_RATE_HZ
    tones = 0.3 * np.sin(2 * np.pi * 220 * times) + 0.2 * np.sin(2 * np.pi * 1330 * times)
    samples = np.stack([tones, tones[::-1]], 1) + rng.normal(0, 0.02, (len(times), 2))
    formats = {"wav": ("WAV", "PCM_16"), "mp3": ("MP3", None), "opus": ("OGG", "OPUS")}
    format, subtype = formats[kind]
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, _SPEECH_RATE_HZ, format=format, subtype=subtype)
    return buffer.getvalue()


def encode_clip(
    seconds: float, size: tuple[int, int] = (854, 480), *, rate: int = 30, seed: int = 0
) -> bytes:
    """Return an H.264 MP4 in which a picture moves; a key frame each two seconds."""
    width, height = size
    width -= width % 2
    wide = picture((width + 128, height), seed)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        options = {"preset": "ultrafast", "crf": "26"}
        stream = output.add_stream("libx264", rate=Fraction(rate), options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = 2 * rate
        stream.codec_context.thread_count = 1
        for number in range(int(seconds * rate)):
            left = abs((4 * number) % 256 - 128)
            pixels = np.ascontiguousarray(wide[:, left : left + width])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def frontend_items(sizes: str = "full") -> list[tuple[str, Any]]:
    """Return the rows of the front-end table: (name, builder of the `BenchItem`).

    Args:
        sizes: `full` is every row; `short` leaves out the longest to build and to decode, and
            some between others; `tiny` has one small row per encoding, for trying the runner.
    """
    image_io = ImageMediaIO(trust_exif_image_id=False)
    audio_io = AudioMediaIO()
    rows: list[tuple[str, str, str, MediaIO[Any], Any]] = []
    picture_sizes = {"64x48": (64, 48)} if sizes == "tiny" else IMAGE_SIZES
    for kind in ("jpeg", "png"):
        for label, size in picture_sizes.items():
            name = f"{kind.upper()} {label}"
            rows.append((name, "image", kind, image_io, _late(encode_picture, size, kind)))
    lengths = (0.1,) if sizes == "tiny" else (1, 3, 10)
    rows += [
        (f"WAV {s:g} s", "audio", "wav", audio_io, _late(encode_sound, s, "wav")) for s in lengths
    ]
    for kind in ("mp3", "opus"):
        seconds = lengths[-1]
        name = f"{kind.upper()} {seconds:g} s"
        rows.append((name, "audio", kind, audio_io, _late(encode_sound, seconds, kind)))
    if sizes == "tiny":
        clips = [("MP4 64x48 0.2 s", 0.2, (64, 48), 4)]
    else:
        clips = [
            ("MP4 480p 2 s, 8 frames", 2, (854, 480), 8),
            ("MP4 480p 2 s, 32 frames", 2, (854, 480), 32),
        ]
    if sizes == "full":
        clips.append(("MP4 720p 30 s, 32 frames", 30, (1280, 720), 32))
    for name, seconds, size, frames in clips:
        video_io = VideoMediaIO(image_io, num_frames=frames)
        rows.append((name, "video", "mp4", video_io, _late(encode_clip, seconds, size)))
    if sizes == "short":
        rows = [row for row in rows if row[0] not in _NOT_SHORT]
    return [
        (name, _late(_build, name, modality, kind, media_io, make))
        for name, modality, kind, media_io, make in rows
    ]


def _late(function: Any, *args: Any) -> Any:
    return lambda: function(*args)


def _build(name: str, modality: str, kind: str, media_io: MediaIO[Any], make: Any) -> BenchItem:
    return BenchItem(name, modality, kind, make(), media_io)
