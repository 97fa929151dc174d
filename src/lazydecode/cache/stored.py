"""A processor cache with a store below it: what the cache lacks may have been made elsewhere.

Files are read before a request is looked up, on threads that may block, and never by the cache
itself: it only asks what was read. Its mirror need not know. An item that comes from the store is
to the engine like one that was just processed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from lazydecode.cache.base import (
    BaseMultiModalProcessorCache,
    CachedItem,
    ProcessedItem,
    item_nbytes,
)
from lazydecode.cache.ring import CacheStats
from lazydecode.cache.store import ItemStore
from lazydecode.limits import MIB
from lazydecode.media.executor import LazyThreadPool

logger = logging.getLogger(__name__)

_MAX_PENDING_BYTES: Final = 256 * MIB
"""Results that wait to be written; what comes beyond is left out."""


class StoredResults:
    """What requests borrow from a store, and what it is given. Threads share it.

    The lock covers the two tables; files are read and written outside it.
    """

    def __init__(self, store: ItemStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._borrowed: dict[str, tuple[ProcessedItem, int]] = {}
        """Hash -> item, and how many requests have it."""
        self._pending: dict[str, int] = {}
        """Hash -> bytes, of what is to be written."""
        self._writer = LazyThreadPool(1, "lazydecode-store")
        self._is_broken = False

    def get(self, mm_hash: str) -> ProcessedItem | None:
        """Return an item that a request has borrowed."""
        borrowed = self._borrowed.get(mm_hash)
        return None if borrowed is None else borrowed[0]

    def keep(self, mm_hash: str, item: ProcessedItem) -> None:
        """Write an item to the store, later."""
        nbytes = item_nbytes(item[0])
        with self._lock:
            if self._is_broken or mm_hash in self._pending:
                return
            if sum(self._pending.values()) + nbytes > _MAX_PENDING_BYTES:
                return
            self._pending[mm_hash] = nbytes
        self._writer.submit(self._write, mm_hash, item)

    def borrow(self) -> Loan:
        """Return what holds items for one request, empty."""
        return Loan(self)

    def clear(self) -> None:
        """Forget everything, for all who share the store."""
        self._store.clear()

    def close(self) -> None:
        """Return when everything is written."""
        self._writer.shutdown()

    def _write(self, mm_hash: str, item: ProcessedItem) -> None:
        try:
            self._store.put(mm_hash, item)
        except Exception:
            # Wide: pickling raises what it likes. It is about the model's kind of updates.
            logger.warning("the results of this model cannot be stored", exc_info=True)
            self._is_broken = True
        finally:
            with self._lock:
                del self._pending[mm_hash]

    def _load(self, mm_hash: str) -> bool:
        """Read an item from the store for one more request; False if it has none."""
        with self._lock:
            if self._lend(mm_hash):
                return True
        item = self._store.get(mm_hash)
        if item is None:
            return False
        with self._lock:
            if not self._lend(mm_hash):  # another request may have been as fast
                self._borrowed[mm_hash] = item, 1
        return True

    def _lend(self, mm_hash: str) -> bool:
        borrowed = self._borrowed.get(mm_hash)
        if borrowed is None:
            return False
        self._borrowed[mm_hash] = borrowed[0], borrowed[1] + 1
        return True

    def _return(self, mm_hashes: Iterable[str]) -> None:
        with self._lock:
            for mm_hash in mm_hashes:
                item, count = self._borrowed.pop(mm_hash)
                if count > 1:
                    self._borrowed[mm_hash] = item, count - 1


class Loan:
    """Items that one request needs from the store while it runs."""

    def __init__(self, results: StoredResults) -> None:
        self._results = results
        self._hashes: list[str] = []

    def load(self, mm_hashes: Iterable[str]) -> None:
        """Read those that the store has; blocks."""
        for mm_hash in mm_hashes:
            if mm_hash not in self._hashes and self._results._load(mm_hash):
                self._hashes.append(mm_hash)

    def end(self) -> None:
        """Let go of them."""
        hashes, self._hashes = self._hashes, []
        self._results._return(hashes)


class StoredCache(BaseMultiModalProcessorCache):
    """A cache whose misses are served from what was borrowed, and whose new items are stored.

    Args:
        first: The cache itself; its mirror, if it has one, sees what it saw without a store.
        results: The store.
    """

    def __init__(self, first: BaseMultiModalProcessorCache, results: StoredResults) -> None:
        self.first = first
        self.results = results

    @property
    def used_bytes(self) -> int:
        """Summed size of all entries of the cache itself."""
        return self.first.used_bytes

    def __len__(self) -> int:
        return len(self.first)

    def peek_item(self, mm_hash: str) -> CachedItem | None:
        """Return what a hit would, without a trace."""
        return self.first.peek_item(mm_hash) or self.results.get(mm_hash)

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the item is cached, or borrowed."""
        return self.first.is_cached_item(mm_hash) or self.results.get(mm_hash) is not None

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> CachedItem:
        """As the cache itself; what it lacks is given to it if it is borrowed."""
        if not self.first.is_cached_item(mm_hash):
            if mm_item is None:
                mm_item = self.results.get(mm_hash)
            else:
                self.results.keep(mm_hash, mm_item)
        return self.first.get_and_update_item(mm_item, mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """As the cache itself."""
        self.first.touch_sender_cache_item(mm_hash)

    def release_sender_touches(self) -> None:
        """As the cache itself."""
        self.first.release_sender_touches()

    def transaction(self) -> AbstractContextManager[None]:
        """As the cache itself: what was stored stays, as it is true in any case."""
        return self.first.transaction()

    def clear_cache(self) -> None:
        """Empty the cache itself; the store belongs to others too."""
        self.first.clear_cache()

    def close(self) -> None:
        """As the cache itself."""
        self.first.close()

    def invalidate(self, mm_hashes: Sequence[str]) -> None:
        """As the cache itself."""
        self.first.invalidate(mm_hashes)

    def snapshot(self) -> list[str]:
        """Return the hashes of the cache itself."""
        return self.first.snapshot()

    def make_stats(self, *, delta: bool = False) -> CacheStats:
        """As the cache itself."""
        return self.first.make_stats(delta=delta)
