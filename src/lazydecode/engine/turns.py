"""Running a function step by step, although it does not return between its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator


class _CancelledError(BaseException):
    """Unwinds the function when nobody wants its next step; not for the function to catch."""


class Stepper(Iterator[None]):
    """Runs `function(pause)` in a thread of its own, up to its next `pause()` per `next`.

    Either the caller or the thread runs, never both, so they need no further locks between
    them. What the function raises comes out of `next`. `close` unwinds it at its pause.
    """

    def __init__(self, function: Callable[[Callable[[], None]], None], *, name: str) -> None:
        self._function = function
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._cancelled = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __next__(self) -> None:
        self._check_ended()
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._paused.acquire()
        self._check_ended()

    def close(self) -> None:
        """Unwind the function, if it runs, and return once it has ended."""
        if self._ended or self._thread.ident is None:
            self._ended = True
            return
        self._cancelled = True
        self._go.release()
        self._thread.join()

    def _check_ended(self) -> None:
        if not self._ended:
            return
        if self._thread.ident is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def _run(self) -> None:
        try:
            self._function(self._pause)
        except _CancelledError:
            pass  # as asked
        except BaseException as exc:
            # Wide: it goes to whoever called `next`.
            self._error = exc
        self._ended = True
        self._paused.release()

    def _pause(self) -> None:
        self._paused.release()
        self._go.acquire()
        if self._cancelled:
            raise _CancelledError
