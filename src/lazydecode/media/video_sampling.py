"""Which frames of a video are taken: options, the timeline they apply to, and the choice.

Pure functions: a decode and a plan made from a header alone call the same ones, so that both
name the same frames whenever the header is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import ValidationError

ALL_FRAMES: Final = -1
"""`num_frames` that asks for every frame."""
SAMPLING_OPTIONS: Final = frozenset(
    {
        "num_frames",
        "fps",
        "max_frames",
        "start_time",
        "end_time",
        "timestamps",
        "frame_indices",
        "frame_recovery",
    }
)
"""Names of the options that say which frames are taken."""
_NO_RATE: Final = -1
"""`fps` that means: no rate given."""
_SLACK: Final = 1e-6
"""Rounding error of `duration * rate` that must not cost a frame."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each frame of a video is shown, in display order."""

    times_s: NDArray[np.float64]
    """Shape (frames,), ascending: seconds from the container's start to each frame."""
    fps: float
    """Average frame rate, above 0."""
    duration_s: float
    """From the first frame's start to the last one's end, above 0."""

    @property
    def num_frames(self) -> int:
        """Number of frames in the video."""
        return len(self.times_s)

    @classmethod
    def at_constant_rate(cls, num_frames: int, fps: float) -> Timeline:
        """Return the timeline of `num_frames` frames at `fps`, the first at 0."""
        times: NDArray[np.float64] = np.arange(num_frames, dtype=np.float64) / fps
        return cls(times, fps, num_frames / fps)

    def frame_at(self, time_s: float) -> int:
        """Return the index of the frame that is on screen at `time_s`."""
        position = int(np.searchsorted(self.times_s, time_s + _SLACK, side="right")) - 1
        return max(position, 0)

    @property
    def end_s(self) -> float:
        """When the last frame ends."""
        return float(self.times_s[0]) + self.duration_s


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a request says about the frames it wants; checked, with defaults filled in."""

    num_frames: int = ALL_FRAMES
    """At most so many frames, spread evenly; -1: no such limit."""
    fps: float | None = None
    """At most so many frames per second of video; None: no such limit."""
    max_frames: int | None = None
    """At most so many frames, whatever the other options say."""
    start_time_s: float | None = None
    end_time_s: float | None = None
    """Only frames on screen in [start_time, end_time)."""
    timestamps: tuple[float, ...] | None = None
    """Exactly the frames on screen at these seconds, in this order."""
    frame_indices: tuple[int, ...] | None = None
    """Exactly these frames, in this order."""
    frame_recovery: bool = False
    """Whether a frame that does not decode is replaced by the next that does."""

    @classmethod
    def parse(cls, num_frames: object, options: Mapping[str, Any]) -> SamplingOptions:
        """Check the sampling options among `options` (others are left alone).

        Raises:
            ValidationError: If one is of the wrong type, out of range, or excludes another.
        """
        timestamps = _numbers(options, "timestamps")
        indices = _integers(options, "frame_indices")
        start, end = _seconds(options, "start_time"), _seconds(options, "end_time")
        if timestamps is not None and indices is not None:
            raise _invalid("timestamps", timestamps, "cannot be given together with frame_indices")
        if (timestamps is not None or indices is not None) and (start, end) != (None, None):
            given = "timestamps" if timestamps is not None else "frame_indices"
            raise _invalid(
                given, options[given], "cannot be given together with start_time or end_time"
            )
        if start is not None and end is not None and end <= start:
            raise _invalid("end_time", end, f"must be after start_time ({start:g})")
        recovery = options.get("frame_recovery", False)
        if not isinstance(recovery, bool):
            raise _invalid("frame_recovery", recovery, "must be true or false")
        return cls(
            num_frames=check_num_frames(num_frames),
            fps=check_fps(options.get("fps")),
            max_frames=_positive(options, "max_frames"),
            start_time_s=start,
            end_time_s=end,
            timestamps=timestamps,
            frame_indices=indices,
            frame_recovery=recovery,
        )


def check_num_frames(value: object) -> int:
    """Return `value` if it is a frame count: positive, or -1 for all frames.

    Raises:
        ValidationError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid("num_frames", value, "must be an integer")
    if value != ALL_FRAMES and value < 1:
        raise ValidationError(
            f"num_frames must be greater than 0 or -1, got {value}",
            parameter="num_frames",
            value=value,
        )
    return value


def check_fps(value: object) -> float | None:
    """Return `value` if it is a sampling rate; None for None and -1.

    Raises:
        ValidationError: If it is not a positive, finite number.
    """
    if value is None:
        return None
    rate = _finite("fps", value)
    if rate == _NO_RATE:
        return None
    if rate <= 0:
        raise _invalid("fps", value, "must be greater than 0 (or -1 for no limit)")
    return rate


