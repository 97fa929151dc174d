"""What clients' uuids stand for.

A cache entry is found by what its media is, never by what a client calls it. So a uuid that was
used twice, or is remembered longer or shorter than the entry, can lead to a miss and not to
another picture.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol

from lazydecode.cache.ring import LRUCache

MAX_NAMES: Final = 1 << 17
"""Some 50 MB, and more names than the largest usual cache has entries."""

CONTESTED: Final = ""
"""In the place of an identity: different media came under the name, so it stands for none."""


class Bindings(Protocol):
    """What names stand for, as `UuidBindings` says; threads share it."""

    def __len__(self) -> int:
        """Number of names."""
        ...

    def peek(self, name: str) -> str | None:
        """Return a name's identity or `CONTESTED`, None if it is unknown; changes nothing."""
        ...

    def bind(self, name: str, mm_hash: str, *, contest: bool) -> bool:
        """Let `name` stand for `mm_hash` if it stands for nothing yet; whether it does now."""
        ...

    def clear(self) -> None:
        """Forget all names."""
        ...


class UuidBindings:
    """Name -> identity of the media that came under it. Bounded; threads share it.

    A name is a uuid with all that tells its uses apart: tenant, model, options. The first media
    under a name stays its meaning until the name is forgotten, the least recently used first.

    The lock makes look-up and change one step in `bind`.

    Args:
        capacity: Most names that are remembered.
    """

    def __init__(self, capacity: int = MAX_NAMES) -> None:
        self._names: LRUCache[str] = LRUCache(capacity)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._names)

    def peek(self, name: str) -> str | None:
        """Return a name's identity or `CONTESTED`, None if it is unknown; changes nothing."""
        return self._names.peek(name)

    def get(self, name: str) -> str | None:
        """Return what `peek` does; the name is remembered longest from now on."""
        return self._names.get(name)

    def bind(self, name: str, mm_hash: str, *, contest: bool) -> bool:
        """Let `name` stand for `mm_hash` if it stands for nothing yet.

        Args:
            name: As above.
            mm_hash: Identity of media that came under it.
            contest: Whether the name stands for nothing any more if that is other media.

        Returns:
            Whether it stands for `mm_hash` now.
        """
        with self._lock:
            known = self._names.get(name)
            if known is None:
                return self._names.put(name, mm_hash, 1)
            if known != mm_hash and contest:
                self._names.put(name, CONTESTED, 1)
            return known == mm_hash

    def clear(self) -> None:
        """Forget all names."""
        with self._lock:
            self._names.clear()

    def snapshot(self) -> list[tuple[str, str]]:
        """Return all names with what they stand for, the next to be forgotten first."""
        with self._lock:
            return [(name, self._names.peek(name) or "") for name in self._names.keys_in_order()]
