"""The engine's end of the mirrored cache: a request's items, out of it or into it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from lazydecode.cache import BaseMultiModalReceiverCache
from lazydecode.engine.generation import PlacedItem
from lazydecode.engine.protocol import EngineRequest
from lazydecode.errors import CacheMissError, EngineError, PluginBrokenError
from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.plugins import contain, is_foreign


class Receiver:
    """Applies each request to the receiver cache as phase 2 applied it to the sender cache.

    Every hash of the request is touched first, then every item is looked up or stored, in
    modality and item order. Belongs to the reader's thread.
    """

    def __init__(self, cache: BaseMultiModalReceiverCache) -> None:
        self._cache = cache

    def receive(self, request: EngineRequest) -> tuple[list[PlacedItem], int]:
        """Return the request's items in the order of the prompt, and how many were cached.

        Raises:
            CacheMissError: Naming every item that was neither sent nor cached. The others have
                been applied by then, as they were on the sender's side.
            EngineError: If items, hashes and places do not agree in number.
            PluginBrokenError: If a cache of another package fails.
        """
        with self._contained():
            return self._receive(request)

    def _contained(self) -> AbstractContextManager[None]:
        """What a cache of another package raises in the block becomes an error with its name."""
        cache_class = type(self._cache)
        if not is_foreign(cache_class):
            return nullcontext()
        name = f"{cache_class.__module__}:{cache_class.__qualname__}"
        return contain("processor cache", name, kind=PluginBrokenError)

    def _receive(self, request: EngineRequest) -> tuple[list[PlacedItem], int]:
        if request.cache_items:
            for hashes in request.mm_hashes.values():
                for mm_hash in hashes:
                    self._cache.touch_receiver_cache_item(mm_hash)
        placed: list[PlacedItem] = []
        missing: list[str] = []
        num_cached = 0
        for modality, places in request.mm_placeholders.items():
            items = request.mm_kwargs.get(modality, [])
            hashes = request.mm_hashes.get(modality, [])
            if not len(items) == len(hashes) == len(places):
                raise EngineError(
                    f"request {request.request_id} has {len(items)} {modality} items, "
                    f"{len(hashes)} hashes and {len(places)} places"
                )
            for item, mm_hash, place in zip(items, hashes, places, strict=True):
                try:
                    tensors = self._look_up(request, item, mm_hash)
                except CacheMissError as exc:
                    missing += exc.hashes
                    continue
                num_cached += item is None
                placed.append(PlacedItem(modality, tensors, place))
        if missing:
            raise CacheMissError(list(dict.fromkeys(missing)))
        placed.sort(key=lambda item: item.place.offset)
        return placed, num_cached

    def _look_up(
        self, request: EngineRequest, item: MultiModalKwargsItem | None, mm_hash: str
    ) -> MultiModalKwargsItem:
        if request.cache_items:
            return self._cache.get_and_update_item(item, mm_hash)
        if item is None:
            raise CacheMissError([mm_hash])
        return item

    def clear(self) -> None:
        """Forget everything."""
        self._cache.clear_cache()

    def invalidate(self, mm_hashes: Sequence[str]) -> None:
        """Forget these."""
        self._cache.invalidate(mm_hashes)

    def close(self) -> None:
        """Let go of whatever the cache holds; it is not used any more."""
        self._cache.close()

    def snapshot(self) -> list[str]:
        """Return the cached hashes in eviction order."""
        return self._cache.snapshot()
