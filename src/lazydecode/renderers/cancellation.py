"""A client that went away, told to the threads and the task that still work for it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Final

from lazydecode.errors import LazyDecodeError
from lazydecode.processing.state import MultiModalApplyState

EXPIRE_PERIOD_S: Final = 0.5
"""How often those who wait look whether it has been too long."""


class Cancellation:
    """Whether the client went away, for the threads and the task that still work for it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._waiting: asyncio.Task[None] | None = None
        self._state: MultiModalApplyState | None = None

    @property
    def is_set(self) -> bool:
        """Whether it happened."""
        return self._event.is_set()

    def set(self) -> None:
        """Called on the event loop when the request is cancelled."""
        self._event.set()
        if self._waiting is not None and self._state is not None:
            # Now, and not when the task gets its turn: what is not begun by then never is.
            self._state.leave_flights()
            self._waiting.cancel()

    async def wait_for_items(self, state: MultiModalApplyState) -> None:
        """Wait for decodes and results; once cancelled, only for the decodes that run.

        Raises:
            LazyDecodeError: If an item failed, and the request was not cancelled.
        """
        if self.is_set:
            # In phase 1. A task that is cancelled before it begins would not wait at all.
            state.leave_flights()
            with suppress(LazyDecodeError):
                await state.wait_decodes_async()
            return
        self._state = state
        self._waiting = waiting = asyncio.ensure_future(state.wait_items_async())
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=EXPIRE_PERIOD_S)
                state.expire_flights()
            if not self._event.is_set():
                waiting.result()
            elif not waiting.cancelled():
                waiting.exception()  # retrieved: nobody is left who would hear of it
        finally:
            self._waiting = self._state = None
