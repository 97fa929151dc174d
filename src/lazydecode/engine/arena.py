"""Memory that the front end writes tensors into and the engine reads them from, without a copy.

One anonymous memory file per engine process, inherited by it: it has no name that could be left
behind, and is gone when both processes are. The front end hands out extents; an extent is lent
until the engine's last tensor over it has died, wherever that was held (a running request, the
receiver cache), and is then reported back and used again.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from typing import Final

import numpy as np

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
"""Of every extent: a cache line, and more than any dtype needs."""
_TRIM_AFTER: Final = 256
"""Placements between two looks at what is written to no more: its pages are faulted in at most
once in so many, which costs less than a hundredth of what the placements do."""


class ExtentAllocator:
    """Which parts of `size` bytes are free. Lowest address first, so that warm pages are reused."""

    def __init__(self, size: int) -> None:
        self._starts: list[int] = [0] if size else []
        """Starts of free extents, sorted; no two touch."""
        self._free: dict[int, int] = {0: size} if size else {}
        self._used: dict[int, int] = {}
        self._peak = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        return sum(self._used.values())

    def allocate(self, size: int) -> int | None:
        """Return the start of an extent of at least `size` bytes; None if there is none."""
        size = max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
        for position, start in enumerate(self._starts):
            available = self._free[start]
            if available < size:
                continue
            del self._free[start]
            if available == size:
                del self._starts[position]
            else:
                self._starts[position] = start + size
                self._free[start + size] = available - size
            self._used[start] = size
            self._peak = max(self._peak, start + size)
            return start
        return None

    def take_peak(self) -> int:
        """Return where the highest extent ended of all that were out since the last call."""
        peak = self._peak
        self._peak = max((start + size for start, size in self._used.items()), default=0)
        return peak

    def free(self, start: int) -> None:
        """Take an extent back and join it with its free neighbours.

        Raises:
            KeyError: If no extent was handed out there.
        """
        size = self._used.pop(start)
        position = bisect_left(self._starts, start)
        if position < len(self._starts) and self._starts[position] == start + size:
            size += self._free.pop(self._starts.pop(position))
        if position > 0:
            before = self._starts[position - 1]
            if before + self._free[before] == start:
                self._free[before] += size
                return
        self._starts.insert(position, start)
        self._free[start] = size


class Notices:
    """Warnings that are logged once, however many arenas have a reason. Threads may share it."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, message: str, *args: object) -> None:
        """Log `message`, unless it was."""
        with self._lock:
            is_new = message not in self._said
            self._said.add(message)
        if is_new:
            logger.warning(message, *args)


class SharedArena:
    """The writer's end.

    Args:
        fd: Descriptor of the memory; closed with the arena.
        size: Its bytes.
        peer: Who reads, for the log.
        notices: Says what there is to say; None: once for this arena.

    One lock covers the extents. Another is held while bytes are written, so that `close` cannot
    give the descriptor's number to another file meanwhile; the first is taken under it, not the
    other way round.
    """

    def __init__(
        self, fd: int, size: int, *, peer: str = "the engine", notices: Notices | None = None
    ) -> None:
        self.fd = fd
        self.size = size
        self._peer = peer
        self._notices = notices or Notices()
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._extents = ExtentAllocator(size)
        self._num_placed = 0
        self._is_broken = False
        self._is_closed = False

    @classmethod
    def create(
        cls, size: int, *, peer: str = "the engine", notices: Notices | None = None
    ) -> SharedArena | None:
        """Return an arena of `size` bytes, which take memory as they are written.

        None if this system has no anonymous memory files; tensors then go through the socket.
        """
        if not hasattr(os, "memfd_create"):
            return None
        try:
            fd = os.memfd_create("lazydecode")
            try:
                os.ftruncate(fd, size)
            except OSError:
                os.close(fd)
                raise
        except OSError as exc:
            (notices or Notices()).warn(
                "no shared memory for %s (%s); tensors use the socket (said once)", peer, exc
            )
            return None
        return cls(fd, size, peer=peer, notices=notices)

    @property
    def lent_bytes(self) -> int:
        """Bytes that the engine still uses, or that are on their way."""
        with self._lock:
            return self._extents.used_bytes

    def place(self, data: memoryview) -> int | None:
        """Copy `data` in and return its offset; None if there is no room."""
        with self._lock:
            offset = None if self._is_broken else self._extents.allocate(len(data))
            is_full = offset is None and not self._is_broken
        if is_full:
            self._notices.warn(
                "the %d MiB of memory shared with %s are full; what does not fit goes "
                "through the socket (said once)",
                self.size >> 20,
                self._peer,
            )
        if offset is None:
            return None
        try:
            with self._write_lock:
                if self._is_broken:
                    return None
                written = 0
                # Not into a mapping: there, memory that the system cannot give is a SIGBUS.
                while written < len(data):
                    written += os.pwrite(self.fd, data[written:], offset + written)
                self._num_placed += 1
                if self._num_placed % _TRIM_AFTER == 0:
                    self._trim()
        except OSError as exc:
            self._notices.warn(
                "no memory left to share with %s (%s); using the socket (said once)",
                self._peer,
                exc,
            )
            self._is_broken = True
            self.release([offset])
            return None
        return offset

    def release(self, offsets: list[int]) -> None:
        """Take extents back that the engine no longer uses."""
        with self._lock:
            for offset in offsets:
                self._extents.free(offset)

    def _trim(self) -> None:
        """Give back the pages above all extents of late; without this one peak is kept for ever.

        Called while nothing is written. Nobody reads there: what is lent is below.
        """
        with self._lock:
            end = -(-self._extents.take_peak() // mmap.PAGESIZE) * mmap.PAGESIZE
            if end < self.size:
                os.ftruncate(self.fd, end)
                os.ftruncate(self.fd, self.size)

    def close(self) -> None:
        """Let go of the memory; the engine's mapping keeps it until that process ends."""
        with self._write_lock:
            if not self._is_closed:
                self._is_broken = self._is_closed = True
                os.close(self.fd)


class ArenaView:
    """The engine's end: arrays over the shared memory, and which of them have died.

    Args:
        fd: Descriptor of the memory; closed here, whatever happens.
        size: Its bytes.

    Raises:
        OSError: If it cannot be mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        try:
            self._memory = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        finally:
            os.close(fd)
        # Filled by finalizers, which run anywhere, also inside the collector: no lock, no I/O.
        self._released: deque[int] = deque()

    def view(self, offset: int, size: int) -> memoryview:
        """Return the bytes of an extent; it is lent until the last user of them has died."""
        array = self._memory[offset : offset + size]
        weakref.finalize(array, self._released.append, offset).atexit = False
        return array.data

    def take_released(self) -> list[int]:
        """Return the extents that died since the last call."""
        released = []
        while self._released:
            released.append(self._released.popleft())
        return released
