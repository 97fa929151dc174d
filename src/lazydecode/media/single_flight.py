"""`SingleFlight`: concurrent callers for the same thing share one run of the work."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from lazydecode.errors import LazyDecodeError
from lazydecode.media.decode import await_with_cancellation_drain

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


@dataclass(slots=True)
class _Flight(Generic[_V]):
    task: asyncio.Task[_V]
    num_waiting: int = 0


class SingleFlight(Generic[_K, _V]):
    """Runs the work of a key once for all who ask while it runs. For one event loop.

    The work is a task of its own that belongs to none of those who wait: whoever came first
    may be cancelled without harm to the others. When the last one leaves, the work is
    cancelled, and that one leaves only after the work has ended. Results are not kept.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._flights: dict[_K, _Flight[_V]] = {}

    def __len__(self) -> int:
        """Number of keys whose work runs now."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """Callers that wait now, over all keys."""
        return sum(flight.num_waiting for flight in self._flights.values())

    async def run(self, key: _K, work: Callable[[], Coroutine[Any, Any, _V]]) -> tuple[_V, bool]:
        """Return the result for `key` and whether the work was already under way.

        Raises:
            Exception: What the work raised; one of our errors is a new object for each caller.
        """
        flight = self._flights.get(key)
        is_shared = flight is not None
        if flight is None:
            task = asyncio.get_running_loop().create_task(work(), name=self._name)
            flight = self._flights[key] = _Flight(task)
            task.add_done_callback(partial(self._landed, key, flight))
        flight.num_waiting += 1
        try:
            await asyncio.wait((flight.task,))
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and not flight.task.done():
                # Taken off the table first: who comes from here on starts anew.
                self._remove(key, flight)
                flight.task.cancel()
                await _ended(flight.task)
        if flight.task.cancelled():  # By `close`: our caller was not cancelled.
            raise RuntimeError(f"{self._name} was closed")
        try:
            return flight.task.result(), is_shared
        except LazyDecodeError as exc:
            # One traceback and context per caller.
            raise copy.copy(exc) from exc

    def _landed(self, key: _K, flight: _Flight[_V], task: asyncio.Task[_V]) -> None:
        self._remove(key, flight)
        if not task.cancelled():
            task.exception()  # Retrieved, so that nothing logs it as lost if nobody waits.

    def _remove(self, key: _K, flight: _Flight[_V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def close(self) -> None:
        """Cancel all work and return when it has ended; those who wait get a RuntimeError."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.task.cancel()
        for flight in flights:
            await _ended(flight.task)


async def _ended(task: asyncio.Task[Any]) -> None:
    await await_with_cancellation_drain(asyncio.wait((task,)))
