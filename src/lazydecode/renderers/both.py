"""Writing the prompt while media arrive: two things at once, and one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from lazydecode.media.decode import await_with_cancellation_drain
from lazydecode.renderers.media import EncodedItem

_T = TypeVar("_T")


async def both(
    prompt: Awaitable[_T], items: Awaitable[list[EncodedItem]]
) -> tuple[_T, list[EncodedItem]]:
    """Await both at once; a failure of one ends the other before it is raised."""
    first, second = asyncio.ensure_future(prompt), asyncio.ensure_future(items)
    try:
        await asyncio.wait((first, second), return_when=asyncio.FIRST_EXCEPTION)
        if first.done() and second.done() and not first.exception():
            return first.result(), second.result()
    finally:
        if not (first.done() and second.done()):
            for task in (first, second):
                task.cancel()
            await await_with_cancellation_drain(asyncio.wait((first, second)))
    for item in () if second.cancelled() or second.exception() else second.result():
        item.release()
    # The media first: its errors name an item. A cancelled one was ended by the other's failure.
    for task in (second, first):
        if not task.cancelled():
            task.result()
    raise asyncio.CancelledError
