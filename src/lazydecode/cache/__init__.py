"""Caches of processed items: one for the frontend alone, and the mirrored pair.

In: processed items by hash. Out: the same, or only what the engine does not hold.
May import: inputs, errors.
"""

from lazydecode.cache.base import (
    BaseMultiModalCache,
    BaseMultiModalProcessorCache,
    CachedItem,
    ProcessedItem,
    item_nbytes,
)
from lazydecode.cache.lru import (
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from lazydecode.cache.ring import CacheStats, LRUCache

__all__ = [
    "BaseMultiModalCache",
    "BaseMultiModalProcessorCache",
    "CacheStats",
    "CachedItem",
    "LRUCache",
    "MultiModalProcessorOnlyCache",
    "MultiModalProcessorSenderCache",
    "MultiModalReceiverCache",
    "ProcessedItem",
    "item_nbytes",
]
