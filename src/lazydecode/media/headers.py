"""What encoded media says about itself, read without decoding it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an encoded image says about itself. Nothing was rasterized for it."""

    width: int
    """Width in pixels after EXIF orientation: the width that the decoder will return."""
    height: int
    """Height in pixels after EXIF orientation."""
    mode: str
    """Mode as stored, in Pillow's terms, for example `RGB`, `L`, `P`, `CMYK`, `I;16`."""
    format: str
    """Container format in Pillow's terms, for example `JPEG`, `PNG`, `WEBP`."""
    num_frames: int = 1
    """Frames that the file states (animations, multi-page, MPO); only the first is decoded."""


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What an encoded audio stream says about itself."""

    rate_hz: int
    """Native sampling rate."""
    channels: int
    duration_s: float | None = None
    """Stated duration; None if the container does not say."""
    num_samples: int | None = None
    """Stated samples per channel; None if the container does not say."""


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What an encoded video says about itself. No frame was decoded for it."""

    width: int
    """Width in pixels after rotation: the width that the decoder will return."""
    height: int
    """Height in pixels after rotation."""
    fps: float | None = None
    """Average frame rate; None if unknown."""
    duration_s: float | None = None
    num_frames: int | None = None
    """Frames that the container states, or that its packets count; None if unknown."""
    has_audio: bool = False
    """Whether there is an audio track."""
    frame_times_s: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    """Shape (num_frames,): when each frame is shown, in seconds from the container's start;
    None if the packets do not say."""


MediaHeader = ImageHeader | AudioHeader | VideoHeader
