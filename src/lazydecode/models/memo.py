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
        max_entries: Values that are kept; all are small.
    """

    def __init__(self, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
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
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._max_entries:
                self._values.popitem(last=False)
        return value
