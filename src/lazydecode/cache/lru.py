"""LRU caches: one for a frontend whose engine holds no items, and the mirrored pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from lazydecode.cache.base import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    CachedItem,
    ItemUpdates,
    LRUBackedCache,
    ProcessedItem,
    item_nbytes,
)
from lazydecode.errors import CacheMissError
from lazydecode.inputs import MultiModalKwargsItem


class MultiModalProcessorOnlyCache(
    LRUBackedCache[ProcessedItem, ProcessedItem, CachedItem], BaseMultiModalProcessorCache
):
    """Keeps tensors and prompt updates; a hit returns both."""

    def peek_item(self, mm_hash: str) -> CachedItem | None:
        """Return the stored item, and leave no trace."""
        return self._lru.peek(mm_hash)

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> CachedItem:
        """Return the stored item, or store and return `mm_item`.

        An item that is larger than the whole cache is returned without being stored.
        """
        cached = self._lru.get(mm_hash)
        if cached is not None:
            return cached
        assert mm_item is not None, f"expected a cached item for {mm_hash!r}"
        self._lru.put(mm_hash, mm_item, item_nbytes(mm_item[0]))
        return mm_item

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Make the item the youngest."""
        self._lru.touch(mm_hash)

    def transaction(self) -> AbstractContextManager[None]:
        """If the body raises, contents and order are as they were before it."""
        return self._lru.transaction()


class MultiModalProcessorSenderCache(
    LRUBackedCache[ItemUpdates, ProcessedItem, CachedItem], BaseMultiModalProcessorCache
):
    """P0: keeps prompt updates and counts the size of the tensors that P1 keeps."""

    def peek_item(self, mm_hash: str) -> CachedItem | None:
        """Return `(None, updates)` if P1 holds the item, and leave no trace."""
        updates = self._lru.peek(mm_hash)
        return None if updates is None else (None, updates)

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> CachedItem:
        """Return `(None, updates)` on a hit; store and return `mm_item` on a miss."""
        updates = self._lru.get(mm_hash)
        if updates is not None:
            return None, updates
        assert mm_item is not None, f"expected a cached item for {mm_hash!r}"
        kwargs, updates = mm_item
        self._lru.put(mm_hash, updates, item_nbytes(kwargs))
        return mm_item

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Make the item the youngest."""
        self._lru.touch(mm_hash)

    def transaction(self) -> AbstractContextManager[None]:
        """If the body raises, contents and order are as they were before it."""
        return self._lru.transaction()


class MultiModalReceiverCache(
    LRUBackedCache[MultiModalKwargsItem, MultiModalKwargsItem, MultiModalKwargsItem],
    BaseMultiModalReceiverCache,
):
    """P1: keeps the tensors."""

    def get_and_update_item(
        self, mm_item: MultiModalKwargsItem | None, mm_hash: str
    ) -> MultiModalKwargsItem:
        """Return the stored item, or store and return `mm_item`.

        Raises:
            CacheMissError: If P0 sent no tensors and they are not here.
        """
        cached = self._lru.get(mm_hash)
        if cached is not None:
            return cached
        if mm_item is None:
            raise CacheMissError([mm_hash])
        self._lru.put(mm_hash, mm_item, item_nbytes(mm_item))
        return mm_item

    def touch_receiver_cache_item(self, mm_hash: str) -> None:
        """Make the item the youngest; an absent one is ignored."""
        self._lru.touch(mm_hash)

    def get_and_update_request(
        self,
        mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem | None]],
        mm_hashes: Mapping[str, Sequence[str]],
    ) -> dict[str, list[MultiModalKwargsItem]]:
        """Do for one request what P0 did for it; return all tensors.

        Raises:
            CacheMissError: With every hash of the request that is missing, so that P0 can
                repair the request in one go. What came with tensors is stored all the same.
        """
        for hashes in mm_hashes.values():
            for mm_hash in hashes:
                self.touch_receiver_cache_item(mm_hash)
        missing: dict[str, None] = {}
        received: dict[str, list[MultiModalKwargsItem]] = {}
        for modality, hashes in mm_hashes.items():
            items = received[modality] = []
            for item, mm_hash in zip(mm_kwargs[modality], hashes, strict=True):
                try:
                    items.append(self.get_and_update_item(item, mm_hash))
                except CacheMissError as exc:
                    missing.update(dict.fromkeys(exc.hashes))
        if missing:
            raise CacheMissError(list(missing))
        return received
