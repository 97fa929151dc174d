"""The caches of one front end, and which of them a request goes by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lazydecode.cache import (
    PROCESSOR_CACHE_REGISTRY,
    BaseMultiModalProcessorCache,
    ReadOnlyCacheView,
)

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

    @classmethod
    def create(cls, kind: str, *, capacity_bytes: int, mirrors_engine: bool) -> FrontendCaches:
        """Return caches of a registered kind, `capacity_bytes` each."""
        caches = PROCESSOR_CACHE_REGISTRY.get(kind)
        return cls(
            caches.render(capacity_bytes=capacity_bytes),
            caches.sender(capacity_bytes=capacity_bytes) if mirrors_engine else None,
        )

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
        """Empty both; return how many entries they had."""
        counts = tuple(0 if cache is None else len(cache) for cache in (self.render, self.sender))
        for cache in self:
            cache.clear_cache()
        return counts[0], counts[1]
