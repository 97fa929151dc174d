"""How a server ends: on a first signal with grace, on a second one at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Final

logger = logging.getLogger(__name__)

_CLOSING_S: Final = 15.0
"""How long closing may take after the grace: a decode that hangs cannot be interrupted."""


class StopSignals:
    """SIGINT and SIGTERM: the first one calls `on_first`, the next one ends the process.

    What has not ended by itself `grace_s` after the first one, plus some seconds to close, is
    ended too. To be entered on the event loop of the main thread.

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
        self._watchdog: threading.Timer | None = None
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
        if self._event.is_set():
            return
        self._event.set()
        self._watchdog = threading.Timer(self._grace_s + _CLOSING_S, self._give_up)
        self._watchdog.daemon = True
        self._watchdog.start()
        if self.on_first is not None:
            self.on_first()

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._on_signal, number)

    def __exit__(self, *exc_info: object) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if not self._event.is_set():
            self.stop()
            return
        logger.warning("ending at once")
        self.abandon(128 + number)

    def _give_up(self) -> None:
        logger.error("something does not end %.0f s after the grace; ending at once", _CLOSING_S)
        self.abandon(1)

    def abandon(self, status: int) -> None:
        """End the process now; the system takes back its memory, sockets and locks."""
        self._on_abandon()
        logging.shutdown()
        os._exit(status)
