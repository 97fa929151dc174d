"""Frames by TorchCodec, on the CPU."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Final

import numpy as np

from lazydecode.media.video_backends.frame_index import FrameIndex
from lazydecode.media.video_backends.optional import (
    FrameCollector,
    OptionalVideoLoader,
    UnsuitableError,
)

_TOLERANCE_S: Final = 1e-4
_BATCH: Final = 32
"""Frames asked for at once: what is decoded before it is copied to its place."""


class TorchCodecVideoLoader(OptionalVideoLoader):
    """Decodes with `torchcodec.decoders.VideoDecoder`; it needs FFmpeg on the system.

    Frames equal PyAV's for 8-bit progressive video; 10-bit video differs by the scaler's
    rounding.
    """

    name: ClassVar[str] = "torchcodec"
    module: ClassVar[str] = "torchcodec"
    distribution: ClassVar[str] = "torchcodec"
    extra: ClassVar[str] = "torchcodec"

    def decode(
        self, data: bytes, index: FrameIndex, collector: FrameCollector, options: dict[str, Any]
    ) -> None:
        """Ask for the wanted frames in batches."""
        self.import_module()
        from torchcodec.decoders import VideoDecoder

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                decoder = VideoDecoder(
                    data, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
                )
            except (RuntimeError, ValueError) as exc:
                raise UnsuitableError("TorchCodec does not open it") from exc
            if len(decoder) != index.timeline.num_frames:
                raise UnsuitableError("TorchCodec counts other frames")
            for start in range(0, len(collector.wanted), _BATCH):
                self._take(decoder, collector.wanted[start : start + _BATCH], index, collector)

    def _take(
        self, decoder: Any, numbers: list[int], index: FrameIndex, collector: FrameCollector
    ) -> None:
        try:
            batch = decoder.get_frames_at(numbers)
        except (RuntimeError, IndexError):
            return  # PyAV finds out which of them do decode
        timeline = index.timeline
        expected = timeline.times_s[numbers] - timeline.times_s[0]
        times = batch.pts_seconds.numpy() - decoder.metadata.begin_stream_seconds
        if np.abs(times - expected).max() > _TOLERANCE_S:
            raise UnsuitableError("TorchCodec's frame times do not fit")
        images = batch.data.numpy()
        height, width = images.shape[1:3]
        for number, image in zip(numbers, images, strict=True):
            collector.slot(number, width, height)[...] = image
