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
from lazydecode.media.mp4_boxes import VideoTrack, read_video_tracks
from lazydecode.media.mp4_samples import read_sample_times
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
_SEEKABLE: Final = ("mov,", "matroska,")
"""Containers with a table of key frames."""
_NO_TIME: Final = -(2**63)
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
    num_whole: int
    """Packets that are there to their last byte."""
    num_stated: int
    """Packets that the container announces; 0 if it does not say."""
    time_base: float
    """Seconds per unit of `pts`."""
    start_s: float
    """Time of the container's start, which is subtracted from every frame's time."""
    last_duration: int
    """Stated duration of the frame shown last, in `time_base` units; 0 if unknown."""
    stated_rate: float | None
    """The container's own average frame rate."""
    is_seekable: bool = False
    """Whether the container has a table of its key frames."""
    by_order: bool = False
    """Whether entries are decoded frames instead of packets, found again by counting: what is
    left when times cannot be trusted."""

    @property
    def is_cut(self) -> bool:
        """Whether the container announces packets that are not there."""
        return self.num_whole < self.num_stated

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
    def position_of_pts(self) -> dict[int, int]:
        """Presentation time -> position of the packet in the file."""
        return {int(pts): position for position, pts in enumerate(self.pts)}

    @property
    def can_seek(self) -> bool:
        """Whether the container finds key frames by time, and packets can be told by it."""
        return self.is_seekable and len(self.position_of_pts) == len(self.pts)

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
    """Read what a video file says about its frames, decoding none.

    MP4's tables say it all, if they are plain; else all packets are read once.

    Raises:
        CorruptMediaError: If no accepted demuxer reads it, or it has no video or no packet.
    """
    with open_video(data) as (container, stream):
        with translated_errors("the video cannot be read"):
            packets = _tabled_packets(data, container, stream)
        if packets is not None:
            return _make_index(data, container, stream, packets)
    return scan_index(data)


def scan_index(data: bytes) -> FrameIndex:
    """Return what `read_index` does, from the packets whatever the tables say."""
    with open_video(data) as (container, stream):
        with translated_errors("the video cannot be read"):
            packets = _scanned_packets(container, stream)
        return _make_index(data, container, stream, packets)


