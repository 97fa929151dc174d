"""How a server ends: on a first signal with grace, on a second one at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

logger = logging.getLogger(__name__)

_CLOSING_S: Final = 15.0
"""How long closing may take after the grace: a decode that hangs cannot be interrupted."""
_AT_ONCE_S: Final = 1.0
"""How long the event loop has to act on a second signal, before the watchdog does."""


class StopSignals:
    """SIGINT and SIGTERM: the first one calls `on_first`, the next one ends the process.

    What has not ended by itself `grace_s` after the first one, plus some seconds to close, is
    ended too. To be entered on the event loop of the main thread.

    The event loop acts on signals. It may hang in code of others, a chat template that loops or
    a plug-in; so Python's handlers tell a watchdog too, a thread of its own. They run between
    two bytecodes of the main thread, whatever it does.

    Args:
        grace_s: How long requests may go on after the first signal.
        on_abandon: Called right before the process is ended at once, on any thread.
        numbers: The signals.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        on_abandon: Callable[[], object],
        numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        self._numbers = numbers
        self._grace_s = grace_s
        self._on_abandon = on_abandon
        self._event = asyncio.Event()
        # Its `put` may interrupt itself, as a handler must be able to.
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._watchdog = threading.Thread(target=self._watch, name="stop-watchdog", daemon=True)
        self.on_first: Callable[[], object] | None = None

    @property
    def is_set(self) -> bool:
        """Whether the server shall stop."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Return once the server shall stop."""
        await self._event.wait()

    def stop(self) -> None:
        """Begin to stop, as the first signal does; nothing after it."""
        if not self._event.is_set():
            self._told.put(0)
            self._begin()

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._on_signal, number)
            self._tell_watchdog_too(number)
        self._watchdog.start()

    def __exit__(self, *exc_info: object) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
        self._told.put(None)
        self._watchdog.join()

    def _tell_watchdog_too(self, number: int) -> None:
        of_loop = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None) -> None:
            self._told.put(number)
            if callable(of_loop):
                of_loop(number, frame)

        signal.signal(number, handle)
        signal.siginterrupt(number, False)  # as the loop had it

    def _on_signal(self, number: int) -> None:
        if not self._event.is_set():
            self._begin()
            return
        logger.warning("ending at once")
        self.abandon(128 + number)

    def _begin(self) -> None:
        self._event.set()
        if self.on_first is not None:
            self.on_first()

    def _watch(self) -> None:
        """Run on the watchdog's thread: end the process if nobody else does in time."""
        if self._told.get() is None:
            return
        try:
            second = self._told.get(timeout=self._grace_s + _CLOSING_S)
        except queue.Empty:
            logger.error(
                "something does not end %.0f s after the grace; ending at once", _CLOSING_S
            )
            self.abandon(1)
            return
        if second is None:
            return
        with contextlib.suppress(queue.Empty):
            if self._told.get(timeout=_AT_ONCE_S) is None:
                return
        logger.error("the event loop hangs; ending at once")
        self.abandon(128 + second)

    def abandon(self, status: int) -> None:
        """End the process now; the system takes back its memory, sockets and locks."""
        self._on_abandon()
        logging.shutdown()
        os._exit(status)
