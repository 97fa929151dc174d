"""When the samples of an MP4 track are shown, from its tables: microseconds instead of a pass
over the packets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazydecode.media.mp4_boxes import VideoTrack, iterate_boxes


@dataclass(frozen=True, slots=True)
class SampleTimes:
    """Times of a track's samples, in the order of decoding and in units of the track."""

    offsets: NDArray[np.int64]
    """Shape (samples,): from when a sample is decoded to when it is shown."""
    durations: NDArray[np.int64]
    """Shape (samples,): from one sample's decoding to the next's."""


def read_sample_times(data: bytes, track: VideoTrack) -> SampleTimes | None:
    """Return the times of the samples of `track`; None if the tables do not tell all.

    They do not where fragments follow, where the edit list shows more than one piece, or where
    the tables disagree about the number of samples.
    """
    if track.num_edits > 1 or any(kind == b"moof" for kind, _, _ in _top_level(data)):
        return None
    sizes = track.tables.get(b"stsz")
    if sizes is None or sizes[0] + 12 > sizes[1]:
        return None
    count = int.from_bytes(data[sizes[0] + 8 : sizes[0] + 12], "big")
    durations = _expand(data, track.tables.get(b"stts"), count)
    offsets = np.zeros(count, dtype=np.int64)
    if b"ctts" in track.tables:
        stated = _expand(data, track.tables[b"ctts"], count)
        if stated is None:
            return None
        offsets = stated
    if durations is None:
        return None
    return SampleTimes(offsets, durations)


def _top_level(data: bytes) -> list[tuple[bytes, int, int]]:
    return list(iterate_boxes(data, 0, len(data)))


def _expand(data: bytes, span: tuple[int, int] | None, count: int) -> NDArray[np.int64] | None:
    """Return the values of a table of (how often, value) rows, one for each of `count` samples."""
    if span is None or span[0] + 8 > span[1]:
        return None
    first, last = span
    rows = int.from_bytes(data[first + 4 : first + 8], "big")
    if first + 8 + rows * 8 > last:
        return None
    table = np.frombuffer(data, dtype=">u4", count=rows * 2, offset=first + 8).reshape(rows, 2)
    repeats = table[:, 0].astype(np.int64)
    # Before `repeat`, which would allocate whatever the rows claim.
    if int(repeats.sum()) != count:
        return None
    # Offsets are signed in version 1; FFmpeg reads them so in version 0 as well.
    values = table[:, 1].astype(np.uint32).view(np.int32).astype(np.int64)
    return np.repeat(values, repeats)
