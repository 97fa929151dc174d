"""What processing an item gives, and where results wait that no cache has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lazydecode.cache import LRUCache, item_nbytes
from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.limits import MIB

WARM_OUTPUT_NBYTES: Final = 256 * MIB


@dataclass(frozen=True, slots=True)
class ItemOutput:
    """The result of processing one item: tensors, and what its prompt needs."""

    kwargs: MultiModalKwargsItem
    updates: Sequence[Any]


class WarmOutputs:
    """Results that were made but not committed to a cache: their request failed or went away.

    The mirrored caches must not learn of an item that the engine never gets. So the work of a
    request that ends badly waits here for the next one that wants it. Bounded; thread-safe.

    Args:
        capacity: Most bytes that are kept.
    """

    def __init__(self, capacity: int = WARM_OUTPUT_NBYTES) -> None:
        self._lru: LRUCache[ItemOutput] = LRUCache(capacity, warn_oversized=False)

    def __len__(self) -> int:
        return len(self._lru)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._lru

    def get(self, mm_hash: str) -> ItemOutput | None:
        """Return a result and keep it longest; None if it is not here."""
        return self._lru.get(mm_hash)

    def put(self, mm_hash: str, output: ItemOutput) -> None:
        """Keep a result."""
        self._lru.put(mm_hash, output, item_nbytes(output.kwargs))

    def discard(self, mm_hash: str) -> None:
        """Let go of a result: a cache has it now."""
        self._lru.pop(mm_hash)

    def clear(self) -> None:
        """Let go of all."""
        self._lru.clear()
