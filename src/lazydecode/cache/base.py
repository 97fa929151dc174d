"""The protocol of the mirrored caches of processed items.

The frontend (P0) asks its own cache what the engine (P1) holds, instead of asking the engine.
That is right as long as both do the same to their caches in the same order:

    P0, for each request                         P1, for the same request
    ------------------------------------------   ------------------------------------------
    is_cached: any time, changes nothing
    touch_sender_cache_item, for every hash      touch_receiver_cache_item, for every hash
    get_and_update_item, item by item            get_and_update_item, item by item
    send (None for a hit)                        ...

Both count sizes with `item_nbytes`. A request that fails in P0 after its updates takes them
back (`transaction`), so that P1 never needs to hear of it. If the two still come apart, P1
raises `CacheMissError` with all hashes it lacks; P0 calls `invalidate` with them and processes
the request again. That makes the request whole: what P1 then holds beyond P0 is older than all
that P0 believes in, and goes first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from lazydecode.cache.ring import CacheStats, LRUCache
from lazydecode.inputs import MultiModalKwargsItem

GIB: Final = 1024**3

ENTRY_NBYTES: Final = 256
"""Added to every entry, so that items without tensors do not pile up for nothing."""

ItemUpdates: TypeAlias = Sequence[Any]
"""What the prompt needs for one item; opaque here."""
ProcessedItem: TypeAlias = "tuple[MultiModalKwargsItem, ItemUpdates]"
"""Tensors and prompt updates of one processed item."""
CachedItem: TypeAlias = "tuple[MultiModalKwargsItem | None, ItemUpdates]"
"""The same as it comes out of the cache; without tensors if the engine holds them."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_V = TypeVar("_V")


def item_nbytes(item: MultiModalKwargsItem) -> int:
    """Return the size of an item in a cache: the same unit on both sides."""
    return item.nbytes + ENTRY_NBYTES


class CacheConfig(Protocol):
    """The part of a multimodal configuration that caches read."""

    @property
    def mm_processor_cache_gb(self) -> float:
        """Size of the processor cache in GiB."""
        ...


class HasCacheConfig(Protocol):
    """A model configuration, as far as caches read it."""

    def get_multimodal_config(self) -> CacheConfig:
        """Return the multimodal configuration."""
        ...


def configured_capacity(model_config: HasCacheConfig) -> int:
    """Return the configured size of the processor cache in bytes."""
    return int(model_config.get_multimodal_config().mm_processor_cache_gb * GIB)


class BaseMultiModalCache(ABC, Generic[_In, _Out]):
    """What both sides of the mirror have in common.

    Args:
        `_In`: What a caller gives with a hash, or None if it counts on a hit.
        `_Out`: What a caller gets.
    """

    @abstractmethod
    def get_and_update_item(self, mm_item: _In | None, mm_hash: str) -> _Out:
        """Return the entry, storing `mm_item` if it was absent, and make it the youngest.

        Must happen in the same order on both sides.
        """

    def get_and_update(
        self, mm_items: Sequence[_In | None], mm_hashes: Sequence[str]
    ) -> list[_Out]:
        """`get_and_update_item`, one after the other."""
        return [
            self.get_and_update_item(item, mm_hash)
            for item, mm_hash in zip(mm_items, mm_hashes, strict=True)
        ]

    @abstractmethod
    def clear_cache(self) -> None:
        """Forget everything; the other side must do so too."""

    @abstractmethod
    def snapshot(self) -> list[str]:
        """Return all hashes, the next to be evicted first."""

    @abstractmethod
    def invalidate(self, mm_hashes: Sequence[str]) -> None:
        """Forget these hashes; absent ones are ignored."""

    @abstractmethod
    def make_stats(self, *, delta: bool = False) -> CacheStats:
        """Return hits and total, with `delta` since the last call with `delta`.

        `get_and_update_item` counts; asking whether something is cached does not.
        """

    def __len__(self) -> int:
        return len(self.snapshot())

    @property
    def used_bytes(self) -> int:
        """Summed size of all entries; 0 if the cache does not count it."""
        return 0

    def close(self) -> None:
        """Let go of whatever the cache holds outside this process."""
        self.clear_cache()


class BaseMultiModalProcessorCache(BaseMultiModalCache[ProcessedItem, CachedItem]):
    """The side that the processor talks to."""

    keeps_items: ClassVar[bool] = True
    """Whether what goes in can come out later."""

    def peek_item(self, mm_hash: str) -> CachedItem | None:
        """Return what a hit would, with order and statistics as they are; any thread may ask.

        None if the item is not cached, or, as by default, cannot be had without a trace.
        """
        return None

    @abstractmethod
    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the item is cached. Changes no order, counts nothing, any thread may ask."""

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """`is_cached_item` for each."""
        return [self.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    @abstractmethod
    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Make the item the youngest; an absent one is ignored."""

    def release_sender_touches(self) -> None:
        """End what the touches of a request protect. LRU caches protect by order alone."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """If the body raises, contents and order are as they were before it."""


class BaseMultiModalReceiverCache(BaseMultiModalCache[MultiModalKwargsItem, MultiModalKwargsItem]):
    """The side in the engine's process, which keeps the tensors.

    `get_and_update_item` raises `CacheMissError` if it gets no tensors and has none.
    """

    @abstractmethod
    def touch_receiver_cache_item(self, mm_hash: str) -> None:
        """Make the item the youngest; an absent one is ignored."""


class LRUBackedCache(BaseMultiModalCache[_In, _Out], Generic[_V, _In, _Out]):
    """The parts that every cache over an `LRUCache` shares.

    Args:
        model_config: Where the size is configured.
        capacity_bytes: The size itself, instead.
    """

    def __init__(
        self, model_config: HasCacheConfig | None = None, *, capacity_bytes: int | None = None
    ) -> None:
        if capacity_bytes is None:
            if model_config is None:
                raise TypeError("a cache needs a model_config or capacity_bytes")
            capacity_bytes = configured_capacity(model_config)
        self._lru: LRUCache[_V] = LRUCache(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Summed size of all entries."""
        return self._lru.used

    @property
    def capacity_bytes(self) -> int:
        """Most that the entries may sum up to."""
        return self._lru.capacity

    def __len__(self) -> int:
        return len(self._lru)

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the item is cached."""
        return mm_hash in self._lru

    def clear_cache(self) -> None:
        """Forget everything."""
        self._lru.clear()

    def snapshot(self) -> list[str]:
        """Return all hashes, the next to be evicted first."""
        return self._lru.keys_in_order()

    def invalidate(self, mm_hashes: Sequence[str]) -> None:
        """Forget these hashes."""
        for mm_hash in mm_hashes:
            self._lru.pop(mm_hash)

    def make_stats(self, *, delta: bool = False) -> CacheStats:
        """Return hits and total."""
        return self._lru.stats(delta=delta)
