"""What a video says about itself, from its packets' headers; no frame is decoded."""

from __future__ import annotations

from typing import Any

from lazydecode.errors import LazyDecodeError
from lazydecode.media.base import VideoHeader
from lazydecode.media.mp4_boxes import read_video_tracks
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
    context = stream.codec_context
    width, height = int(context.width), int(context.height)
    orientation = UPRIGHT
    if container.format.name.startswith("mov,"):
        for track in read_video_tracks(data):
            if track.number == stream.id:
                orientation = Orientation.from_matrix(track.matrix)
                # FFmpeg leaves the size of MPEG-4 part 2 to its decoder.
                width, height = width or track.width, height or track.height
    return orientation.size(width, height)
