"""Blocks whose errors become other errors, at the cost of a method call where there are none."""

from __future__ import annotations

from collections.abc import Callable


class OnError:
    """A context that shows each exception of its block to `handle`.

    A request passes through a dozen such blocks, nearly always without an error; as generators
    they would take several times as long.

    Args:
        handle: Raises what the exception shall become, or returns to let it pass as it is.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: Callable[[BaseException], None]) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if exc is not None:
            self._handle(exc)
