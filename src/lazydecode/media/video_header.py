"""What a video says about itself, from its packets' headers; no frame is decoded."""

from __future__ import annotations

from lazydecode.errors import LazyDecodeError
from lazydecode.media.base import VideoHeader
from lazydecode.media.video_backends.frame_index import FrameIndex, read_index


def probe_video_header(data: bytes) -> VideoHeader | None:
    """Return the header of a video file; None if it does not parse as one.

    The frames are those whose packets are there, so a file that states a wrong count, or none,
    has the right one here. Size and rotation are the container's word.
    """
    try:
        return header_of(read_index(data))
    except LazyDecodeError:
        return None


def header_of(index: FrameIndex) -> VideoHeader | None:
    """Return the header of a video whose packets were read; None if it states no size.

    Raises:
        LazyDecodeError: If its packets make no timeline.
    """
    timeline = index.timeline
    width, height = index.orientation.size(index.width, index.height)
    if not width or not height:
        return None
    return VideoHeader(
        width=width,
        height=height,
        fps=timeline.fps,
        duration_s=timeline.duration_s,
        num_frames=timeline.num_frames,
        has_audio=index.has_audio,
        frame_times_s=timeline.times_s if index.is_trusted else None,
    )
