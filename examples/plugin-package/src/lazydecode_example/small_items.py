"""A processor cache that one long video cannot empty: large items are not kept.

The front end's cache and the engine's decide alike, because both go by the size of the item.
"""

from __future__ import annotations

from typing import Final

from lazydecode.cache import (
    CachedItem,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ProcessedItem,
    ProcessorCaches,
    item_nbytes,
)
from lazydecode.inputs import MultiModalKwargsItem

_PARTS: Final = 8
"""An item may take this part of the cache, or less."""


class SmallItemsRenderCache(MultiModalProcessorOnlyCache):
    """The cache of a server without an engine."""

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> CachedItem:
        """As the base class; a large item is returned without being stored."""
        if mm_item is not None and _is_large(mm_item[0], self.capacity_bytes):
            return mm_item
        return super().get_and_update_item(mm_item, mm_hash)


class SmallItemsSenderCache(MultiModalProcessorSenderCache):
    """What the front end knows of the engine's cache."""

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> CachedItem:
        """As the base class; a large item is returned without being stored."""
        if mm_item is not None and _is_large(mm_item[0], self.capacity_bytes):
            return mm_item
        return super().get_and_update_item(mm_item, mm_hash)


class SmallItemsReceiverCache(MultiModalReceiverCache):
    """The engine's cache."""

    def get_and_update_item(
        self, mm_item: MultiModalKwargsItem | None, mm_hash: str
    ) -> MultiModalKwargsItem:
        """As the base class; a large item is returned without being stored."""
        if mm_item is not None and _is_large(mm_item, self.capacity_bytes):
            return mm_item
        return super().get_and_update_item(mm_item, mm_hash)


def _is_large(item: MultiModalKwargsItem, capacity_bytes: int) -> bool:
    return item_nbytes(item) > capacity_bytes // _PARTS


CACHES = ProcessorCaches(
    render=SmallItemsRenderCache,
    sender=SmallItemsSenderCache,
    receiver=SmallItemsReceiverCache,
)
