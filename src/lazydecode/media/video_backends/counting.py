"""The last resort for containers whose times say nothing: decode once just to count frames."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import av.error
import numpy as np

from lazydecode.errors import CorruptMediaError
from lazydecode.media.video_backends.container import (
    has_audio,
    open_video,
    translated_errors,
)
from lazydecode.media.video_backends.frame_index import FrameIndex, stored_picture


class UntrustedTimesError(Exception):
    """Decoded frames bear other times than their packets: count frames instead."""


def iterate_frames(container: Any, stream: Any) -> Iterator[Any]:
    """Decode every frame of `stream` in display order; what does not decode is passed over.

    Raises:
        CorruptMediaError: If the container cannot be read on.
    """
    with translated_errors("the video cannot be read"):
        for packet in container.demux(stream):
            yield from decode_packet(packet)


_DAMAGED: Final = (
    av.error.InvalidDataError,
    av.error.EOFError,
    av.error.PatchWelcomeError,
    av.error.ArgumentError,
    av.error.UndefinedError,
    ValueError,
)
"""What FFmpeg's decoders answer to a damaged packet."""


def decode_packet(packet: Any) -> list[Any]:
    """Return the frames that decoding `packet` yields; none if it is damaged."""
    try:
        frames: list[Any] = packet.decode()
    except _DAMAGED:
        return []
    return frames


def drain_decoder(decoder: Any) -> list[Any]:
    """Return the frames that `decoder` still holds, and make it ready for another key frame."""
    try:
        frames: list[Any] = decoder.decode(None)
    except _DAMAGED:
        frames = []
    decoder.flush_buffers()
    return frames


def prepare_decoder(stream: Any, *, max_pixels: int) -> Any:
    """Set up the stream's decoder: one thread, and no picture over `max_pixels`."""
    decoder = stream.codec_context
    decoder.thread_type = "NONE"
    decoder.thread_count = 1
    if max_pixels > 0:
        decoder.options = {"max_pixels": str(min(max_pixels, 2**31 - 1))}
    return decoder


def count_frames(data: bytes, *, max_pixels: int = 0) -> FrameIndex:
    """Decode all of `data` and return an index whose frames are told by counting.

    The first frame is shown at 0. Frames whose times do not ascend, or whose container has
    none (AVI), are placed at the stated rate.

    Raises:
        CorruptMediaError: If no frame decodes.
    """
    with open_video(data) as (container, stream):
        prepare_decoder(stream, max_pixels=max_pixels)
        times = [frame.pts for frame in iterate_frames(container, stream)]
        if not times:
            raise CorruptMediaError(
                f"no frame of the video decodes (codec {stream.codec_context.name})"
            )
        rate = float(stream.average_rate or stream.guessed_rate or 1.0)
        time_base = float(stream.time_base)
        ascending = (
            container.format.name != "avi"
            and None not in times
            and all(later > earlier for earlier, later in itertools.pairwise(times))
        )
        if not ascending:
            step = 1.0 / (rate * time_base)
            times = [round(position * step) for position in range(len(times))]
        width, height, orientation = stored_picture(data, container, stream)
        everything = np.ones(len(times), dtype=np.bool_)
        return FrameIndex(
            codec=str(stream.codec_context.name),
            width=width,
            height=height,
            orientation=orientation,
            has_audio=has_audio(container),
            pts=np.array(times, dtype=np.int64),
            is_key=everything,
            is_shown=everything,
            is_trusted=True,
            num_whole=len(times),
            num_stated=0,
            time_base=time_base,
            start_s=times[0] * time_base,
            last_duration=0,
            stated_rate=rate,
            by_order=True,
        )
