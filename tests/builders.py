"""Images and audio built from code, with content that a test can recognise.

Pictures have a colour per quadrant, clips a tone per channel. Encoders are the real ones.
"""

from __future__ import annotations

import io
import struct
import uuid
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import ExifTags, Image

RED, GREEN, BLUE, GREY = (220, 30, 30), (30, 200, 30), (30, 30, 220), (230, 230, 230)
QUADRANTS = {"tl": RED, "tr": GREEN, "bl": BLUE, "br": GREY}
"""Colour of each quadrant of a built picture, before orientation."""


# -- images


def quadrants(size: tuple[int, int] = (64, 48), mode: str = "RGB") -> Image.Image:
    """A picture with a colour per quadrant (`QUADRANTS`), in `mode`."""
    width, height = size
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    pixels[height // 2 :, width // 2 :] = GREY
    return Image.fromarray(pixels).convert(mode)


def noise(size: tuple[int, int] = (64, 48), *, seed: int = 0) -> Image.Image:
    """A smooth picture with noise: it compresses about as badly as a photograph."""
    width, height = size
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, width)[None, :, None] * np.ones((height, 1, 3))
    pixels = ramp + rng.normal(20, 12, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def corners(image: Image.Image) -> dict[str, tuple[int, ...]]:
    """Pixel in the middle of each quadrant, as `QUADRANTS` names them."""
    width, height = image.size
    left, right = width // 4, width - 1 - width // 4
    top, bottom = height // 4, height - 1 - height // 4
    spots = {"tl": (left, top), "tr": (right, top), "bl": (left, bottom), "br": (right, bottom)}
    rgb = image.convert("RGB")
    pixels: dict[str, Any] = {name: rgb.getpixel(spot) for name, spot in spots.items()}
    return pixels


def make_exif(
    *, orientation: int | None = None, image_id: uuid.UUID | str | None = None
) -> Image.Exif:
    """EXIF with an orientation and an ImageID."""
    exif = Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    if image_id is not None:
        exif[ExifTags.Base.ImageID] = str(image_id)
    return exif


def encode_image(image: Image.Image, format: str, **options: Any) -> bytes:
    """`image` in a Pillow format; HEIF too."""
    buffer = io.BytesIO()
    if format == "HEIF":
        import pillow_heif

        pillow_heif.from_pillow(image).save(buffer, format="HEIF", **options)
    else:
        image.save(buffer, format=format, **options)
    return buffer.getvalue()


def make_image(
    format: str,
    size: tuple[int, int] = (64, 48),
    *,
    mode: str = "RGB",
    image: Image.Image | None = None,
    orientation: int | None = None,
    image_id: uuid.UUID | str | None = None,
    **options: Any,
) -> bytes:
    """The quadrant picture (or `image`) in `format`, with EXIF if asked for."""
    if orientation is not None or image_id is not None:
        options["exif"] = make_exif(orientation=orientation, image_id=image_id)
    return encode_image(image or quadrants(size, mode), format, **options)


def make_jpeg(size: tuple[int, int] = (64, 48), **options: Any) -> bytes:
    """A JPEG; options as for `make_image` and Pillow's encoder."""
    return make_image("JPEG", size, **{"quality": 95, **options})


def make_png(size: tuple[int, int] = (64, 48), **options: Any) -> bytes:
    """A PNG; options as for `make_image` and Pillow's encoder."""
    return make_image("PNG", size, **options)


def make_webp(size: tuple[int, int] = (64, 48), **options: Any) -> bytes:
    """A lossless WebP unless told otherwise."""
    return make_image("WEBP", size, **{"lossless": True, **options})


def make_animation(
    format: str, size: tuple[int, int] = (32, 32), colours: Sequence[Any] = (RED, GREEN, BLUE)
) -> bytes:
    """One frame per colour, as GIF, WEBP, PNG (APNG), TIFF or AVIF."""
    frames = [Image.new("RGB", size, colour) for colour in colours]
    options: dict[str, Any] = {"lossless": True} if format == "WEBP" else {}
    if format in ("GIF", "WEBP", "PNG", "AVIF"):
        options["duration"] = 100
    return encode_image(frames[0], format, save_all=True, append_images=frames[1:], **options)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """One PNG chunk with length and checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def split_png(data: bytes) -> list[tuple[bytes, bytes]]:
    """The chunks of a PNG, as (kind, body)."""
    chunks, position = [], 8
    while position + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        kind = data[position + 4 : position + 8]
        chunks.append((kind, data[position + 8 : position + 8 + length]))
        position += 12 + length
    return chunks


def join_png(chunks: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The PNG that `split_png` takes apart."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, body) for kind, body in chunks)


def make_gray16_png(values: NDArray[np.uint16], *, transparent: int | None = None) -> bytes:
    """A 16-bit grey PNG of `values` (height, width); one value may be transparent."""
    height, width = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 0, 0, 0, 0))]
    if transparent is not None:
        chunks.append((b"tRNS", struct.pack(">H", transparent)))
    return join_png([*chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")])


# -- audio


def tone(
    freqs: Sequence[float] = (440.0,),
    *,
    rate: int = 16000,
    seconds: float = 0.5,
    peak: float = 0.5,
) -> NDArray[np.float64]:
    """Shape (samples, channels): a sine of the given frequency in each channel."""
    time = np.arange(round(rate * seconds)) / rate
    return np.stack([peak * np.sin(2 * np.pi * freq * time) for freq in freqs], axis=1)


def loudest_hz(samples: NDArray[Any], rate: int, count: int = 1) -> list[int]:
    """The `count` strongest frequencies of a mono clip, in Hz, ascending."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    found = []
    for _ in range(count):
        peak = int(spectrum.argmax())
        found.append(round(peak * rate / len(samples)))
        spectrum[max(0, peak - 4) : peak + 5] = 0
    return sorted(found)


def make_wav(
    samples: NDArray[np.float64] | None = None,
    *,
    rate: int = 16000,
    subtype: str = "PCM_16",
    format: str = "WAV",
    **tone_options: Any,
) -> bytes:
    """A WAV of `samples`, shape (samples, channels), or of a tone; subtypes as in soundfile."""
    if samples is None:
        samples = tone(rate=rate, **tone_options)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def make_sound(
    format: str = "FLAC",
    subtype: str | None = None,
    samples: NDArray[np.float64] | None = None,
    *,
    rate: int = 16000,
    **tone_options: Any,
) -> bytes:
    """A clip written by libsndfile: FLAC, MP3, OGG (VORBIS or OPUS), AIFF, AU, CAF, …"""
    if samples is None:
        samples = tone(rate=rate, **tone_options)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format, subtype=subtype)
    return buffer.getvalue()


def make_av_audio(
    format: str = "ipod",
    codec: str = "aac",
    samples: NDArray[np.float64] | None = None,
    *,
    rate: int = 48000,
    **tone_options: Any,
) -> bytes:
    """A clip written by FFmpeg: m4a (`ipod`), `webm` or `ogg` with libopus, `mov` with PCM, …"""
    if samples is None:
        samples = tone(rate=rate, **tone_options)
    buffer = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[samples.shape[1]]
    with av.open(buffer, "w", format=format) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout=layout)
        planar = np.ascontiguousarray(samples.T.astype(np.float32))
        frame = av.AudioFrame.from_ndarray(planar, format="fltp", layout=layout)
        frame.rate = rate
        frame.pts = 0
        resampler = av.AudioResampler(stream.codec_context.format, layout, rate)
        fifo = av.AudioFifo()
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            fifo.write(piece)
        size = stream.codec_context.frame_size or 1024
        position = 0
        while piece := fifo.read(size, partial=True):
            # With times, the encoder marks its priming, and the container how to skip it.
            piece.pts, piece.time_base = position, Fraction(1, rate)
            position += piece.samples
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return buffer.getvalue()