def stored_picture(data: bytes, container: Any, stream: Any) -> tuple[int, int, Orientation]:
    """Return width, height (0 if unknown) and orientation of `stream` without decoding."""
    context = stream.codec_context
    width, height = int(context.width), int(context.height)
    track = _mp4_track(data, container, stream)
    if track is None:
        return width, height, UPRIGHT
    # FFmpeg leaves the size of MPEG-4 part 2 to its decoder.
    return (
        width or track.width,
        height or track.height,
        Orientation.from_matrix(track.matrix),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Packets:
    """What is known of the packets of a stream, in the order of the file."""

    pts: NDArray[np.int64]
    is_key: NDArray[np.bool_]
    is_shown: NDArray[np.bool_]
    durations: NDArray[np.int64]
    num_stated: int
    num_whole: int
    """Packets that are there to their last byte."""
    has_all_times: bool
    """Whether every shown packet has a presentation time, and decoding times do not run back."""


def _make_index(data: bytes, container: Any, stream: Any, packets: _Packets) -> FrameIndex:
    if not len(packets.pts):
        raise CorruptMediaError("the video stream holds no data")
    codec = str(stream.codec_context.name)
    shown = packets.pts[packets.is_shown]
    is_trusted = (
        packets.has_all_times
        and len(np.unique(shown)) == len(shown)
        and not (container.format.name == "avi" and codec in _REORDERING)
    )
    last = int(np.where(packets.is_shown, packets.pts, _NO_TIME).argmax())
    rate = stream.average_rate or stream.guessed_rate
    width, height, orientation = stored_picture(data, container, stream)
    return FrameIndex(
        codec=codec,
        width=width,
        height=height,
        orientation=orientation,
        has_audio=has_audio(container),
        pts=packets.pts,
        is_key=packets.is_key,
        is_shown=packets.is_shown,
        is_trusted=is_trusted,
        num_whole=packets.num_whole,
        num_stated=packets.num_stated,
        time_base=float(stream.time_base),
        start_s=(container.start_time or 0) / 1e6,
        last_duration=int(packets.durations[last]),
        stated_rate=float(rate) if rate else None,
        is_seekable=container.format.name.startswith(_SEEKABLE),
    )


def _scanned_packets(container: Any, stream: Any) -> _Packets:
    """Read all packets; leaves the container at its end."""
    codec = str(stream.codec_context.name)
    pts: list[int] = []
    keys: list[bool] = []
    shown: list[bool] = []
    durations: list[int] = []
    previous_dts: int | None = None
    # Matroska stores no decoding times; those that FFmpeg makes up for it may run back.
    checks_order = not container.format.name.startswith("matroska")
    has_all_times = True
    num_corrupt = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue  # the flush packet at the end, and repeated frames of AVI
        time, dts = packet.pts, packet.dts
        is_shown = not packet.is_discard and _holds_shown_frame(packet, codec)
        if time is None:
            has_all_times = has_all_times and not is_shown
            time = _NO_TIME
        pts.append(time)
        keys.append(packet.is_keyframe)
        shown.append(is_shown)
        durations.append(packet.duration or 0)
        num_corrupt += packet.is_corrupt
        if checks_order and dts is not None:
            has_all_times = has_all_times and (previous_dts is None or dts >= previous_dts)
            previous_dts = dts
    return _Packets(
        pts=np.array(pts, dtype=np.int64),
        is_key=np.array(keys, dtype=np.bool_),
        is_shown=np.array(shown, dtype=np.bool_),
        durations=np.array(durations, dtype=np.int64),
        num_stated=len(stream.index_entries) if container.format.name.startswith("mov,") else 0,
        num_whole=len(pts) - num_corrupt,
        has_all_times=has_all_times,
    )


def _tabled_packets(data: bytes, container: Any, stream: Any) -> _Packets | None:
    """Take the packets of an MP4 from its tables; None if they do not say it all.

    FFmpeg has applied the edit list to the decoding times; what a packet's presentation time
    adds to that is the same for all of them and read off the first one.
    """
    track = _mp4_track(data, container, stream)
    times = None if track is None else read_sample_times(data, track)
    entries = stream.index_entries
    if times is None or not len(times.offsets) or len(entries) != len(times.offsets):
        return None
    rows = [
        (entry.timestamp, entry.pos + entry.size, entry.size, entry.is_keyframe, entry.is_discard)
        for entry in entries
    ]
    dts, ends, sizes, keys, discards = (np.array(column) for column in zip(*rows, strict=True))
    first = next(container.demux(stream), None)
    if first is None or first.pts is None or first.dts != dts[0] or not sizes.all():
        return None
    pts = dts + times.offsets
    return _Packets(
        pts=pts + (first.pts - pts[0]),
        is_key=keys.astype(np.bool_),
        is_shown=~discards.astype(np.bool_),
        durations=times.durations,
        num_stated=len(rows),
        num_whole=int((ends <= len(data)).sum()),
        has_all_times=True,
    )


def _mp4_track(data: bytes, container: Any, stream: Any) -> VideoTrack | None:
    if not container.format.name.startswith("mov,"):
        return None
    tracks = read_video_tracks(data)
    return next((track for track in tracks if track.number == stream.id), None)


def _holds_shown_frame(packet: Any, codec: str) -> bool:
    # VP8 sends a reference that is never shown as a packet of its own; other codecs keep such
    # frames inside the packet of a shown one.
    return codec not in ("vp8", "libvpx") or bool(memoryview(packet)[0] & _VP8_SHOWN)
