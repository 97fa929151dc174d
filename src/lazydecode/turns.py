"""Short pieces of work on an event loop, of which few are done per iteration."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    """So much is done in one iteration of an event loop, in the order of asking.

    All that are ready would otherwise run in the same iteration, and timers, short requests and
    `/health` wait for the sum, however short each is. For one loop, and its thread only.

    Args:
        per_iteration: Sum of costs, in units of the caller's, at least 1. A piece that costs more
            has an iteration for itself.
    """

    def __init__(self, per_iteration: int) -> None:
        self._per_iteration = per_iteration
        self._taken = 0
        self._waiting: deque[tuple[Callable[[], object], int]] = deque()

    def take(self, cost: int = 1) -> bool:
        """Return whether this may be done now, and then count it."""
        if self._waiting or not self._fits(cost):
            return False
        self._count(cost)
        return True

    def ask(self, go_on: Callable[[], object], cost: int = 1) -> None:
        """Call `go_on` at once if the iteration has as much left, else in a later one."""
        if self.take(cost):
            go_on()
        else:
            self._waiting.append((go_on, cost))

    async def wait(self, cost: int = 1) -> None:
        """Return in an iteration that has as much left; others go first if they asked before."""
        if self.take(cost):
            return
        turn = asyncio.get_running_loop().create_future()

        def go_on() -> None:
            if not turn.done():  # else it was cancelled, and its part of the iteration stays unused
                turn.set_result(None)

        self._waiting.append((go_on, cost))
        await turn

    def _fits(self, cost: int) -> bool:
        return self._taken == 0 or self._taken + cost <= self._per_iteration

    def _count(self, cost: int) -> None:
        if self._taken == 0:
            asyncio.get_running_loop().call_soon(self._begin_next)
        self._taken += cost

    def _begin_next(self) -> None:
        self._taken = 0
        while self._waiting and self._fits(self._waiting[0][1]):
            go_on, cost = self._waiting.popleft()
            self._count(cost)
            go_on()
