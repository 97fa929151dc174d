"""`ByteBudget`: how many bytes all requests together may hold; more wait their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from types import TracebackType
from typing import Final

from lazydecode.errors import MediaTooLargeError, OverloadedError

_RETRY_AFTER_S: Final = 2.0
"""Hint for clients that were turned away; most waits end within a decode or two."""


class Reservation:
    """Bytes held of a budget, from `async with budget.reserve(n)` until the block ends."""

    __slots__ = ("_budget", "_nbytes", "_state")

    def __init__(self, budget: ByteBudget, nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes
        self._state = "new"

    @property
    def nbytes(self) -> int:
        """Bytes that this reservation holds, or will hold once entered; 0 after the block."""
        return self._nbytes

    def shrink(self, nbytes: int) -> None:
        """Hold only `nbytes` from now on; what is given back goes to those who wait.

        Raises:
            ValueError: If `nbytes` is negative or more than is held.
        """
        if not 0 <= nbytes <= self._nbytes:
            raise ValueError(f"cannot shrink {self._nbytes} bytes to {nbytes}")
        freed, self._nbytes = self._nbytes - nbytes, nbytes
        if self._state == "held":
            self._budget._give_back(freed)

    def grow(self, nbytes: int) -> None:
        """Hold `nbytes` from now on, without waiting: who holds memory must not wait for more,
        or two of them could wait for each other.

        Raises:
            ValueError: If that is less than is held.
            OverloadedError: If it is not free. What was held stays held.
        """
        if nbytes < self._nbytes:
            raise ValueError(f"cannot grow {self._nbytes} bytes to {nbytes}")
        if self._state == "held":
            self._budget._take_at_once(nbytes - self._nbytes)
        self._nbytes = nbytes

    async def __aenter__(self) -> Reservation:
        if self._state != "new":
            raise RuntimeError("a reservation can be entered once")
        self._state = "waiting"
        if not self._budget._take_if_free(self._nbytes):
            await self._budget._wait_for(self._nbytes)
        self._state = "held"
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give back what is held, as the end of the block does; once entered only."""
        # Nothing is awaited here: a cancellation cannot come between.
        self._state = "released"
        freed, self._nbytes = self._nbytes, 0
        self._budget._give_back(freed)

    def __repr__(self) -> str:
        return f"<Reservation {self._state}, {self._nbytes} bytes>"


class ByteBudget:
    """Bounds the bytes that are held together; who does not fit waits, first come first served.

    A big reservation is not overtaken by small ones behind it, so it is served eventually.
    To be used on one event loop; a cancelled waiter leaves and passes on what it was granted.

    Args:
        capacity: Bytes in all, at least 1.
        max_waiting: Reservations that may wait; the next one fails at once.
        max_wait_s: Longest wait of one reservation.
    """

    def __init__(self, capacity: int, *, max_waiting: int = 1024, max_wait_s: float = 60.0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if max_waiting < 0:
            raise ValueError(f"max_waiting must not be negative, got {max_waiting}")
        self.capacity = capacity
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._held_bytes = 0
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held_bytes

    @property
    def num_waiting(self) -> int:
        """Reservations that wait now."""
        return len(self._waiters)

    def reserve(self, nbytes: int) -> Reservation:
        """Return a context manager that holds `nbytes` while its block runs.

        Entering it raises `MediaTooLargeError` if `nbytes` can never fit, and
        `OverloadedError` if too many wait already or the wait takes too long.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        return Reservation(self, nbytes)

    def _take_if_free(self, nbytes: int) -> bool:
        """Take bytes at once; False: there are too few, or others wait."""
        if self._waiters or self._held_bytes + nbytes > self.capacity:
            return False
        self._held_bytes += nbytes
        return True

    async def _wait_for(self, nbytes: int) -> None:
        if nbytes > self.capacity:
            raise MediaTooLargeError(
                f"the media needs {nbytes} bytes of memory, the server has {self.capacity} for all"
            )
        if len(self._waiters) >= self._max_waiting:
            raise OverloadedError(
                "the server's memory for media is in use and too many requests wait for it",
                retry_after_s=_RETRY_AFTER_S,
            )
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (granted, nbytes)
        self._waiters.append(entry)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await granted
        except BaseException as exc:
            if granted.done() and not granted.cancelled():
                # Granted in the same turn of the loop in which the wait was cut off.
                self._give_back(nbytes)
            else:
                with contextlib.suppress(ValueError):  # `_grant` may have passed it over.
                    self._waiters.remove(entry)
                self._grant()  # A smaller one behind this one may fit now.
            if isinstance(exc, TimeoutError):
                raise OverloadedError(
                    f"no memory for media became free within {self._max_wait_s:g} s",
                    retry_after_s=_RETRY_AFTER_S,
                ) from None
            raise

    def _take_at_once(self, nbytes: int) -> None:
        # Ahead of those who wait: the sooner this one finishes, the sooner they are served.
        if self._held_bytes + nbytes > self.capacity:
            raise OverloadedError(
                "the server's memory for media is in use", retry_after_s=_RETRY_AFTER_S
            )
        self._held_bytes += nbytes

    def _give_back(self, nbytes: int) -> None:
        self._held_bytes -= nbytes
        assert self._held_bytes >= 0
        self._grant()

    def _grant(self) -> None:
        while self._waiters:
            granted, nbytes = self._waiters[0]
            if self._held_bytes + nbytes > self.capacity:
                return
            self._waiters.popleft()
            if granted.done():  # Cancelled; its waiter has not run yet to leave the queue.
                continue
            self._held_bytes += nbytes
            granted.set_result(None)
