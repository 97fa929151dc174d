"""The block in which a request is open, and what it holds until the end of it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.media import EncodedItem

_T = TypeVar("_T")


@dataclass(slots=True)
class Held:
    """What one request holds, as far as it has come."""

    hold: EncodedHold
    """Its share of the memory budget."""
    loan: AbstractAsyncContextManager[None] | None = None
    """What it borrowed of the store, entered; None: nothing."""
    items: Sequence[EncodedItem] = ()

    async def release(self) -> None:
        """Give everything back: the items before the memory that was reserved for them."""
        try:
            for item in self.items:
                item.release()
            if self.loan is not None:
                await self.loan.__aexit__(None, None, None)
        finally:
            self.hold.release()


class Opened(Generic[_T]):
    """Opens at the beginning of the block, and releases what is held at its end.

    Not a generator: each request has one, and that takes a dozen calls more.

    Args:
        opening: Opens; what it gives is the block's.
        held: What it holds; released too if it fails.
    """

    __slots__ = ("_held", "_opening")

    def __init__(self, opening: Awaitable[_T], held: Held) -> None:
        self._opening = opening
        self._held = held

    async def __aenter__(self) -> _T:
        try:
            return await self._opening
        except BaseException:
            await self._held.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._held.release()
