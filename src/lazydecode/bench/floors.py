"""What cannot be avoided: one pass over the bytes, one bare call of the decoder."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image

from lazydecode.bench.media import BenchItem


def digest_floor(data: bytes) -> Callable[[], object]:
    """One SHA-256 of the payload."""
    return lambda: hashlib.sha256(data).digest()


def decoder_floor(item: BenchItem) -> Callable[[], object]:
    """The shortest code that decodes the item with the library that is used here too."""
    data = item.data
    if item.modality == "image":
        return lambda: _image(data)
    if item.modality == "video":
        num_frames = getattr(item.media_io, "num_frames", 32)
        return lambda: _video(data, num_frames)
    return (lambda: _ogg(data)) if item.kind == "opus" else (lambda: _sound(data))


def _image(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def _sound(data: bytes) -> Any:
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return samples.mean(axis=1)


def _ogg(data: bytes) -> Any:
    fifo = av.AudioFifo()
    with av.open(io.BytesIO(data)) as container:
        for frame in container.decode(audio=0):
            frame.pts = None
            fifo.write(frame)
    frame = fifo.read()
    assert frame is not None
    return frame.to_ndarray().mean(axis=0)


def _video(data: bytes, num_frames: int) -> Any:
    """Walk through the file; convert only the frames that are wanted."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        total = stream.frames
        wanted = set(np.linspace(0, total - 1, min(num_frames, total)).astype(int).tolist())
        last = max(wanted)
        frames = []
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                frames.append(frame.to_ndarray(format="rgb24"))
            if number >= last:
                break
    return np.stack(frames)
