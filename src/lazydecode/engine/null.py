"""The engine of a server that only renders."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from lazydecode.engine.protocol import EngineInfo, EngineOutput, EngineRequest
from lazydecode.errors import InvalidRequestError


class NullEngine:
    """Loads nothing and answers nothing; `info` is what it was given."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    @property
    def info(self) -> EngineInfo | None:
        """What is known of the model without its weights."""
        return self._info

    @property
    def is_alive(self) -> bool:
        """Always true: there is nothing that could die."""
        return True

    @property
    def pid(self) -> int | None:
        """None: there is no process."""
        return None

    async def start(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""

    def submit(self, request: EngineRequest) -> None:
        """Refuse.

        Raises:
            InvalidRequestError: Always.
        """
        raise InvalidRequestError(
            "this server renders requests and does not generate (engine `none`); send the "
            "request to its render route"
        )

    def stream(self, request_id: str) -> AsyncIterator[EngineOutput]:
        """Fail: nothing can have been submitted."""
        raise ValueError(f"request {request_id!r} is not running")

    def abort(self, request_id: str) -> None:
        """Nothing to do."""

    async def cache_snapshot_async(self) -> list[str]:
        """Return no hashes: nothing is received."""
        return []

    def clear_cache(self) -> None:
        """Nothing to do."""

    def invalidate_cache(self, mm_hashes: Sequence[str]) -> None:
        """Nothing to do."""

    def on_restart(self, callback: Callable[[], None]) -> None:
        """Nothing to do: it never restarts."""
