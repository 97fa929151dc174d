"""A processor cache from another package, whose failures are told apart from ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from lazydecode.cache.base import BaseMultiModalProcessorCache, CachedItem, ProcessedItem
from lazydecode.cache.ring import CacheStats
from lazydecode.errors import PluginBrokenError
from lazydecode.plugins import contain


class ContainedCache(BaseMultiModalProcessorCache):
    """Does what the cache `inner` does; what that raises becomes an error with its name.

    A request whose lookup fails fails alone: `transaction` has it leave no trace.

    Args:
        inner: The cache.
        name: Under which it is registered.
    """

    def __init__(self, inner: BaseMultiModalProcessorCache, name: str) -> None:
        self.inner = inner
        self._name = name

    def _contained(self) -> AbstractContextManager[None]:
        return contain("processor cache", self._name, kind=PluginBrokenError)

    @property
    def used_bytes(self) -> int:
        """Summed size of all entries."""
        with self._contained():
            return self.inner.used_bytes

    def __len__(self) -> int:
        with self._contained():
            return len(self.inner)

    def peek_item(self, mm_hash: str) -> CachedItem | None:
        """Return what a hit would, without a trace."""
        with self._contained():
            return self.inner.peek_item(mm_hash)

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether the item is cached."""
        with self._contained():
            return self.inner.is_cached_item(mm_hash)

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """Whether each is cached."""
        with self._contained():
            return self.inner.is_cached(mm_hashes)

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> CachedItem:
        """Return the entry, storing it if it was absent."""
        with self._contained():
            return self.inner.get_and_update_item(mm_item, mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Make the item the youngest."""
        with self._contained():
            self.inner.touch_sender_cache_item(mm_hash)

    def release_sender_touches(self) -> None:
        """End what the touches of a request protect."""
        with self._contained():
            self.inner.release_sender_touches()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """If the body raises, contents and order are as they were before it."""
        with self._contained():
            inner = self.inner.transaction()
            inner.__enter__()
        try:
            yield
        except BaseException as exc:
            self._leave(inner, exc)
            raise
        self._leave(inner, None)

    def _leave(self, inner: AbstractContextManager[None], exc: BaseException | None) -> None:
        kind: type[BaseException] | None = None if exc is None else type(exc)
        traceback: TracebackType | None = None if exc is None else exc.__traceback__
        try:
            inner.__exit__(kind, exc, traceback)
        except BaseException as raised:
            # What the body raised may come out again as it is; the rest is the cache's own.
            if raised is not exc:
                with self._contained():
                    raise

    def clear_cache(self) -> None:
        """Forget everything."""
        with self._contained():
            self.inner.clear_cache()

    def invalidate(self, mm_hashes: Sequence[str]) -> None:
        """Forget these hashes."""
        with self._contained():
            self.inner.invalidate(mm_hashes)

    def snapshot(self) -> list[str]:
        """Return all hashes, the next to be evicted first."""
        with self._contained():
            return self.inner.snapshot()

    def make_stats(self, *, delta: bool = False) -> CacheStats:
        """Return hits and total."""
        with self._contained():
            return self.inner.make_stats(delta=delta)

    def close(self) -> None:
        """Let go of whatever the cache holds outside this process."""
        with self._contained():
            self.inner.close()
