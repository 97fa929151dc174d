"""The caches of one front end, and which of them a request goes by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lazydecode.cache import (
    PROCESSOR_CACHE_REGISTRY,
    BaseMultiModalProcessorCache,
    ReadOnlyCacheView,
)
from lazydecode.cache.base import GIB
from lazydecode.cache.store import ItemStore
from lazydecode.cache.stored import StoredCache, StoredResults
from lazydecode.config import Settings
from lazydecode.errors import ValidationError
from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.models.frontend import ModelFrontend

Purpose: TypeAlias = Literal["render", "engine", "count"]
"""What a request is processed for, which says which cache it goes by: that of rendered prompts,
the one that mirrors the engine's, or both of them without leaving a trace."""


@dataclass(frozen=True, slots=True)
class ClearedCaches:
    """How many entries each cache had when it was cleared."""

    render: int
    sender: int
    uuids: int


@dataclass(frozen=True, slots=True)
class FrontendCaches:
    """Caches of processed items; None is one that is off or has no use."""

    render: BaseMultiModalProcessorCache | None = None
    """For prompts that no engine follows."""
    sender: BaseMultiModalProcessorCache | None = None
    """Mirrors the engine's."""
    stored: StoredResults | None = None
    """The second level below both; None: there is none."""

    @classmethod
    def create(
        cls,
        kind: str,
        *,
        capacity_bytes: int,
        mirrors_engine: bool,
        store: ItemStore | None = None,
    ) -> FrontendCaches:
        """Return caches of a registered kind, `capacity_bytes` each, over a store if there is."""
        caches = PROCESSOR_CACHE_REGISTRY.get(kind)
        render = caches.make("render", kind, capacity_bytes=capacity_bytes)
        sender: BaseMultiModalProcessorCache | None = None
        if mirrors_engine:
            sender = caches.make("sender", kind, capacity_bytes=capacity_bytes)
        if store is None:
            return cls(render, sender)
        stored = StoredResults(store)
        return cls(
            StoredCache(render, stored),
            None if sender is None else StoredCache(sender, stored),
            stored,
        )

    def borrowing(
        self, executor: Executor, mm_hashes: Iterable[str]
    ) -> AbstractAsyncContextManager[None]:
        """Have what the store holds of these while the block runs; read on `executor`."""
        missing = [] if self.stored is None else [h for h in mm_hashes if self._lacks(h)]
        if self.stored is None or not missing:
            return nullcontext()
        return self._borrowing(self.stored, executor, missing)

    @staticmethod
    @asynccontextmanager
    async def _borrowing(
        stored: StoredResults, executor: Executor, missing: list[str]
    ) -> AsyncIterator[None]:
        loan = stored.borrow()
        try:
            reading = asyncio.get_running_loop().run_in_executor(executor, loan.load, missing)
            await await_with_cancellation_drain(reading)
            yield
        finally:
            loan.end()

    def _lacks(self, mm_hash: str) -> bool:
        """Whether one of the caches would have to make the item."""
        return any(not cache.is_cached_item(mm_hash) for cache in self)

    def close(self) -> None:
        """Let go of what the caches hold; return when what is to be stored is stored."""
        with ExitStack() as stack:
            if self.stored is not None:
                stack.callback(self.stored.close)
            for cache in self:
                stack.callback(cache.close)

    def __iter__(self) -> Iterator[BaseMultiModalProcessorCache]:
        return (cache for cache in (self.render, self.sender) if cache is not None)

    def select(self, purpose: Purpose, *, skip: bool) -> BaseMultiModalProcessorCache | None:
        """Return the cache that a request goes by; None if it is off, or is to be passed by."""
        if skip:
            return None
        if purpose == "count":
            caches = list(self)
            return ReadOnlyCacheView(caches) if caches else None
        return self.sender if purpose == "engine" else self.render

    def clear(self) -> tuple[int, int]:
        """Empty both, and the store; return how many entries the two had."""
        counts = tuple(0 if cache is None else len(cache) for cache in (self.render, self.sender))
        for cache in self:
            cache.clear_cache()
        if self.stored is not None:
            self.stored.clear()
        return counts[0], counts[1]


def open_store(frontend: ModelFrontend, settings: Settings) -> ItemStore | None:
    """Return the store below the caches, if there is to be one.

    Chunks have none: which of them a video has is known only once it was decoded.

    Raises:
        ValidationError: If its folder cannot be used.
    """
    folder, processor = settings.processor_store, frontend.mm_processor
    if folder is None or (processor is not None and processor.splitter is not None):
        return None
    try:
        return ItemStore(folder, max_bytes=int(settings.processor_store_gb * GIB))
    except ValueError as exc:
        raise ValidationError(str(exc), parameter="processor_store") from exc
