"""The few boxes of an MP4 file that are read directly, without opening the container."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FIXED_POINT: Final = (16, 16, 30)
"""Fraction bits of a matrix row's three entries."""
_MAX_BOXES: Final = 10_000
"""Boxes looked at in one file: real ones have a few dozen before the samples."""


def iterate_boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, first byte of the content, end) of the boxes in `data[start:end]`."""
    for _ in range(_MAX_BOXES):
        if start + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", data, start)
        header = 8
        if size == 1:
            if start + 16 > end:
                return
            (size,) = struct.unpack_from(">Q", data, start + 8)
            header = 16
        elif size == 0:
            size = end - start
        if size < header:
            return
        yield kind, start + header, min(start + size, end)
        start += size


def video_track_matrices(data: bytes) -> list[tuple[int, NDArray[np.float64]]]:
    """Return (track id, display matrix) of each video track of an MP4 file, in file order.

    The matrix is the track's times the movie's, shape (9,), as a player applies it.
    """
    matrices: list[tuple[int, NDArray[np.float64]]] = []
    for kind, start, end in iterate_boxes(data, 0, len(data)):
        if kind != b"moov":
            continue
        movie: NDArray[np.float64] = np.eye(3)
        tracks: list[tuple[int, NDArray[np.float64]]] = []
        for child, first, last in iterate_boxes(data, start, end):
            if child == b"mvhd":
                movie = _matrix(data, first, last, version_0_at=36)
            elif child == b"trak":
                track = _video_track(data, first, last)
                if track is not None:
                    tracks.append(track)
        matrices += [(number, (matrix @ movie).reshape(9)) for number, matrix in tracks]
    return matrices


def _video_track(data: bytes, start: int, end: int) -> tuple[int, NDArray[np.float64]] | None:
    track: tuple[int, NDArray[np.float64]] | None = None
    is_video = False
    for kind, first, last in iterate_boxes(data, start, end):
        if kind == b"tkhd" and last - first >= 24:  # both versions have the number by then
            number_at = first + (20 if data[first] == 1 else 12)
            (number,) = struct.unpack_from(">I", data, number_at)
            track = (number, _matrix(data, first, last, version_0_at=40))
        elif kind == b"mdia":
            is_video = is_video or any(
                inner == b"hdlr" and data[at + 8 : at + 12] == b"vide"
                for inner, at, _ in iterate_boxes(data, first, last)
            )
    return track if is_video else None


def _matrix(data: bytes, first: int, last: int, *, version_0_at: int) -> NDArray[np.float64]:
    """Return the 3x3 matrix of an `mvhd` or `tkhd` box; the unit matrix if it is cut off.

    Version 1 of either box has 12 bytes more before it (64-bit times and duration).
    """
    version = data[first] if first < last else 0
    at = first + version_0_at + (12 if version == 1 else 0)
    if at + 36 > last:
        return np.eye(3)
    entries = np.frombuffer(data, dtype=">i4", count=9, offset=at).astype(np.float64).reshape(3, 3)
    return entries / np.array([2.0**bits for bits in _FIXED_POINT])
