"""What is a pure function of small things, computed once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_V = TypeVar("_V")


class Memo(Generic[_V]):
    """Values by key, the least recently used dropped first. Threads share it.

    The lock covers the table only: two threads may compute the same value at once.

    Args:
        max_entries: Values that are kept.
        cost: Value -> its size, in units of the caller's; None: all are small.
        max_cost: Sizes that are kept in all. A value of more than an eighth of it is not.
    """

    def __init__(
        self,
        max_entries: int = 4096,
        *,
        cost: Callable[[_V], int] | None = None,
        max_cost: int = 0,
    ) -> None:
        self._max_entries = max_entries
        self._cost = cost or (lambda _: 0)
        self._max_cost = max_cost
        self._total_cost = 0
        self._values: OrderedDict[Hashable, _V] = OrderedDict()
        self._lock = threading.Lock()

    def peek(self, key: Hashable) -> _V | None:
        """Return the value of `key` if it is here; its order stays."""
        with self._lock:
            return self._values.get(key)

    def get(self, key: Hashable, make: Callable[[], _V]) -> _V:
        """Return the value of `key`, made by `make` if it is not here."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        cost = self._cost(value)
        if cost > self._max_cost / 8:
            return value
        with self._lock:
            if key in self._values:
                self._total_cost -= self._cost(self._values[key])
            self._values[key] = value
            self._values.move_to_end(key)
            self._total_cost += cost
            while len(self._values) > self._max_entries or self._total_cost > self._max_cost:
                _, dropped = self._values.popitem(last=False)
                self._total_cost -= self._cost(dropped)
        return value
