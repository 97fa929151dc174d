"""What clients' uuids stand for, known to several processes at once.

A table in memory that a process shares with those that it forks. Who binds a name holds a lock of
the whole table, which the kernel takes back from a process that dies; who only asks waits for
nobody: an entry that changes meanwhile does not fit its checksum and is read again.

    table    number of names (8 bytes), clock (8), generation (4); then buckets
    bucket   8 entries; a name stands in the bucket that its digest says, or in none
    entry    generation (4): another one than the table's is an empty entry; checksum (4);
             length of the value (2); last use by the clock (8); digest of the name (32); value
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from lazydecode.cache.bindings import CONTESTED, MAX_NAMES

_MAX_VALUE_BYTES: Final = 128
_HEAD: Final = struct.Struct("<QQI4x")
_ENTRY: Final = struct.Struct(f"<IIH6xQ32s{_MAX_VALUE_BYTES}s")
_GENERATION: Final = struct.Struct("<I")
_WAYS: Final = 8
_READS: Final = 8
"""How often an entry that changes is read; then its name counts as unknown."""


class _Entry(NamedTuple):
    generation: int
    checksum: int
    length: int
    used: int
    digest: bytes
    stored: bytes

    @property
    def value(self) -> bytes:
        return self.stored[: self.length]


class SharedUuidBindings:
    """As `UuidBindings`, for the process that makes it and all that are forked from it.

    A new name takes the place of the one in its bucket that was bound longest ago, so that a
    name may be forgotten before the whole table is full.

    Args:
        capacity: Most names that are remembered, rounded up to whole buckets; 184 bytes each
            from the time they are used.
    """

    def __init__(self, capacity: int = MAX_NAMES) -> None:
        self._num_buckets = max(1, -(-capacity // _WAYS))
        self._memory = mmap.mmap(-1, _HEAD.size + self._num_buckets * _WAYS * _ENTRY.size)
        _HEAD.pack_into(self._memory, 0, 0, 0, 1)  # fresh memory is zeros: empty entries
        # Record locks belong to a process and end with it; its threads need one besides.
        self._lock_file = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the table
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(_HEAD.unpack_from(self._memory)[0])

    def peek(self, name: str) -> str | None:
        """Return a name's identity or `CONTESTED`, None if it is unknown; changes nothing."""
        digest = _digest(name)
        for offset in self._offsets(digest):
            for _ in range(_READS):
                entry = self._entry(offset)
                if entry.generation != self._generation or entry.digest != digest:
                    break
                if entry.checksum == _checksum(digest, entry.value):
                    return entry.value.decode()
        return None

    def bind(self, name: str, mm_hash: str, *, contest: bool) -> bool:
        """As `UuidBindings.bind`: one step, for all processes."""
        digest, value = _digest(name), mm_hash.encode()
        assert len(value) <= _MAX_VALUE_BYTES, "an identity is a hex digest"
        with self._locked():
            count, clock, generation = _HEAD.unpack_from(self._memory)
            entries = {offset: self._entry(offset) for offset in self._offsets(digest)}
            empty = [at for at, entry in entries.items() if entry.generation != generation]
            own = [
                at for at, entry in entries.items() if at not in empty and entry.digest == digest
            ]
            known = entries[own[0]].value if own else value
            if own:
                place = own[0]
            elif empty:
                place = empty[0]
            else:
                place = min(entries, key=lambda at: entries[at].used)
            stands_for = known if known == value or not contest else CONTESTED.encode()
            self._write(place, generation, clock + 1, digest, stands_for)
            is_new = not own and bool(empty)
            _HEAD.pack_into(self._memory, 0, count + is_new, clock + 1, generation)
            return known == value

    def clear(self) -> None:
        """Forget all names, in all processes."""
        with self._locked():
            _, clock, generation = _HEAD.unpack_from(self._memory)
            _HEAD.pack_into(self._memory, 0, 0, clock, generation + 1)

    def close(self) -> None:
        """Let go of this process's view."""
        self._lock_file.close()
        self._memory.close()

    # -- the table

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    @property
    def _generation(self) -> int:
        return int(_HEAD.unpack_from(self._memory)[2])

    def _offsets(self, digest: bytes) -> range:
        bucket = int.from_bytes(digest[:8], "little") % self._num_buckets
        start = _HEAD.size + bucket * _WAYS * _ENTRY.size
        return range(start, start + _WAYS * _ENTRY.size, _ENTRY.size)

    def _entry(self, offset: int) -> _Entry:
        return _Entry(*_ENTRY.unpack_from(self._memory, offset))

    def _write(self, offset: int, generation: int, used: int, digest: bytes, value: bytes) -> None:
        # Empty until it is whole: the process may be killed between any two bytes.
        _GENERATION.pack_into(self._memory, offset, 0)
        checksum = _checksum(digest, value)
        body = _ENTRY.pack(0, checksum, len(value), used, digest, value)
        self._memory[offset : offset + _ENTRY.size] = body
        _GENERATION.pack_into(self._memory, offset, generation)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _checksum(digest: bytes, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(digest))
