"""Which packets the wanted frames need, and reading those and no others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import av.error
import numpy as np

from lazydecode.media.video_backends.frame_index import FrameIndex

_SEEK_DISTANCE: Final = 32
"""Packets that are passed over by reading them; further ones by seeking. A packet read takes
10 us, a seek and the refilled read buffer about 150."""


@dataclass(frozen=True, slots=True)
class PacketRun:
    """Packets [first, last] of the file, decoded in one go from a key frame on."""

    first: int
    last: int


class LostPositionError(Exception):
    """A seek landed behind its target, or nowhere that the index knows."""


def plan_runs(index: FrameIndex, wanted: Sequence[int]) -> list[PacketRun]:
    """Return the runs of packets to decode for the frames `wanted` (ascending).

    A run starts at the last key frame that is both stored and shown no later than the wanted
    frame. Stored alone is not enough: frames that follow an open group's key frame in the
    file but precede it on screen refer to the group before.
    """
    keys = np.flatnonzero(index.is_key)
    spans: list[tuple[int, int]] = []
    for number in wanted:
        position = int(index.display_order[number])
        key = int(np.searchsorted(keys, position, side="right")) - 1
        while key > 0 and index.pts[keys[key]] > index.pts[position]:
            key -= 1
        spans.append((int(keys[key]) if key >= 0 else 0, position))
    runs: list[PacketRun] = []
    for first, last in sorted(spans):
        if runs and first <= runs[-1].last:
            runs[-1] = PacketRun(runs[-1].first, max(last, runs[-1].last))
        else:
            runs.append(PacketRun(first, last))
    return runs


def read_runs(
    container: Any, stream: Any, index: FrameIndex, runs: Sequence[PacketRun], *, seek: bool
) -> Iterator[tuple[Any, bool]]:
    """Yield (packet, whether it ends its run) for the packets of `runs`, from the start of
    the container.

    Seeking flushes the decoder, so the caller drains it at the end of each run.

    Raises:
        LostPositionError: If a seek did not land at or before its run.
    """
    position = 0
    packets = _filled_packets(container, stream)
    for run in runs:
        if seek and run.first - position > _SEEK_DISTANCE:
            position, packets = _seek(container, stream, index, run.first)
        while position <= run.last:
            packet = next(packets, None)
            if packet is None:
                return
            if position >= run.first:
                yield packet, position == run.last
            position += 1


def _seek(container: Any, stream: Any, index: FrameIndex, target: int) -> tuple[int, Iterator[Any]]:
    try:
        container.seek(int(index.pts[target]), stream=stream)
    except (av.error.FFmpegError, OSError) as exc:
        raise LostPositionError from exc
    packets = _filled_packets(container, stream)
    landed = next(packets, None)
    position = None if landed is None else index.position_of_pts.get(landed.pts)
    if position is None or position > target:
        raise LostPositionError
    return position, itertools.chain([landed], packets)


def _filled_packets(container: Any, stream: Any) -> Iterator[Any]:
    return (packet for packet in container.demux(stream) if packet.size)
