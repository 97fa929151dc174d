"""Having a nursery at all times: one that ends is replaced, and workers come back."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

from lazydecode.engine.child import Child
from lazydecode.workers.nursery import (
    Configure,
    NurseryGoneError,
    fork_worker,
    start_nursery,
)
from lazydecode.workers.worker import Memory

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 30.0
"""How long a nursery that has loaded may take to fork."""
_EXIT_S: Final = 5.0
_MIN_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 300.0
"""Between one that ended and the next, which takes seconds of a core to load: twice as long each
time, so that one that ends again and again does not take the cores from the threads."""


class NurseryKeeper:
    """Has one nursery, and then another one, until it is closed.

    The lock covers which one there is, and the connection to it: one fork at a time.

    Args:
        nursery: The first one. Ended by `close`, started or not.
        spawn: Starts another one; None: there is none after the first.
    """

    def __init__(self, nursery: Child, spawn: Callable[[], Child] | None = None) -> None:
        self._nursery = nursery
        self._spawn = spawn
        self._pause_s = _MIN_PAUSE_S
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_ready = False
        self._ended = threading.Event()
        """Set when the nursery that was ready is not any more."""
        self._closing = threading.Event()

    @property
    def is_ready(self) -> bool:
        """Whether workers can be forked now."""
        return self._is_ready

    def start(self, configure: Configure, on_ready: Callable[[], object]) -> None:
        """Let the nursery load the model; returns at once.

        Args:
            configure: What it loads, and each that comes after it.
            on_ready: Called on a thread of its own whenever one is ready.
        """
        self._thread = threading.Thread(
            target=self._keep, args=(configure, on_ready), name="lazydecode-nursery", daemon=True
        )
        self._thread.start()

    def fork(self, sock: socket.socket, memory: Memory | None) -> int:
        """As `fork_worker`.

        Raises:
            OSError: If the worker cannot be forked.
            NurseryGoneError: If there is no nursery now.
        """
        with self._lock:
            if not self._is_ready:
                raise NurseryGoneError("there is no process that workers are forked from")
            try:
                return fork_worker(self._nursery.control, sock, memory)
            except NurseryGoneError as exc:
                self._is_ready = False
                self._say_why(exc)
                # One that answers too late would be taken for the answer to what comes next.
                self._nursery.kill()
                self._ended.set()
                raise

    def close(self) -> None:
        """End the nursery, and with it all workers. Blocks."""
        with self._lock:
            self._closing.set()
            if not self._is_ready:
                self._nursery.kill()  # it may be loading, which nothing else interrupts
            self._is_ready = False
            self._ended.set()
        if self._thread is None:
            self._end()
        else:
            self._thread.join()

    # -- the thread

    def _keep(self, configure: Configure, on_ready: Callable[[], object]) -> None:
        while True:
            if self._load(configure):
                on_ready()
                self._ended.wait()
            self._end()
            if not self._replace():
                return

    def _load(self, configure: Configure) -> bool:
        """Return whether workers can be forked, once the model is loaded."""
        try:
            start_nursery(self._nursery.control, configure)
        except OSError as exc:
            if not isinstance(exc, NurseryGoneError):
                self._spawn = None  # It says why not, and so would the next one.
            self._say_why(exc)
            return False
        self._nursery.control.settimeout(_ANSWER_S)  # from here on it only forks
        with self._lock:
            self._is_ready = not self._closing.is_set()
            return self._is_ready

    def _say_why(self, exc: OSError) -> None:
        if not self._closing.is_set():
            until = "from here on" if self._spawn is None else "until there are workers"
            logger.error("items are processed by threads %s: %s", until, exc)

    def _end(self) -> None:
        self._nursery.control.close()
        if self._nursery.wait(_EXIT_S) is None:
            self._nursery.kill()
            self._nursery.wait(_EXIT_S)

    def _replace(self) -> bool:
        """Start another nursery after a while; returns False if there is to be none."""
        while self._spawn is not None and not self._closing.wait(self._pause_s):
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            try:
                nursery = self._spawn()
            except OSError as exc:
                logger.warning("workers cannot be started again: %s", exc)
                continue
            with self._lock:
                # Under the lock with `close`, which ends either this one or the one before.
                self._nursery = nursery
                self._ended.clear()
                if self._closing.is_set():
                    nursery.kill()
            return True
        return False
