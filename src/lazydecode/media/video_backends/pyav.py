"""The default video decoder: PyAV, one thread, decoding no more than the chosen frames need.

The packets were read once for the frame index, so the way through the file is known before
the first frame is decoded: each chosen frame needs the packets from the key frame before it.
Those runs are decoded, everything between them is passed over undecoded, and inside a run
frames that are neither wanted nor referred to are skipped.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

import av
import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import CorruptMediaError
from lazydecode.limits import DecodeLimits
from lazydecode.media.video_backends.base import (
    DecodedFrames,
    VideoLoader,
    allocate_frames,
)
from lazydecode.media.video_backends.container import open_video, translated_errors
from lazydecode.media.video_backends.counting import (
    UntrustedTimesError,
    decode_packet,
    drain_decoder,
    iterate_frames,
    prepare_decoder,
)
from lazydecode.media.video_backends.frame_index import FrameIndex
from lazydecode.media.video_backends.packet_runs import (
    LostPositionError,
    PacketRun,
    plan_runs,
    read_runs,
)
from lazydecode.media.video_backends.pixels import upright_size, write_rgb

logger = logging.getLogger(__name__)

_SKIPS_EXACTLY: Final = frozenset({"h264"})
"""Codecs whose unreferenced frames are never needed. In HEVC a frame marked so can still be
referred to by a higher temporal layer."""


class PyAVVideoLoader(VideoLoader):
    """Decodes with PyAV (FFmpeg)."""

    name: ClassVar[str] = "pyav"

    @classmethod
    def fingerprint(cls) -> str:
        """PyAV's version and that of the FFmpeg inside it."""
        return library_fingerprint()

    def read_frames(
        self,
        data: bytes,
        index: FrameIndex,
        wanted: Sequence[int],
        recover: bool,
        options: dict[str, Any],
    ) -> DecodedFrames:
        """Decode the wanted frames, each at most once."""
        return read_frames(data, index, wanted, recover=recover, limits=self.limits)


def library_fingerprint() -> str:
    """Return PyAV's version and that of its FFmpeg."""
    avcodec = ".".join(map(str, av.library_versions["libavcodec"]))
    swscale = ".".join(map(str, av.library_versions["libswscale"]))
    return f"pyav {av.__version__} (libavcodec {avcodec}, libswscale {swscale})"


