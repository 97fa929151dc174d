"""What a video says about itself, from its packets' headers; no frame is decoded."""

from __future__ import annotations

from typing import Any

import numpy as np

from lazydecode.errors import LazyDecodeError
from lazydecode.media.base import VideoHeader
from lazydecode.media.mp4_boxes import video_track_matrices
from lazydecode.media.video_backends.container import has_audio, open_video
from lazydecode.media.video_backends.frame_index import scan_packets
from lazydecode.media.video_backends.pixels import UPRIGHT, Orientation


def probe_video_header(data: bytes) -> VideoHeader | None:
    """Return the header of a video file; None if it does not parse as one.

    The frames are those whose packets are there, so a file that states a wrong count, or none,
    has the right one here. Size and rotation are the container's word.
    """
    try:
        with open_video(data) as (container, stream):
            width, height = _upright_size(data, container, stream)
            if not width or not height:
                return None
            index = scan_packets(container, stream)
            timeline = index.timeline
            return VideoHeader(
                width=width,
                height=height,
                fps=timeline.fps,
                duration_s=timeline.duration_s,
                num_frames=timeline.num_frames,
                has_audio=has_audio(container),
                frame_times_s=timeline.times_s if index.is_trusted else None,
            )
    except LazyDecodeError:
        return None


def _upright_size(data: bytes, container: Any, stream: Any) -> tuple[int, int]:
    orientation = UPRIGHT
    if container.format.name.startswith("mov,"):
        for number, matrix in video_track_matrices(data):
            if number == stream.id:
                orientation = Orientation.from_matrix(np.rint(matrix * 2**16).astype(np.int64))
    context = stream.codec_context
    return orientation.size(int(context.width), int(context.height))
