"""Admission: how many requests may be in the house; the next one is told to come back."""

from __future__ import annotations

from typing import Final

from lazydecode.errors import OverloadedError

_RETRY_AFTER_S: Final = 1.0


class RequestQueue:
    """Counts the requests that run and those that wait. To be used on one event loop.

    As a context it holds a place while the block runs; entering raises `OverloadedError` if all
    places are taken.

    Args:
        max_running: Requests that an engine works on together.
        max_waiting: Requests that may wait beside them.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.capacity = max_running + max_waiting
        self.num_inside = 0
        """Requests that were admitted and are not answered yet."""

    def __enter__(self) -> None:
        if self.num_inside >= self.capacity:
            raise OverloadedError(
                f"{self.num_inside} requests are running or waiting already",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_inside += 1

    def __exit__(self, *_: object) -> None:
        self.num_inside -= 1
