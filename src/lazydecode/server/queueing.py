"""Admission: how many requests may be in the house; the next one is told to come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lazydecode.errors import OverloadedError

_RETRY_AFTER_S: Final = 1.0


class RequestQueue:
    """Counts the requests that run and those that wait. To be used on one event loop.

    Args:
        max_running: Requests that an engine works on together.
        max_waiting: Requests that may wait beside them.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.capacity = max_running + max_waiting
        self.num_inside = 0
        """Requests that were admitted and are not answered yet."""

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place while the block runs.

        Raises:
            OverloadedError: If all places are taken.
        """
        if self.num_inside >= self.capacity:
            raise OverloadedError(
                f"{self.num_inside} requests are running or waiting already",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
