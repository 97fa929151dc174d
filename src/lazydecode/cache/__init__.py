"""Caches of processed items: one for the frontend alone, and the mirrored pair.

In: processed items by hash. Out: the same, or only what the engine does not hold.
May import: inputs, plugins, errors.
"""

from lazydecode.cache.base import (
    BaseMultiModalCache,
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    CachedItem,
    ProcessedItem,
    item_nbytes,
)
from lazydecode.cache.bindings import CONTESTED, Bindings, UuidBindings
from lazydecode.cache.lru import (
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from lazydecode.cache.registry import PROCESSOR_CACHE_REGISTRY, ProcessorCaches
from lazydecode.cache.ring import CacheStats, LRUCache
from lazydecode.cache.view import ReadOnlyCacheView

__all__ = [
    "CONTESTED",
    "PROCESSOR_CACHE_REGISTRY",
    "BaseMultiModalCache",
    "BaseMultiModalProcessorCache",
    "BaseMultiModalReceiverCache",
    "Bindings",
    "CacheStats",
    "CachedItem",
    "LRUCache",
    "MultiModalProcessorOnlyCache",
    "MultiModalProcessorSenderCache",
    "MultiModalReceiverCache",
    "ProcessedItem",
    "ProcessorCaches",
    "ReadOnlyCacheView",
    "UuidBindings",
    "item_nbytes",
]