FrameSampler = Callable[[SamplingOptions, Timeline, int, int], list[int]]
"""Chooses among frames [first, stop) of a timeline, when none are named explicitly."""


def select_frames(
    options: SamplingOptions, timeline: Timeline, sampler: FrameSampler | None = None
) -> list[int]:
    """Return the indices of the frames to take, in the order in which they are returned.

    Args:
        options: What the request says.
        timeline: The video's frames.
        sampler: How frames are spread; None is `sample_uniformly`.

    Raises:
        ValidationError: If explicit frames or the time window lie outside the video.
    """
    if options.frame_indices is not None:
        last = timeline.num_frames - 1
        for index in options.frame_indices:
            if index > last:
                raise _invalid("frame_indices", index, f"the video's last frame is {last}")
        chosen = list(options.frame_indices)
    elif options.timestamps is not None:
        for time_s in options.timestamps:
            if time_s >= timeline.end_s + _SLACK:
                raise _invalid("timestamps", time_s, f"the video ends at {timeline.end_s:.3f} s")
        chosen = [timeline.frame_at(time_s) for time_s in options.timestamps]
    else:
        first, stop = _window(options, timeline)
        return (sampler or sample_uniformly)(options, timeline, first, stop)
    if options.max_frames is not None and len(chosen) > options.max_frames:
        raise _invalid("max_frames", options.max_frames, f"{len(chosen)} frames are named")
    return chosen


def sample_uniformly(
    options: SamplingOptions, timeline: Timeline, first: int, stop: int
) -> list[int]:
    """Spread the smallest of the asked counts evenly over frames [first, stop).

    Both ends are taken: positions are `linspace(first, stop - 1, count)` cut to integers, so
    4 of 20 frames are 0, 6, 12, 19.
    """
    total = stop - first
    count = total if options.num_frames == ALL_FRAMES else min(options.num_frames, total)
    if options.fps is not None:
        seconds = _window_seconds(options, timeline, first, stop)
        count = min(count, max(math.floor(seconds * options.fps + _SLACK), 1))
    if options.max_frames is not None:
        count = min(count, options.max_frames)
    return spread_evenly(first, stop, count)


def spread_evenly(first: int, stop: int, count: int) -> list[int]:
    """Return `count` positions from `first` to `stop - 1`, both included, cut to integers."""
    if count >= stop - first:
        return list(range(first, stop))
    positions: list[int] = np.linspace(first, stop - 1, count).astype(np.int64).tolist()
    return positions


def _window(options: SamplingOptions, timeline: Timeline) -> tuple[int, int]:
    first, stop = 0, timeline.num_frames
    if options.start_time_s is not None:
        if options.start_time_s >= timeline.end_s:
            raise _invalid(
                "start_time", options.start_time_s, f"the video ends at {timeline.end_s:.3f} s"
            )
        first = timeline.frame_at(options.start_time_s)
    if options.end_time_s is not None:
        stop = int(np.searchsorted(timeline.times_s, options.end_time_s - _SLACK, side="left"))
        if stop <= first:
            raise _invalid("end_time", options.end_time_s, "no frame is shown before it")
    return first, stop


def _window_seconds(options: SamplingOptions, timeline: Timeline, first: int, stop: int) -> float:
    if stop - first == timeline.num_frames:
        return timeline.duration_s
    end = timeline.end_s if stop == timeline.num_frames else float(timeline.times_s[stop])
    start = float(timeline.times_s[first])
    if options.start_time_s is not None:
        start = max(start, options.start_time_s)
    if options.end_time_s is not None:
        end = min(end, options.end_time_s)
    return end - start


def _invalid(name: str, value: object, why: str) -> ValidationError:
    return ValidationError(f"{name}: {why}, got {value!r}", parameter=name, value=value)


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _invalid(name, value, "must be a number")
    if not math.isfinite(value):
        raise _invalid(name, value, "must be finite")
    return float(value)


def _seconds(options: Mapping[str, Any], name: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    seconds = _finite(name, value)
    if seconds < 0:
        raise _invalid(name, value, "must not be negative")
    return seconds


def _positive(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _invalid(name, value, "must be an integer greater than 0")
    return value


def _numbers(options: Mapping[str, Any], name: str) -> tuple[float, ...] | None:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise _invalid(name, value, "must be a non-empty list of seconds")
    numbers = tuple(_finite(name, item) for item in value)
    if any(number < 0 for number in numbers):
        raise _invalid(name, value, "must not be negative")
    return numbers


def _integers(options: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    value = options.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, list | tuple)
        or not value
        or any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in value)
    ):
        raise _invalid(name, value, "must be a non-empty list of frame numbers from 0")
    return tuple(value)
