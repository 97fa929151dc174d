"""Media that a request turns out to need after it was fetched without them, or has outdated.

What is known of old is neither fetched nor read: an item that a cache holds under a uuid, and
a payload that was identified before. Most requests end without either. The others come here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lazydecode.errors import LazyDecodeError, MissingMediaError, PayloadChangedError
from lazydecode.media.base import MediaIO, MediaRef
from lazydecode.renderers.guards import until
from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.jobs import Job
from lazydecode.renderers.media import EncodedItem, MediaFetcher
from lazydecode.renderers.timeline import Timeline

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LateMedia:
    """How one request gets what it was not given at first. For its event loop."""

    fetcher: MediaFetcher
    items: Sequence[EncodedItem]
    decoders: Mapping[str, MediaIO[Any]]
    hold: EncodedHold
    timeline: Timeline
    tenant: str | None = None
    """Whose request it is."""

    async def load(self, wanted: Sequence[tuple[str, int, MediaRef[Any]]]) -> None:
        """Read the payloads of these (modality, index, ref), as `MediaFetcher.load`."""
        await self.fetcher.load(self.items, wanted, self.hold)

    def settle(self) -> None:
        """Hold no more memory than is used: what was processed is rarely needed once more."""
        self.fetcher.settle(self.items, self.hold)


async def repaired(late: LateMedia | None, job: Job, work: Callable[[], Awaitable[_T]]) -> _T:
    """Do `work`; again when more of the media is there, if it failed for want of that.

    What was not fetched, since the cache held it, is fetched if that lost it. What was
    identified from memory is identified anew if it turns out to have changed. Each can
    happen once: what is fetched for it is there from then on.

    Args:
        late: What can be repaired; None: nothing.
        job: What is processed; repairs count for its deadline.
        work: Processes it.

    Raises:
        LazyDecodeError: What `work` raised, if there is nothing to repair, or a repair.
    """
    deadline = job.deadline
    done: set[type[LazyDecodeError]] = set()
    while True:
        try:
            return await work()
        except (MissingMediaError, PayloadChangedError) as exc:
            is_lost = isinstance(exc, MissingMediaError)
            if late is None or type(exc) in done:
                raise
            if is_lost and not any(item.is_left_out for item in late.items):
                raise
            done.add(type(exc))
        fetch = late.fetcher.fetch_late if is_lost else late.fetcher.fetch_changed
        async with until(deadline):
            await fetch(
                late.items,
                late.decoders,
                hold=late.hold,
                timeline=late.timeline,
                tenant=late.tenant,
            )
        job.deadline = deadline