class _Collector:
    """Takes decoded frames and keeps those that are wanted, as RGB in one array."""

    def __init__(self, numbers: Sequence[int], limits: DecodeLimits) -> None:
        self.wanted = sorted(set(numbers))
        self._slots = {number: slot for slot, number in enumerate(self.wanted)}
        self._num_returned = len(numbers)
        self._limits = limits
        self.found: set[int] = set()
        self.frames: NDArray[np.uint8] | None = None

    def offer(self, number: int, frame: Any) -> None:
        slot = self._slots.get(number)
        if slot is None or number in self.found or frame.is_corrupt:
            return
        if self.frames is None:
            width, height = upright_size(frame)
            self.frames = allocate_frames(
                len(self._slots), width, height, self._limits, num_returned=self._num_returned
            )
        write_rgb(frame, self.frames[slot])
        self.found.add(number)

    @property
    def is_complete(self) -> bool:
        return len(self.found) == len(self._slots)

    def wants(self, number: int | None) -> bool:
        return number in self._slots

    def take(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        """Return the frames with these numbers, without a copy if they are all frames."""
        assert self.frames is not None
        slots = [self._slots[number] for number in numbers]
        if slots == list(range(len(self._slots))):
            return self.frames
        taken: NDArray[np.uint8] = self.frames[slots]
        return taken


def read_frames(
    data: bytes,
    index: FrameIndex,
    wanted: Sequence[int],
    *,
    recover: bool,
    limits: DecodeLimits,
) -> DecodedFrames:
    """Decode the frames with the numbers `wanted`, in that order.

    Raises:
        CorruptMediaError: If the container cannot be read, or no wanted frame decodes.
        MediaTooLargeError: If the frames are over a limit.
        UntrustedTimesError: If frames come out with times that no packet has.
    """
    numbers = list(wanted)
    collector = _collect(data, index, numbers, limits)
    if recover and not collector.is_complete:
        numbers = _replace_missing(data, index, numbers, collector, limits)
        collector = _collect(data, index, numbers, limits)
    kept = [number for number in numbers if number in collector.found]
    if not kept:
        raise CorruptMediaError(
            f"none of the {len(numbers)} chosen frames decodes (codec {index.codec})"
        )
    if len(kept) < len(numbers):
        logger.info("%d of %d chosen frames do not decode", len(numbers) - len(kept), len(numbers))
    return DecodedFrames(collector.take(kept), kept)


def _collect(
    data: bytes, index: FrameIndex, numbers: Sequence[int], limits: DecodeLimits
) -> _Collector:
    collector = _Collector(numbers, limits)
    if index.by_order:
        with open_video(data) as (container, stream):
            prepare_decoder(stream, max_pixels=limits.max_image_pixels)
            for number, frame in enumerate(iterate_frames(container, stream)):
                collector.offer(number, frame)
                if collector.is_complete:
                    break
        return collector
    skip = index.codec in _SKIPS_EXACTLY
    runs = plan_runs(index, collector.wanted)
    try:
        num_strays = _decode_runs(
            data, index, runs, collector, skip=skip, seek=index.can_seek, limits=limits
        )
    except LostPositionError:
        num_strays = _decode_runs(
            data, index, runs, collector, skip=skip, seek=False, limits=limits
        )
    if collector.is_complete:
        return collector
    # What is marked a key frame may be none, or may be damaged, and takes the frames behind it
    # along: once more from the very start, with nothing left out.
    everything = [PacketRun(0, len(index.pts) - 1)]
    if skip or runs != everything:
        num_strays = _decode_runs(
            data, index, everything, collector, skip=False, seek=False, limits=limits
        )
    if num_strays and not collector.is_complete:
        raise UntrustedTimesError
    return collector


def _decode_runs(
    data: bytes,
    index: FrameIndex,
    runs: Sequence[PacketRun],
    collector: _Collector,
    *,
    skip: bool,
    seek: bool,
    limits: DecodeLimits,
) -> int:
    """Decode the runs until `collector` has all it wants; return how many frames are strays.

    A stray is a frame whose time no packet of the index has.
    """
    num_strays = 0
    frame_of_pts = index.frame_of_pts

    def hand_over(frames: Iterable[Any]) -> None:
        nonlocal num_strays
        for frame in frames:
            number = frame_of_pts.get(frame.pts)
            if number is None:
                num_strays += 1
            else:
                collector.offer(number, frame)

    with open_video(data) as (container, stream), translated_errors("the video cannot be read"):
        decoder = prepare_decoder(stream, max_pixels=limits.max_image_pixels)
        skipping = False
        for packet, ends_run in read_runs(container, stream, index, runs, seek=seek):
            if skip:
                unwanted = not collector.wants(frame_of_pts.get(packet.pts))
                if unwanted != skipping:
                    decoder.skip_frame = "NONREF" if unwanted else "DEFAULT"
                    skipping = unwanted
            hand_over(decode_packet(packet))
            if ends_run:
                # All that the run's frames refer to is in: take them out without feeding the
                # packets that would push them out.
                hand_over(drain_decoder(decoder))
        if not collector.is_complete:
            hand_over(drain_decoder(decoder))
    return num_strays


def _replace_missing(
    data: bytes,
    index: FrameIndex,
    numbers: Sequence[int],
    collector: _Collector,
    limits: DecodeLimits,
) -> list[int]:
    """Put the next frame that decodes in place of each one that does not.

    The replacement lies before the next wanted frame; where there is none, the frame stays
    missing.
    """
    readable = sorted(_readable_frames(data, index, limits))
    wanted = sorted(set(numbers))
    replacement: dict[int, int] = {}
    for number, following in zip(wanted, [*wanted[1:], len(index.display_order)], strict=True):
        if number not in collector.found:
            place = bisect.bisect_left(readable, number)
            if place < len(readable) and readable[place] < following:
                replacement[number] = readable[place]
    return [replacement.get(number, number) for number in numbers]


def _readable_frames(data: bytes, index: FrameIndex, limits: DecodeLimits) -> set[int]:
    with open_video(data) as (container, stream):
        prepare_decoder(stream, max_pixels=limits.max_image_pixels)
        numbers = (
            index.frame_of_pts.get(frame.pts)
            for frame in iterate_frames(container, stream)
            if not frame.is_corrupt
        )
        return {number for number in numbers if number is not None}
