"""What a container's packets say about its frames, read without decoding any.

Frame numbers are positions in display order among the frames that a player shows: packets
that an edit list cuts off, and packets that hold no shown frame, do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import CorruptMediaError
from lazydecode.media.mp4_boxes import read_video_tracks
from lazydecode.media.video_backends.container import (
    has_audio,
    open_video,
    translated_errors,
)
from lazydecode.media.video_backends.pixels import UPRIGHT, Orientation
from lazydecode.media.video_sampling import Timeline

_RATE_TOLERANCE: Final = 0.005
"""Largest relative difference at which the container's stated rate is taken as the exact one."""
_REORDERING: Final = frozenset({"h264", "hevc", "mpeg4", "mpeg2video", "mpeg1video", "vc1", "wmv3"})
"""Codecs whose frames may be stored in another order than shown; AVI has only the stored one."""
_VP8_SHOWN: Final = 0x10
"""Bit of a VP8 frame's first byte: the frame is shown (RFC 6386, section 9.1)."""


@dataclass(frozen=True, eq=False)
class FrameIndex:
    """The packets of one video stream, in the order of the file, and the frames they hold."""

    codec: str
    width: int
    """Stored width in pixels, before turning; 0 if the container does not say."""
    height: int
    orientation: Orientation
    """How frames are turned to stand upright, by the container's word."""
    has_audio: bool
    pts: NDArray[np.int64]
    """Shape (packets,): presentation time of each packet in `time_base` units."""
    is_key: NDArray[np.bool_]
    """Shape (packets,): whether decoding can start there."""
    is_shown: NDArray[np.bool_]
    """Shape (packets,): whether the packet becomes a frame that a player shows."""
    is_trusted: bool
    """Whether each shown frame can be told by its time: all known, all different."""
    is_cut: bool
    """Whether the container announces packets that are not there."""
    stated_packets: int
    """Packets that the container announces; 0 if it does not say."""
    time_base: float
    """Seconds per unit of `pts`."""
    start_s: float
    """Time of the container's start, which is subtracted from every frame's time."""
    last_duration: int
    """Stated duration of the frame shown last, in `time_base` units; 0 if unknown."""
    stated_rate: float | None
    """The container's own average frame rate."""
    by_order: bool = False
    """Whether entries are decoded frames instead of packets, found again by counting: what is
    left when times cannot be trusted."""

    @cached_property
    def display_order(self) -> NDArray[np.intp]:
        """Shape (frames,): position of each frame's packet in the file, in display order."""
        shown: NDArray[np.intp] = np.flatnonzero(self.is_shown)
        if not self.is_trusted:
            return shown
        return shown[np.argsort(self.pts[shown], kind="stable")]

    @cached_property
    def frame_of_pts(self) -> dict[int, int]:
        """Presentation time -> frame number."""
        return {int(pts): frame for frame, pts in enumerate(self.pts[self.display_order])}

    @cached_property
    def timeline(self) -> Timeline:
        """When each frame is shown."""
        num_frames = len(self.display_order)
        if num_frames == 0:
            raise CorruptMediaError("the video has no frames")
        if not self.is_trusted:
            return Timeline.at_constant_rate(num_frames, self.stated_rate or 1.0)
        return make_timeline(
            self.pts[self.display_order],
            time_base=self.time_base,
            start_s=self.start_s,
            last_duration=self.last_duration,
            stated_rate=self.stated_rate,
        )


def make_timeline(
    pts: NDArray[np.int64],
    *,
    time_base: float,
    start_s: float,
    last_duration: int,
    stated_rate: float | None,
) -> Timeline:
    """Return the timeline of frames shown at `pts` (ascending, in `time_base` units)."""
    num_frames = len(pts)
    times = pts.astype(np.float64) * time_base - start_s
    span = float(times[-1] - times[0])
    last = last_duration * time_base
    if last <= 0:
        last = span / (num_frames - 1) if span > 0 else 1.0 / (stated_rate or 1.0)
    duration = span + last
    fps = num_frames / duration
    if stated_rate:
        # Times can be rounded (to 1 ms in Matroska): the stated rate is the exact one then.
        slack = max(_RATE_TOLERANCE * duration, 2 * time_base)
        if abs(num_frames / stated_rate - duration) <= slack:
            fps, duration = stated_rate, num_frames / stated_rate
    # Rounding to 1 ns hides that 3 * 0.1 is not 0.3.
    return Timeline(np.round(times, 9), fps, duration)


