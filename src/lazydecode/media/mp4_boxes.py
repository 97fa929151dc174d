"""The few boxes of an MP4 file that are read directly, without opening the container.

Box layouts are those of ISO/IEC 14496-12.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lazydecode.errors import CorruptMediaError

_FIXED_POINT: Final = (16, 16, 30)
"""Fraction bits of the three entries in each row of a matrix."""
_MAX_BOXES: Final = 200_000
"""Boxes looked at in one file; a fragment per frame makes half a dozen for each."""
_MAX_DEPTH: Final = 8
_NESTING: Final = frozenset(
    (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"dinf", b"mvex", b"moof", b"traf")
)
"""Boxes that hold boxes: wherever they stand, FFmpeg reads what is inside."""
_COMPRESSED: Final = b"cmov"
_FIRST_BOXES: Final = frozenset((b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp"))
_SAMPLE_COUNT_AT: Final = {b"stsz": 8, b"stz2": 8, b"trun": 4}
"""Where each table of samples states their number."""


@dataclass(frozen=True, slots=True)
class VideoTrack:
    """What an MP4's boxes say about one video track."""

    number: int
    width: int
    """Stored width in pixels; 0 if the boxes do not say."""
    height: int
    matrix: NDArray[np.float64]
    """Shape (9,): the display matrix, the track's times the movie's, as a player applies it."""
    tables: dict[bytes, tuple[int, int]]
    """The sample tables (`stts`, `ctts`, ...): where the content of each begins and ends."""
    num_edits: int
    """Pieces of the track that its edit list shows; 0 without one."""


def iterate_boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, first byte of the content, end) of the boxes in `data[start:end]`."""
    while start + 8 <= end:
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


def check_sample_counts(data: bytes) -> None:
    """Refuse an MP4 file whose tables announce more samples than the file has bytes.

    FFmpeg allocates some 80 bytes per announced sample when it opens a file; a table of equal
    samples takes 20 bytes whatever its count, so 2 KB could ask for gigabytes.

    Raises:
        CorruptMediaError: If there are more, or the tables are compressed or nested too deep
            to tell.
    """
    if data[4:8] not in _FIRST_BOXES:
        return
    num_samples = num_boxes = 0
    pending = [(0, len(data), 0)]
    while pending:
        start, end, depth = pending.pop()
        for kind, first, last in iterate_boxes(data, start, end):
            num_boxes += 1
            if kind in _NESTING:
                pending.append((first, last, depth + 1))
            elif kind in _SAMPLE_COUNT_AT:
                at = first + _SAMPLE_COUNT_AT[kind]
                if at + 4 <= last:
                    num_samples += int.from_bytes(data[at : at + 4], "big")
            if kind == _COMPRESSED or depth > _MAX_DEPTH or num_boxes > _MAX_BOXES:
                raise CorruptMediaError("the MP4 file's boxes are compressed or nested too deep")
    if num_samples > len(data):
        raise CorruptMediaError(
            f"the MP4 file announces {num_samples} samples but has only {len(data)} bytes"
        )


def read_video_tracks(data: bytes) -> list[VideoTrack]:
    """Return the video tracks of an MP4 file, in file order."""
    found: list[VideoTrack] = []
    for kind, start, end in iterate_boxes(data, 0, len(data)):
        if kind != b"moov":
            continue
        movie: NDArray[np.float64] = np.eye(3)
        for child, first, last in iterate_boxes(data, start, end):
            if child == b"mvhd":
                movie = _matrix(data, first, last, version_0_at=36)
            elif child == b"trak":
                track = _read_track(data, first, last, movie)
                if track is not None:
                    found.append(track)
    return found


def _read_track(data: bytes, start: int, end: int, movie: NDArray[np.float64]) -> VideoTrack | None:
    boxes = _children(data, (start, end))
    if b"tkhd" not in boxes or b"mdia" not in boxes:
        return None
    media = _children(data, boxes[b"mdia"])
    handler = media.get(b"hdlr", (0, 0))[0]
    if data[handler + 8 : handler + 12] != b"vide":
        return None
    first, last = boxes[b"tkhd"]
    number_at = first + (20 if data[first : first + 1] == b"\x01" else 12)
    number = int.from_bytes(data[number_at : number_at + 4], "big")
    matrix = _matrix(data, first, last, version_0_at=40) @ movie
    information = _children(data, media.get(b"minf"))
    tables = _children(data, information.get(b"stbl"))
    width, height = _stored_size(data, tables.get(b"stsd"))
    edits = _children(data, boxes.get(b"edts"))
    return VideoTrack(
        number, width, height, matrix.reshape(9), tables, _num_edits(data, edits.get(b"elst"))
    )


def _children(data: bytes, span: tuple[int, int] | None) -> dict[bytes, tuple[int, int]]:
    if span is None:
        return {}
    return {kind: (first, last) for kind, first, last in iterate_boxes(data, *span)}


def _num_edits(data: bytes, span: tuple[int, int] | None) -> int:
    """Return how many pieces of media an edit list names; pauses do not count."""
    if span is None or span[0] + 8 > span[1]:
        return 0
    first, last = span
    layout = struct.Struct(">QqI" if data[first] == 1 else ">IiI")
    (count,) = struct.unpack_from(">I", data, first + 4)
    ends = min(first + 8 + count * layout.size, last - layout.size + 1)
    starts = range(first + 8, ends, layout.size)
    return sum(layout.unpack_from(data, at)[1] != -1 for at in starts)


def _stored_size(data: bytes, span: tuple[int, int] | None) -> tuple[int, int]:
    """Return the size in the first sample entry; (0, 0) if there is none."""
    if span is None or span[0] + 44 > span[1]:
        return 0, 0
    # stsd: 8 bytes of its own, 8 of the entry's header; the size is 24 bytes into the entry.
    width, height = struct.unpack_from(">2H", data, span[0] + 40)
    return width, height


def _matrix(data: bytes, first: int, last: int, *, version_0_at: int) -> NDArray[np.float64]:
    """Return the 3x3 matrix of an `mvhd` or `tkhd` box; the unit matrix if it is cut off.

    Version 1 of either box has 12 bytes more before it (64-bit times and duration).
    """
    version = data[first] if first < last else 0
    at = first + version_0_at + (12 if version == 1 else 0)
    if at + 36 > last:
        return np.eye(3)
    entries = np.array(struct.unpack_from(">9i", data, at), dtype=np.float64).reshape(3, 3)
    scaled: NDArray[np.float64] = entries / np.exp2(_FIXED_POINT)
    return scaled
