"""What every video decoder of ours has in common: the frame choice and the limits.

Which frames a request gets is decided here, from the container's packets, so that it does not
depend on the library that turns them into pixels.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import CorruptMediaError, MediaTooLargeError
from lazydecode.limits import DecodeLimits
from lazydecode.media.video_backends.counting import UntrustedTimesError, count_frames
from lazydecode.media.video_backends.frame_index import FrameIndex, read_index, scan_index
from lazydecode.media.video_sampling import (
    FrameSampler,
    SamplingOptions,
    Timeline,
    select_frames,
)


class VideoMetadata(TypedDict):
    """What a decoded video says about itself and about the frames that were taken."""

    fps: float
    """Average frame rate of the source."""
    duration: float
    """Seconds of the source."""
    total_num_frames: int
    """Frames in the source."""
    frames_indices: list[int]
    """For each returned frame, its number in the source."""
    timestamps: list[float]
    """For each returned frame, when the source shows it, in seconds from its start."""
    video_backend: str
    do_sample_frames: bool
    """Whether a processor may sample once more; False: the frames are the chosen ones."""
    width: int
    """Width of the returned frames."""
    height: int


DecodedVideo = tuple[NDArray[np.uint8], VideoMetadata]
"""Frames of shape (frames, height, width, 3), RGB, upright; and what they are."""


def checked_decode(decoded: object) -> DecodedVideo:
    """Return what a loader gave, if it is frames and metadata.

    Raises:
        TypeError: If it is anything else, or has no frames.
    """
    match decoded:
        case (np.ndarray() as frames, dict() as metadata):
            if frames.ndim == 4 and frames.shape[3] == 3 and frames.size:
                return frames, cast(VideoMetadata, metadata)
            raise TypeError(f"load_bytes gave frames of the shape {frames.shape}")
    raise TypeError(f"load_bytes gave a {type(decoded).__name__}, not frames and metadata")


@dataclass(frozen=True)
class DecodedFrames:
    """What a backend returns for a list of wanted frames."""

    frames: NDArray[np.uint8]
    """Shape (kept, height, width, 3)."""
    indices: list[int]
    """Number of each returned frame: the wanted ones less those that do not decode."""
    backend: str | None = None
    """Who decoded, if it was not the backend that was asked."""


class VideoLoader(ABC):
    """A video decoder; `limits` may be replaced before the first decode.

    Subclasses say how frames are read; the frame choice is common. One loader may serve
    several threads: it keeps nothing between calls.
    """

    name: ClassVar[str]
    """The name under which it is registered."""
    own_options: ClassVar[frozenset[str]] = frozenset()
    """Options that mean something to this backend alone: they go when another is chosen."""
    startup_options: ClassVar[frozenset[str]] = frozenset()
    """Options that a request may not set."""
    limits: DecodeLimits = DecodeLimits()
    """What one decode may produce."""

    @classmethod
    @abstractmethod
    def fingerprint(cls) -> str:
        """Library and version that decode here."""

    @classmethod
    def options(cls, num_frames: int, options: dict[str, Any]) -> SamplingOptions:
        """Check the sampling options and return them with this backend's defaults.

        Raises:
            ValidationError: If one is of the wrong type or out of range.
        """
        return SamplingOptions.parse(num_frames, options)

    @classmethod
    def sampler(cls, options: dict[str, Any]) -> FrameSampler | None:
        """How frames are spread; None is `sample_uniformly`."""
        return None

    @classmethod
    def select(cls, num_frames: int, options: dict[str, Any], timeline: Timeline) -> list[int]:
        """Return the numbers of the frames that a decode with these options takes."""
        return select_frames(cls.options(num_frames, options), timeline, cls.sampler(options))

    def load_bytes(self, data: bytes, num_frames: int = -1, **options: Any) -> DecodedVideo:
        """Decode the chosen frames of `data`.

        Raises:
            CorruptMediaError: If nothing can be decoded, or the file is cut off.
            MediaTooLargeError: If the chosen frames are over a limit.
            ValidationError: If an option is wrong, or does not fit this video.
        """
        sampling = self.options(num_frames, options)
        index = read_index(data)
        check_index(index, self.limits, may_be_cut=sampling.frame_recovery)
        for candidate in self._indices(data, index):
            with contextlib.suppress(UntrustedTimesError):
                return self._load(data, candidate, sampling, options)
        raise AssertionError("counted frames are told by their order, not by times")

    def _indices(self, data: bytes, first: FrameIndex) -> Iterator[FrameIndex]:
        """Yield ways to tell the frames apart, from cheap to certain."""
        if first.is_trusted:
            yield first
            scanned = scan_index(data)
            if scanned.is_trusted:
                yield scanned
        yield count_frames(data, max_pixels=self.limits.max_image_pixels)

    def _load(
        self,
        data: bytes,
        index: FrameIndex,
        sampling: SamplingOptions,
        options: dict[str, Any],
    ) -> DecodedVideo:
        wanted = select_frames(sampling, index.timeline, self.sampler(options))
        check_frame_count(len(wanted), self.limits)
        # The decoded size may differ from the stated one: it is checked again on allocation.
        check_frame_bytes(len(wanted), index.width, index.height, self.limits)
        decoded = self.read_frames(data, index, wanted, sampling.frame_recovery, options)
        if not decoded.indices:
            raise CorruptMediaError(
                f"none of the {len(wanted)} chosen frames decodes (codec {index.codec})"
            )
        metadata = describe(index.timeline, decoded.indices, decoded.backend or self.name)
        height, width = decoded.frames.shape[1:3]
        metadata["width"], metadata["height"] = width, height
        return decoded.frames, metadata

    @abstractmethod
    def read_frames(
        self,
        data: bytes,
        index: FrameIndex,
        wanted: Sequence[int],
        recover: bool,
        options: dict[str, Any],
    ) -> DecodedFrames:
        """Decode the frames with the numbers `wanted`, in that order; repeats are allowed.

        Frames that do not decode are left out, or, if `recover`, replaced by the next frame
        that does.
        """


def check_index(index: FrameIndex, limits: DecodeLimits, *, may_be_cut: bool = False) -> None:
    """Check that a video may be decoded, as far as its packets tell.

    Raises:
        CorruptMediaError: If packets are missing at its end, and it may not be cut off.
        MediaTooLargeError: If its picture is over the limit.
    """
    limit = limits.max_image_pixels
    if limit and index.width * index.height > limit:
        raise MediaTooLargeError(
            f"the video's {index.width} x {index.height} pixels exceed the limit of {limit} "
            "pixels per frame",
            parameter="max_image_pixels",
            value=index.width * index.height,
        )
    if index.is_cut and not may_be_cut:
        raise CorruptMediaError(
            f"the video is cut off: {index.num_whole} of {index.num_stated} frames are there"
        )


def describe(timeline: Timeline, indices: list[int], backend: str) -> VideoMetadata:
    """Return the metadata of the frames `indices`; their size is left 0."""
    return {
        "fps": timeline.fps,
        "duration": timeline.duration_s,
        "total_num_frames": timeline.num_frames,
        "frames_indices": indices,
        "timestamps": [float(timeline.times_s[index]) for index in indices],
        "video_backend": backend,
        "do_sample_frames": False,
        "width": 0,
        "height": 0,
    }


def check_frame_count(num_frames: int, limits: DecodeLimits) -> None:
    """Raise if one video may not keep so many frames.

    Raises:
        MediaTooLargeError: If it is over the limit.
    """
    if num_frames > limits.max_video_frames:
        raise MediaTooLargeError(
            f"{num_frames} frames of the video are asked for, at most {limits.max_video_frames} "
            "are allowed: ask for fewer with num_frames, fps or max_frames"
        )


def check_frame_bytes(num_frames: int, width: int, height: int, limits: DecodeLimits) -> None:
    """Raise if one video may not keep so many bytes of RGB.

    Raises:
        MediaTooLargeError: If they are over the limit.
    """
    num_bytes = num_frames * width * height * 3
    if num_bytes > limits.max_video_decoded_bytes:
        raise MediaTooLargeError(
            f"{num_frames} frames of {width}x{height} pixels need {num_bytes} bytes, at most "
            f"{limits.max_video_decoded_bytes} are allowed: ask for fewer frames"
        )


def allocate_frames(
    num_frames: int,
    width: int,
    height: int,
    limits: DecodeLimits,
    *,
    num_returned: int | None = None,
) -> NDArray[np.uint8]:
    """Return an uninitialised array for so many RGB frames, if the limit allows it.

    Args:
        num_frames: Frames to allocate.
        width: In pixels.
        height: In pixels.
        limits: What one video may keep.
        num_returned: Frames that will be kept in the end, if some are repeated.

    Raises:
        MediaTooLargeError: If they are over the limit; nothing was allocated then.
    """
    check_frame_bytes(max(num_frames, num_returned or 0), width, height, limits)
    return np.empty((num_frames, height, width, 3), dtype=np.uint8)
