"""Videos built from code: every frame bears its number, so that tests can tell which it is."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

_CELLS = 4
"""Cells per side: a number is drawn as 16 bits, black or white."""
_TICKS = 90_000
"""Time base of the encoders, in units per second."""
_MUXER = {
    "mp4": "mp4",
    "mov": "mov",
    "mkv": "matroska",
    "webm": "webm",
    "avi": "avi",
    "ts": "mpegts",
}
_MATRIX = {
    0: (1, 0, 0, 1),
    90: (0, 1, -1, 0),
    180: (-1, 0, 0, -1),
    270: (0, -1, 1, 0),
    "mirrored": (-1, 0, 0, 1),
    "transposed": (0, 1, 1, 0),
}
"""Clockwise turn -> entries a, b, c, d of the display matrix."""


def draw_number(number: int, size: tuple[int, int] = (64, 48)) -> NDArray[np.uint8]:
    """Return an RGB picture of (width, height) `size` that bears `number`."""
    width, height = size
    cells = np.array([(number >> bit) & 1 for bit in range(_CELLS * _CELLS)], dtype=np.uint8)
    cells = (cells * 200 + 30).reshape(_CELLS, _CELLS)
    rows = np.arange(height) * _CELLS // height
    columns = np.arange(width) * _CELLS // width
    return np.repeat(cells[np.ix_(rows, columns)][..., None], 3, axis=2)


def read_number(picture: NDArray[np.uint8]) -> int:
    """Return the number that a decoded RGB picture bears."""
    height, width = picture.shape[:2]
    number = 0
    for bit in range(_CELLS * _CELLS):
        row, column = divmod(bit, _CELLS)
        y, x = (2 * row + 1) * height // (2 * _CELLS), (2 * column + 1) * width // (2 * _CELLS)
        if picture[y, x].mean() > 130:
            number |= 1 << bit
    return number


def read_numbers(frames: NDArray[np.uint8]) -> list[int]:
    """Return the number that each decoded frame bears."""
    return [read_number(frame) for frame in frames]


def make_video(
    frames: int = 20,
    fps: float = 10,
    size: tuple[int, int] = (64, 48),
    *,
    container: str = "mp4",
    codec: str = "libx264",
    gop: int = 250,
    b_frames: int = 2,
    pix_fmt: str = "yuv420p",
    times: Sequence[float] | None = None,
    audio: bool = False,
    codec_options: dict[str, str] | None = None,
    muxer_options: dict[str, str] | None = None,
    pictures: Iterable[NDArray[np.uint8]] | None = None,
) -> bytes:
    """Return a video file whose frame n bears the number n.

    Args:
        frames: Number of frames.
        fps: Constant rate, unless `times` are given.
        size: (width, height).
        container: File format: mp4, mov, mkv, webm, avi, ts, gif.
        codec: FFmpeg encoder.
        gop: Frames per group of pictures.
        b_frames: Bidirectional frames between two others (x264 and x265).
        pix_fmt: Pixel format that is encoded.
        times: Seconds at which each frame is shown.
        audio: Whether to add a 440 Hz tone of the same length.
        codec_options: Further options of the encoder.
        muxer_options: Options of the container.
        pictures: RGB pictures to encode instead of numbers.
    """
    file = io.BytesIO()
    muxer = _MUXER.get(container, container)
    with _usual_priority(), av.open(file, "w", format=muxer, options=muxer_options or {}) as output:
        rate = Fraction(fps).limit_denominator(1001)
        options = dict(codec_options or {})
        if codec in ("libx264", "libx265"):
            options.setdefault("bf", str(b_frames))
            options.setdefault("preset", "ultrafast" if codec == "libx265" else "veryfast")
        if codec == "libx264":
            options.setdefault("x264-params", f"keyint={gop}:min-keyint={gop}:scenecut=0")
        if codec == "libx265":
            options.setdefault(
                "x265-params",
                f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={b_frames}:log-level=none",
            )
        stream = output.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = pix_fmt
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        if times is not None:
            stream.codec_context.time_base = Fraction(1, _TICKS)
        tone = output.add_stream("aac", rate=48_000, layout="mono") if audio else None
        drawn = (draw_number(n, size) for n in range(frames)) if pictures is None else pictures
        for number, picture in enumerate(drawn):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pix_fmt)
            if times is None:
                frame.pts, frame.time_base = number, 1 / rate
            else:
                frame.pts = round(times[number] * _TICKS)
                frame.time_base = Fraction(1, _TICKS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if tone is not None:
            _add_tone(output, tone, frames / fps)
    return file.getvalue()


@contextmanager
def _usual_priority() -> Iterator[None]:
    """Keep the thread's scheduling as it is.

    SVT-AV1 makes a real-time thread of whoever calls it as root, for ever, and so of each thread
    and process that is started from there: other processes get a twentieth of a core beside it.
    """
    if not hasattr(os, "sched_getscheduler"):
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def make_mp4(frames: int = 20, fps: float = 10, size: tuple[int, int] = (64, 48)) -> bytes:
    """Return an H.264 MP4 whose frame n bears the number n."""
    return make_video(frames, fps, size)


def turn(mp4: bytes, how: int | str) -> bytes:
    """Return the MP4 with a display matrix: degrees clockwise, `mirrored` or `transposed`."""
    at = mp4.index(b"tkhd") + 4
    at += 52 if mp4[at] == 1 else 40
    a, b, c, d = _MATRIX[how]
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return mp4[:at] + matrix + mp4[at + 36 :]


def with_index_first(mp4: bytes) -> bytes:
    """Return the MP4 with its index before the media data, as a streaming server has it."""
    at, boxes = 0, []
    while at < len(mp4):
        (size,) = struct.unpack_from(">I", mp4, at)
        boxes.append(mp4[at : at + size])
        at += size
    moov = bytearray(next(box for box in boxes if box[4:8] == b"moov"))
    at = moov.find(b"stco")
    while at >= 0:
        (count,) = struct.unpack_from(">I", moov, at + 8)
        offsets = struct.unpack_from(f">{count}I", moov, at + 12)
        struct.pack_into(f">{count}I", moov, at + 12, *(o + len(moov) for o in offsets))
        at = moov.find(b"stco", at + 4)
    rest = [box for box in boxes[1:] if box[4:8] != b"moov"]
    return boxes[0] + bytes(moov) + b"".join(rest)


def make_audio_only_mp4(seconds: float = 0.5) -> bytes:
    """Return an MP4 with sound and no picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        _add_tone(output, output.add_stream("aac", rate=48_000, layout="mono"), seconds)
    return file.getvalue()


def _add_tone(output: av.container.OutputContainer, stream: av.AudioStream, seconds: float) -> None:
    samples = np.sin(2 * np.pi * 440 * np.arange(int(48_000 * seconds)) / 48_000)
    frame = av.AudioFrame.from_ndarray(
        (samples * 0.5).astype(np.float32)[None], format="fltp", layout="mono"
    )
    frame.sample_rate, frame.pts = 48_000, 0
    output.mux(stream.encode(frame))
    output.mux(stream.encode(None))
