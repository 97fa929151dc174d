"""Token ids become text piece by piece: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_MAX_WINDOW: Final = 256
"""Tokens decoded again at each step while none of them ends a character."""


class Detokenizer:
    """Turns a stream of token ids into a stream of text.

    The pieces, `finish` included, joined are the text of all ids up to the first stop string.

    Args:
        decode: Token ids to text, special tokens left out.
        stop: Strings that end the text; they are not part of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._holdback = max((len(text) for text in stop), default=1) - 1
        # The tokens since a little before the last whole character: text is taken as what a
        # decode from there adds, because the first token of a decode can lose its space.
        self._window: list[int] = []
        self._new = 0
        self._taken_chars = 0
        self._pending = ""
        self.stopped_by: str | None = None
        """The stop string that was met."""

    def push(self, ids: Sequence[int]) -> str:
        """Add `ids` and return the text that is now certain; empty after a stop string."""
        if self.stopped_by is not None:
            return ""
        self._window.extend(ids)
        self._new += len(ids)
        self._pending += self._take()
        return self._release(self._holdback)

    def finish(self) -> str:
        """Return the rest, an incomplete last character included."""
        if self.stopped_by is not None:
            return ""
        self._pending += self._take(last=True)
        return self._release(0)

    def _take(self, *, last: bool = False) -> str:
        text = self._decode(self._window)
        # Only the last character can still change, and only if it is incomplete.
        whole = last or not text.endswith("\ufffd")
        certain = text if whole else text[:-1]
        piece, self._taken_chars = (
            certain[self._taken_chars :],
            max(len(certain), self._taken_chars),
        )
        if whole or len(self._window) > _MAX_WINDOW:
            self._window = self._window[len(self._window) - self._new :]
            self._taken_chars = len(self._decode(self._window))
            self._new = 0
        return piece

    def _release(self, holdback: int) -> str:
        hits = [(at, stop) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if hits:
            at, self.stopped_by = min(hits, key=lambda hit: hit[0])
            text, self._pending = self._pending[:at], ""
            return text
        keep = min(holdback, len(self._pending))
        keep = next((n for n in range(keep, 0, -1) if self._may_stop(self._pending[-n:])), 0)
        cut = len(self._pending) - keep
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def _may_stop(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stop)
