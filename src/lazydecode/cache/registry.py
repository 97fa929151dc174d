"""Processor caches by name. A name stands for classes that keep and forget alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, cast

from lazydecode.cache.base import BaseMultiModalProcessorCache, BaseMultiModalReceiverCache
from lazydecode.cache.contained import ContainedCache
from lazydecode.cache.lru import (
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from lazydecode.errors import PluginBrokenError
from lazydecode.plugins import Registry, contain, is_foreign


@dataclass(frozen=True, slots=True)
class ProcessorCaches:
    """The classes of one kind of cache. Each is called with `capacity_bytes`, an int.

    `sender` and `receiver` see the same calls in the same order (see `lazydecode.cache.base`) and
    must come to the same decisions, by the items' hashes and `item_nbytes`.

    Raises:
        TypeError: If one of them is not such a class.
        ValueError: If the engine's process could not import `receiver` by its name.
    """

    render: Callable[..., BaseMultiModalProcessorCache]
    """For prompts that no engine follows: keeps tensors and prompt updates."""
    sender: Callable[..., BaseMultiModalProcessorCache]
    """Beside an engine: keeps prompt updates, and knows which tensors the engine holds."""
    receiver: type[BaseMultiModalReceiverCache]
    """In the engine's process: keeps the tensors."""

    def __post_init__(self) -> None:
        for name, expected in (
            ("render", BaseMultiModalProcessorCache),
            ("sender", BaseMultiModalProcessorCache),
            ("receiver", BaseMultiModalReceiverCache),
        ):
            value = getattr(self, name)
            if not (isinstance(value, type) and issubclass(value, expected)):
                raise TypeError(f"{name} is not a subclass of {expected.__name__}")
        if "." in self.receiver.__qualname__ or self.receiver.__module__ == "__main__":
            raise ValueError("receiver must be a class at the top of a module that can be imported")

    def make(
        self, end: Literal["render", "sender"], name: str, *, capacity_bytes: int
    ) -> BaseMultiModalProcessorCache:
        """Return a new cache, which tells its own failures from ours if it is a plug-in's.

        Args:
            end: Which of the two.
            name: Under which these classes are registered.
            capacity_bytes: Its size.

        Raises:
            PluginBrokenError: If a class of another package cannot be made.
        """
        cache_class = self.render if end == "render" else self.sender
        if not is_foreign(cast(type, cache_class)):
            return cache_class(capacity_bytes=capacity_bytes)
        with contain(PROCESSOR_CACHE_REGISTRY.noun, name, kind=PluginBrokenError):
            return ContainedCache(cache_class(capacity_bytes=capacity_bytes), name)

    @property
    def receiver_path(self) -> str:
        """`module:class` of the receiver."""
        return f"{self.receiver.__module__}:{self.receiver.__qualname__}"


def _check_caches(value: object) -> None:
    if not isinstance(value, ProcessorCaches):
        raise TypeError("it is not a lazydecode.cache.ProcessorCaches")


PROCESSOR_CACHE_REGISTRY: Final = Registry[ProcessorCaches](
    "processor cache",
    group="lazydecode.caches",
    check=_check_caches,
    parameter="mm_processor_cache",
)
"""The process's kinds of caches."""
PROCESSOR_CACHE_REGISTRY.add(
    "lru",
    ProcessorCaches(
        render=MultiModalProcessorOnlyCache,
        sender=MultiModalProcessorSenderCache,
        receiver=MultiModalReceiverCache,
    ),
)
