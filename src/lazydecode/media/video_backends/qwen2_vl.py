"""Frames as Qwen2-VL's own processor would sample them, decoded by PyAV."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from lazydecode.errors import ValidationError
from lazydecode.media.video_backends.pyav import PyAVVideoLoader
from lazydecode.media.video_sampling import (
    ALL_FRAMES,
    FrameSampler,
    SamplingOptions,
    Timeline,
)

_DEFAULT_FPS: Final = 2.0
_MIN_FRAMES: Final = 4
_MAX_FRAMES: Final = 768
_TEMPORAL_PATCH: Final = 2
"""Frames that the model takes together: counts are multiples of it."""


class Qwen2VLVideoLoader(PyAVVideoLoader):
    """PyAV with Qwen2-VL's frame choice: 2 frames per second unless `fps` says otherwise, at
    least 4 and at most 768, an even number, from the start of each interval.

    `num_frames` is an upper limit here; -1 without `fps` asks for every frame. `min_frames`
    and `max_frames` may be given.
    """

    name: ClassVar[str] = "qwen2_vl"
    own_options: ClassVar[frozenset[str]] = frozenset({"min_frames"})

    @classmethod
    def options(cls, num_frames: int, options: dict[str, Any]) -> SamplingOptions:
        """Check the sampling options, `min_frames` among them."""
        _min_frames(options)
        return super().options(num_frames, options)

    @classmethod
    def sampler(cls, options: dict[str, Any]) -> FrameSampler:
        """Qwen2-VL's choice."""
        min_frames = _min_frames(options)

        def sample(
            sampling: SamplingOptions, timeline: Timeline, first: int, stop: int
        ) -> list[int]:
            return sample_qwen2_vl(sampling, timeline, first, stop, min_frames=min_frames)

        return sample


def sample_qwen2_vl(
    options: SamplingOptions,
    timeline: Timeline,
    first: int,
    stop: int,
    *,
    min_frames: int = _MIN_FRAMES,
) -> list[int]:
    """Choose among frames [first, stop) of `timeline`.

    Source:
        `Qwen2VLVideoProcessor.sample_frames` of transformers: positions are
        `arange(0, total, total / count)`, cut to integers.
    """
    total = stop - first
    if options.num_frames == ALL_FRAMES and options.fps is None and options.max_frames is None:
        return list(range(first, stop))
    fps = options.fps or _DEFAULT_FPS
    ceiling = _whole_patches(min(options.max_frames or _MAX_FRAMES, total))
    count = min(max(total / timeline.fps * fps, min_frames), ceiling)
    if options.num_frames != ALL_FRAMES:
        count = min(count, options.num_frames)
    whole = _whole_patches(count)
    # A single frame is a video too: the processor repeats it to fill the patch.
    num_frames = whole or min(total, 1)
    # The positions go through float32 there, and so do ours.
    positions = (np.arange(num_frames) * (total / num_frames)).astype(np.float32).astype(np.int64)
    chosen: list[int] = (first + np.minimum(positions, total - 1)).tolist()
    return chosen


def _whole_patches(count: float) -> int:
    return int(count // _TEMPORAL_PATCH) * _TEMPORAL_PATCH


def _min_frames(options: dict[str, Any]) -> int:
    value = options.get("min_frames")
    if value is None:
        return _MIN_FRAMES
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValidationError(
            f"min_frames: must be an integer greater than 0, got {value!r}",
            parameter="min_frames",
            value=value,
        )
    return value
