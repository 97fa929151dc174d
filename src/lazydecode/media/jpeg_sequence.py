"""A video given as JPEG frames: comma-separated base64 under the media type `video/jpeg`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lazydecode.errors import CorruptMediaError, LazyDecodeError, ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media.base import ImageHeader, MediaIO, VideoHeader, decode_base64
from lazydecode.media.video_backends.base import (
    DecodedVideo,
    VideoMetadata,
    allocate_frames,
    check_frame_count,
)
from lazydecode.media.video_sampling import ALL_FRAMES, check_num_frames

MEDIA_TYPE: Final = "video/jpeg"
BACKEND: Final = "jpeg_sequence"
_FRAME_TYPE: Final = "image/jpeg"
SEQUENCE_OPTIONS: Final = frozenset(
    {"frames_indices", "total_num_frames", "duration", "fps", "do_sample_frames"}
)
"""Names of the options that describe a sequence."""


def is_jpeg_sequence(media_type: str) -> bool:
    """Whether text of this media type is a jpeg sequence."""
    return media_type.strip().lower() == MEDIA_TYPE


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """What a request says about its jpeg frames: where they come from in the source."""

    total_num_frames: int
    fps: float
    duration_s: float
    frames_indices: tuple[int, ...]
    do_sample_frames: bool

    @classmethod
    def parse(cls, num_frames: int, options: Mapping[str, Any]) -> SequenceOptions:
        """Check the options that describe a sequence of `num_frames` frames.

        Raises:
            ValidationError: If one is of the wrong type or does not fit the frame count.
        """
        indices = options.get("frames_indices")
        if indices is None:
            indices = range(num_frames)
        elif not isinstance(indices, list | tuple) or not all(map(_is_int, indices)):
            raise _invalid("frames_indices", indices, "must be a list of integers")
        elif len(indices) != num_frames:
            raise _invalid(
                "frames_indices",
                len(indices),
                f"frames_indices length must be the number of frames ({num_frames})",
            )
        total = options.get("total_num_frames")
        if total is None:
            total = num_frames
        elif not _is_int(total) or total < 1:
            raise _invalid("total_num_frames", total, "must be a positive integer")
        elif total < num_frames:
            raise _invalid("total_num_frames", total, f"must be >= the {num_frames} frames sent")
        fps = _number("fps", options.get("fps", 1))
        duration = options.get("duration")
        if duration is None:
            duration = total / fps if fps > 0 else 0.0
        elif (seconds := _number("duration", duration)) < 0:
            raise _invalid("duration", seconds, "must be a non-negative number")
        return cls(
            total_num_frames=total,
            fps=fps,
            duration_s=float(duration),
            frames_indices=tuple(indices),
            do_sample_frames=bool(options.get("do_sample_frames", False)),
        )

    def describe(self, width: int, height: int) -> VideoMetadata:
        """Return the metadata of the decoded sequence."""
        rate = self.fps if self.fps > 0 else math.inf
        return {
            "fps": self.fps,
            "duration": self.duration_s,
            "total_num_frames": self.total_num_frames,
            "frames_indices": list(self.frames_indices),
            "timestamps": [index / rate for index in self.frames_indices],
            "video_backend": BACKEND,
            "do_sample_frames": self.do_sample_frames,
            "width": width,
            "height": height,
        }


@dataclass(frozen=True, slots=True)
class JpegSequence:
    """The frames of one sequence, still encoded, with checked options."""

    text: bytes
    """The base64 frames in use, separated by commas."""
    num_frames: int
    options: SequenceOptions

    @classmethod
    def parse(
        cls,
        data: str | bytes | memoryview,
        num_frames: int,
        options: Mapping[str, Any],
        limits: DecodeLimits,
    ) -> JpegSequence:
        """Cut `data` to its first `num_frames` frames (-1: all) and check the options.

        Nothing is decoded. The text that is cut off is neither split nor kept.

        Raises:
            ValidationError: If an option is wrong.
            MediaTooLargeError: If there are more frames than the limit.
        """
        limit = check_num_frames(num_frames)
        text = data.encode("utf-8") if isinstance(data, str) else bytes(data)
        if limit == ALL_FRAMES:
            count = text.count(b",") + 1
        else:
            count, end = 0, -1
            while count < limit and end < len(text):
                found = text.find(b",", end + 1)
                end = len(text) if found < 0 else found
                count += 1
            text = text[:end]
        check_frame_count(count, limits)
        return cls(text, count, SequenceOptions.parse(count, options))

    def decode(self, image_io: MediaIO[Image.Image], limits: DecodeLimits) -> DecodedVideo:
        """Decode every frame with `image_io`.

        Raises:
            CorruptMediaError: If a frame does not decode, or differs in size from the first.
            MediaTooLargeError: If the frames together are over the limit.
        """
        frames: NDArray[np.uint8] | None = None
        for number, part in enumerate(self.text.split(b",")):
            image = np.asarray(_decode_frame(image_io, part, number))
            if frames is None:
                height, width = image.shape[:2]
                # The limit counts three channels, whatever the image mode keeps.
                frames = allocate_frames(self.num_frames, width, height, limits)
                if image.shape[2:] != (3,):
                    frames = np.empty((self.num_frames, *image.shape), dtype=image.dtype)
            if image.shape != frames.shape[1:]:
                raise CorruptMediaError(
                    f"frame {number} of the jpeg sequence has shape {image.shape}, the first "
                    f"has {frames.shape[1:]}"
                )
            frames[number] = image
        assert frames is not None
        height, width = frames.shape[1:3]
        return frames, self.options.describe(width, height)

    def probe_header(self, image_io: MediaIO[Image.Image]) -> VideoHeader | None:
        """Return size (from the first frame's header), rate and count; None if it does not
        parse.
        """
        first = self.text.partition(b",")[0]
        try:
            header = image_io.probe_header(decode_base64(first))
        except LazyDecodeError:
            return None
        if not isinstance(header, ImageHeader):
            return None
        return VideoHeader(
            width=header.width,
            height=header.height,
            fps=self.options.fps,
            duration_s=self.options.duration_s,
            num_frames=self.num_frames,
        )


def _decode_frame(image_io: MediaIO[Image.Image], part: bytes, number: int) -> Image.Image:
    try:
        return image_io.load_base64(_FRAME_TYPE, part.decode("ascii"))
    except LazyDecodeError as exc:
        raise type(exc)(f"frame {number} of the jpeg sequence: {exc.message}") from exc
    except UnicodeDecodeError as exc:
        raise CorruptMediaError(f"frame {number} of the jpeg sequence is not base64") from exc


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _invalid(name, value, "must be a non-negative number")
    return float(value)


def _invalid(name: str, value: object, why: str) -> ValidationError:
    return ValidationError(f"{name}: {why}, got {value!r}", parameter=name, value=value)
