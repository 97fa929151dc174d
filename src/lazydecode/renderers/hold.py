"""The encoded bytes that one request holds of the budget of all requests."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self

from lazydecode.media.base import MediaRef
from lazydecode.media.budget import ByteBudget, Reservation


class PayloadBytes(NamedTuple):
    """Encoded bytes of a request's items."""

    total: int
    held: int
    """Memory that is held for them now."""
    needed: int
    """The same, and what texts that are kept may become: nobody is to wait for that."""


class EncodedHold:
    """Grows and shrinks with what a request holds: its body first, then its media.

    A request waits only while it holds nothing; what it needs beyond is taken at once or
    refused. So no two requests ever wait for each other.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._reservation: Reservation | None = None
        self._aside = 0
        self.body_bytes = 0
        """Length of the request's body. All of it stays in memory while a text in it is kept."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held now, beside those that are set aside."""
        return 0 if self._reservation is None else self._reservation.nbytes - self._aside

    async def require(self, nbytes: int) -> None:
        """Hold at least `nbytes`, or the whole budget if it is smaller.

        Raises:
            OverloadedError: If there is no room, or not in time.
        """
        nbytes = min(nbytes + self._aside, self._budget.capacity)
        if self._reservation is None:
            if nbytes:
                reservation = self._budget.reserve(nbytes)
                await reservation.__aenter__()
                self._reservation = reservation
        elif nbytes > self._reservation.nbytes:
            self._reservation.grow(nbytes)

    def shrink(self, nbytes: int) -> None:
        """Hold at most `nbytes` from now on."""
        nbytes += self._aside
        if self._reservation is not None and nbytes < self._reservation.nbytes:
            self._reservation.shrink(nbytes)

    async def set_aside(self, nbytes: int) -> None:
        """Hold `nbytes` besides, until the end: what is neither body nor media, and stays when
        media are fetched anew. Another number replaces the one before.

        Raises:
            OverloadedError: If there is no room, or not in time.
        """
        held = self.nbytes
        before, self._aside = self._aside, min(nbytes, self._budget.capacity - held)
        try:
            await self.require(held)
        except BaseException:
            self._aside = before
            raise
        self.shrink(held)

    def measure(self, refs: Iterable[MediaRef[Any] | None]) -> PayloadBytes:
        """Measure the request's media; a payload that several share exists once."""
        total = loaded = texts = to_decode = 0
        seen: set[int] = set()
        for ref in refs:
            if ref is None or id(ref.payload) in seen:
                continue
            seen.add(id(ref.payload))
            total += ref.num_bytes
            if ref.is_loaded:
                loaded += ref.num_bytes
            elif ref.held_bytes:
                texts += ref.held_bytes
                to_decode += ref.num_bytes
        # A text is a view of the body, which goes as a whole.
        held = loaded + (max(texts, self.body_bytes) if texts else 0)
        return PayloadBytes(total, held, held + to_decode)

    def release(self) -> None:
        """Hold nothing; it may hold something again afterwards."""
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
