"""Frames by OpenCV's own FFmpeg."""

from __future__ import annotations

import io
from typing import Any, ClassVar, Final

import numpy as np

from lazydecode.media.video_backends.frame_index import FrameIndex
from lazydecode.media.video_backends.optional import (
    FrameCollector,
    OptionalVideoLoader,
    UnsuitableError,
)

_TOLERANCE_S: Final = 0.002
"""OpenCV gives times in whole ticks of the container: 1 ms in Matroska and FLV."""


_UNREADABLE: Final = frozenset({"av1", "libdav1d"})
"""Codecs that OpenCV's wheels read on a GPU at best: it would say so on stderr, frame by frame."""


class OpenCVVideoLoader(OptionalVideoLoader):
    """Decodes with `cv2.VideoCapture`, running through the file from its start.

    Frames equal PyAV's for 8-bit progressive video; 10-bit video differs by the scaler's
    rounding (at most 4 levels).
    """

    name: ClassVar[str] = "opencv"
    module: ClassVar[str] = "cv2"
    distribution: ClassVar[str] = "opencv-python-headless"
    extra: ClassVar[str] = "opencv"

    def decode(
        self, data: bytes, index: FrameIndex, collector: FrameCollector, options: dict[str, Any]
    ) -> None:
        """Grab frame after frame; only wanted ones are converted."""
        if index.codec in _UNREADABLE:
            raise UnsuitableError(f"OpenCV has no decoder for {index.codec}")
        cv2 = self.import_module()
        # OpenCV keeps no reference to the stream: without this name it would be freed early.
        stream = io.BytesIO(data)
        capture = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
        try:
            if not capture.isOpened():
                raise UnsuitableError("OpenCV does not open it")
            self._run_through(cv2, capture, index, collector)
        finally:
            capture.release()
            del stream

    def _run_through(
        self, cv2: Any, capture: Any, index: FrameIndex, collector: FrameCollector
    ) -> None:
        times = index.timeline.times_s - index.timeline.times_s[0]
        pending = list(reversed(collector.wanted))
        number = -1
        while pending and capture.grab():
            # A frame that does not decode is passed over in silence: the time tells which
            # frame this is, not the count.
            time_s = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0
            previous, number = number, int(np.abs(times - time_s).argmin())
            if number <= previous or abs(times[number] - time_s) > _TOLERANCE_S:
                raise UnsuitableError("OpenCV's frame times do not fit")
            while pending and pending[-1] < number:
                pending.pop()
            if pending and pending[-1] == number:
                pending.pop()
                decoded, image = capture.retrieve()
                if decoded:
                    height, width = image.shape[:2]
                    slot = collector.slot(number, width, height)
                    cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=slot)
