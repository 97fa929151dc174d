"""`LazyPayload`: encoded bytes that are read when somebody needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazydecode.media.identity import PayloadDigest


class LazyPayload:
    """Encoded bytes that are known without having been read. Threads share it.

    The lock covers the reading, so that they are read once.

    Args:
        num_bytes: Their length.
        read: Reads and digests them; blocks. Raises if they are not what they were. It is let go
            of afterwards.
        unread_bytes: Memory that `read` holds.
    """

    __slots__ = ("_lock", "_read", "_result", "_unread_bytes", "num_bytes")

    num_bytes: int
    """Length of the payload, loaded or not."""

    def __init__(
        self,
        num_bytes: int,
        read: Callable[[], tuple[bytes, PayloadDigest]],
        *,
        unread_bytes: int = 0,
    ) -> None:
        self.num_bytes = num_bytes
        self._read: Callable[[], tuple[bytes, PayloadDigest]] | None = read
        self._unread_bytes = unread_bytes
        self._lock = threading.Lock()
        self._result: tuple[bytes, PayloadDigest] | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the bytes are in memory."""
        return self._result is not None

    @property
    def held_bytes(self) -> int:
        """Memory that is held for them now."""
        return self._unread_bytes if self._result is None else self.num_bytes

    def load(self) -> tuple[bytes, PayloadDigest]:
        """Return the bytes and their digest; blocks while they are read.

        Raises:
            PayloadChangedError: If they are not what was identified any more.
        """
        with self._lock:
            if self._result is None:
                assert self._read is not None
                self._result = self._read()
                self._read = None
            return self._result

    def __repr__(self) -> str:
        state = "loaded" if self.is_loaded else "not loaded"
        return f"<LazyPayload, {self.num_bytes} bytes, {state}>"
