"""A video backend: PyAV decodes, and the frames are the first ones."""

from __future__ import annotations

from typing import Any, ClassVar

from lazydecode.media.video_backends.pyav import PyAVVideoLoader
from lazydecode.media.video_sampling import ALL_FRAMES, FrameSampler, SamplingOptions, Timeline


class HeadVideoLoader(PyAVVideoLoader):
    """Takes the first `num_frames` frames, from the start or from the window's start."""

    name: ClassVar[str] = "head"

    @classmethod
    def sampler(cls, options: dict[str, Any]) -> FrameSampler:
        """The first frames, one after the other."""
        return _first


def _first(options: SamplingOptions, timeline: Timeline, first: int, stop: int) -> list[int]:
    if options.num_frames == ALL_FRAMES:
        return list(range(first, stop))
    return list(range(first, min(stop, first + options.num_frames)))