def read_index(data: bytes) -> FrameIndex:
    """Read all packets of a video file's video stream once, decoding none.

    Raises:
        CorruptMediaError: If no accepted demuxer reads it, or it has no video or no packet.
    """
    with open_video(data) as (container, stream):
        return _scan(data, container, stream)


def stored_picture(data: bytes, container: Any, stream: Any) -> tuple[int, int, Orientation]:
    """Return width, height (0 if unknown) and orientation of `stream` without decoding."""
    context = stream.codec_context
    width, height = int(context.width), int(context.height)
    orientation = UPRIGHT
    if container.format.name.startswith("mov,"):
        for track in read_video_tracks(data):
            if track.number == stream.id:
                orientation = Orientation.from_matrix(track.matrix)
                # FFmpeg leaves the size of MPEG-4 part 2 to its decoder.
                width, height = width or track.width, height or track.height
    return width, height, orientation


def _scan(data: bytes, container: Any, stream: Any) -> FrameIndex:
    codec = str(stream.codec_context.name)
    pts: list[int | None] = []
    keys: list[bool] = []
    shown: list[bool] = []
    last_shown: tuple[int, int] = (-(2**63), 0)
    previous_dts: int | None = None
    in_order = True
    num_corrupt = 0
    with translated_errors("the video cannot be read"):
        for packet in container.demux(stream):
            if not packet.size:
                continue  # the flush packet at the end, and repeated frames of AVI
            time = packet.pts
            is_shown = not packet.is_discard and _holds_shown_frame(packet, codec)
            pts.append(time)
            keys.append(packet.is_keyframe)
            shown.append(is_shown)
            num_corrupt += packet.is_corrupt
            dts = packet.dts
            if dts is not None:
                in_order = in_order and (previous_dts is None or dts >= previous_dts)
                previous_dts = dts
            if is_shown and time is not None and time > last_shown[0]:
                last_shown = (time, packet.duration or 0)
    if not pts:
        raise CorruptMediaError("the video stream holds no data")
    known = [time for time, is_shown in zip(pts, shown, strict=True) if is_shown]
    is_trusted = (
        # Matroska stores no decoding times; those that FFmpeg makes up for it may run back.
        (in_order or container.format.name.startswith("matroska"))
        and None not in known
        and len(set(known)) == len(known)
        and not (container.format.name == "avi" and codec in _REORDERING)
    )
    rate = stream.average_rate or stream.guessed_rate
    stated = _stated_packets(container, stream)
    width, height, orientation = stored_picture(data, container, stream)
    return FrameIndex(
        codec=codec,
        width=width,
        height=height,
        orientation=orientation,
        has_audio=has_audio(container),
        pts=np.array([-(2**63) if time is None else time for time in pts], dtype=np.int64),
        is_key=np.array(keys, dtype=np.bool_),
        is_shown=np.array(shown, dtype=np.bool_),
        is_trusted=is_trusted,
        is_cut=len(pts) - num_corrupt < stated,
        stated_packets=stated,
        time_base=float(stream.time_base),
        start_s=(container.start_time or 0) / 1e6,
        last_duration=last_shown[1],
        stated_rate=float(rate) if rate else None,
    )


def _holds_shown_frame(packet: Any, codec: str) -> bool:
    # VP8 sends a reference that is never shown as a packet of its own; other codecs keep such
    # frames inside the packet of a shown one.
    return codec not in ("vp8", "libvpx") or bool(memoryview(packet)[0] & _VP8_SHOWN)


def _stated_packets(container: Any, stream: Any) -> int:
    """Packets that an MP4's sample table announces, after its edit list."""
    return len(stream.index_entries) if container.format.name.startswith("mov,") else 0
