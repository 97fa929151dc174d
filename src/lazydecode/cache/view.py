"""Looking into caches without leaving a trace."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from lazydecode.cache.base import BaseMultiModalProcessorCache, CachedItem, ProcessedItem
from lazydecode.cache.ring import CacheStats


class ReadOnlyCacheView(BaseMultiModalProcessorCache):
    """Finds what some caches hold; changes neither entries nor order nor statistics.

    For requests that only want to know something: a mirror must not hear of them, since the
    engine does not.

    Args:
        caches: The first one that holds an item gives it.
    """

    keeps_items = False

    def __init__(self, caches: Sequence[BaseMultiModalProcessorCache]) -> None:
        self._caches = tuple(caches)

    def peek_item(self, mm_hash: str) -> CachedItem | None:
        """Return what one of the caches holds."""
        for cache in self._caches:
            item = cache.peek_item(mm_hash)
            if item is not None:
                return item
        return None

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether `peek_item` finds the item."""
        return self.peek_item(mm_hash) is not None

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> CachedItem:
        """Return what is held, or `mm_item`, which is not stored."""
        held = self.peek_item(mm_hash)
        if held is not None:
            return held
        assert mm_item is not None, f"expected a cached item for {mm_hash!r}"
        return mm_item

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Does nothing."""

    def invalidate(self, mm_hashes: Sequence[str]) -> None:
        """Does nothing."""

    def clear_cache(self) -> None:
        """Does nothing."""

    def snapshot(self) -> list[str]:
        """Return the hashes of all caches, one cache after the other."""
        return [mm_hash for cache in self._caches for mm_hash in cache.snapshot()]

    def make_stats(self, *, delta: bool = False) -> CacheStats:
        """Return zeros: nothing is counted."""
        return CacheStats()

    def transaction(self) -> AbstractContextManager[None]:
        """Nothing is changed, so nothing is taken back."""
        return nullcontext()
