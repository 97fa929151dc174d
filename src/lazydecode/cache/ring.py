"""An LRU order over sized entries that can take back what was done to it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

_V = TypeVar("_V")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """How often a cache was asked, and how often it had the answer."""

    hits: int = 0
    total: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of hits; 0 before the first question."""
        return self.hits / self.total if self.total else 0.0

    def __sub__(self, other: CacheStats) -> CacheStats:
        return CacheStats(self.hits - other.hits, self.total - other.total)


class _Node(Generic[_V]):
    """An entry between its older and its younger neighbour."""

    __slots__ = ("key", "older", "size", "value", "younger")

    key: str
    value: _V
    size: int
    older: _Node[_V]
    younger: _Node[_V]


class LRUCache(Generic[_V]):
    """Entries by key, at most `capacity` in summed size; the least recently used goes first.

    The order is a ring of nodes, not an `OrderedDict`, because a transaction has to put an
    entry back between its former neighbours. The lock covers each operation; a transaction is
    for the one thread that changes the cache, while others may only look up.

    Args:
        capacity: Most that the sizes of all entries may sum up to.
        warn_oversized: Whether the first entry that is larger than the cache is logged.
    """

    def __init__(self, capacity: int, *, warn_oversized: bool = True) -> None:
        if capacity < 0:
            raise ValueError(f"capacity must not be negative, got {capacity}")
        self.capacity = capacity
        self.used = 0
        self._nodes: dict[str, _Node[_V]] = {}
        self._ring: _Node[_V] = _Node()
        self._ring.older = self._ring.younger = self._ring
        self._lock = threading.RLock()
        self._undo: list[Callable[[], None]] | None = None
        self._hits = 0
        self._total = 0
        self._last_stats = CacheStats()
        self._warns_oversized = warn_oversized

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def peek(self, key: str) -> _V | None:
        """Return an entry without making it younger and without counting."""
        node = self._nodes.get(key)
        return None if node is None else node.value

    def get(self, key: str) -> _V | None:
        """Return an entry and make it the youngest; counts a hit or a miss."""
        with self._lock:
            self._total += 1
            node = self._nodes.get(key)
            if node is None:
                return None
            self._hits += 1
            self._make_youngest(node)
            return node.value

    def touch(self, key: str) -> None:
        """Make an entry the youngest; an absent key is ignored."""
        with self._lock:
            node = self._nodes.get(key)
            if node is not None:
                self._make_youngest(node)

    def put(self, key: str, value: _V, size: int) -> bool:
        """Store a new entry as the youngest, evicting the oldest as needed.

        Returns:
            False, with nothing evicted, if the entry alone is larger than the cache.
        """
        with self._lock:
            self.pop(key)
            if size > self.capacity:
                if self._warns_oversized:
                    self._warns_oversized = False
                    logger.warning(
                        "An item of %d bytes is larger than the whole cache (%d bytes) and is "
                        "not kept; further such items are not reported",
                        size,
                        self.capacity,
                    )
                return False
            while self.used + size > self.capacity:
                self._remove(self._ring.younger)
            node: _Node[_V] = _Node()
            node.key, node.value, node.size = key, value, size
            self._insert(node, self._ring.older)
            self._note(lambda: self._delete(node))
            return True

    def pop(self, key: str) -> _V | None:
        """Drop an entry and return it; None if it is absent."""
        with self._lock:
            node = self._nodes.get(key)
            if node is None:
                return None
            self._remove(node)
            return node.value

    def clear(self) -> None:
        """Drop everything. Not part of a transaction: the statistics stay."""
        with self._lock:
            if self._undo is not None:
                raise RuntimeError("a cache cannot be cleared within a transaction")
            # Neighbours hold each other: without cutting them apart, only the garbage collector
            # would free the values.
            for node in self._nodes.values():
                node.older = node.younger = self._ring
            self._nodes.clear()
            self._ring.older = self._ring.younger = self._ring
            self.used = 0

    def keys_in_order(self) -> list[str]:
        """Return all keys, the next to be evicted first."""
        with self._lock:
            keys = []
            node = self._ring.younger
            while node is not self._ring:
                keys.append(node.key)
                node = node.younger
            return keys

    def stats(self, *, delta: bool = False) -> CacheStats:
        """Return the counts, with `delta` those since the last call with `delta`."""
        with self._lock:
            stats = CacheStats(self._hits, self._total)
            if not delta:
                return stats
            since, self._last_stats = stats - self._last_stats, stats
            return since

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """If the body raises, entries, sizes and order are as they were before it.

        Counts of hits stay. A transaction within a transaction is part of the outer one.
        """
        if self._undo is not None:
            yield
            return
        with self._lock:
            self._undo = []
        try:
            yield
        except BaseException:
            with self._lock:
                undo, self._undo = self._undo, None
                for step in reversed(undo):
                    step()
            raise
        else:
            with self._lock:
                self._undo = None

    # -- the ring; `_ring.younger` is the oldest entry, `_ring.older` the youngest

    def _note(self, undo: Callable[[], None]) -> None:
        if self._undo is not None:
            self._undo.append(undo)

    def _make_youngest(self, node: _Node[_V]) -> None:
        if self._ring.older is node:
            return
        older = node.older
        self._move_behind(node, self._ring.older)
        self._note(lambda: self._move_behind(node, older))

    def _remove(self, node: _Node[_V]) -> None:
        older = node.older
        self._delete(node)
        self._note(lambda: self._insert(node, older))

    def _insert(self, node: _Node[_V], older: _Node[_V]) -> None:
        self._attach(node, older)
        self._nodes[node.key] = node
        self.used += node.size

    def _delete(self, node: _Node[_V]) -> None:
        self._detach(node)
        del self._nodes[node.key]
        self.used -= node.size

    def _move_behind(self, node: _Node[_V], older: _Node[_V]) -> None:
        # The dictionary keeps the entry, so that a look-up without the lock never misses it.
        self._detach(node)
        self._attach(node, older)

    @staticmethod
    def _attach(node: _Node[_V], older: _Node[_V]) -> None:
        younger = older.younger
        node.older, node.younger = older, younger
        older.younger = younger.older = node

    @staticmethod
    def _detach(node: _Node[_V]) -> None:
        node.older.younger, node.younger.older = node.younger, node.older
