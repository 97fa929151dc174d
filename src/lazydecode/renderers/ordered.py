"""The ordered worker: the one thread that changes caches, in the order in which it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

Note = Callable[[], object]
_SOON_S: Final = 0.05
"""How long a note waits for a job to go with."""


class OrderedWorker(Executor):
    """Runs jobs on one thread, one after the other, and notes between them.

    Waking a thread takes as long as a tenth of a request that is answered from the cache. What
    nobody waits for, such a request's note of what it used, goes with the next job.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._notes: list[Note] = []
        self._timed_by: asyncio.AbstractEventLoop | None = None

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run `fn` after all that was asked for before.

        Raises:
            RuntimeError: If the worker was shut down.
        """
        with self._lock:
            self._send_notes()
            return self._pool.submit(fn, *args, **kwargs)

    def note(self, note: Note) -> None:
        """Run `note` before the jobs to come; soon, if none comes. For an event loop's thread.

        Args:
            note: Must not raise; nobody would hear of it.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            self._notes.append(note)
            # A loop that has ended runs no timer: notes that it left go with those of the next.
            is_timed = len(self._notes) > 1 and self._timed_by is loop
            self._timed_by = loop
        if not is_timed:
            loop.call_later(_SOON_S, self.flush)

    def flush(self) -> None:
        """Let the notes wait no more."""
        with self._lock:
            self._send_notes()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; with `wait`, return when all are done and the thread is gone."""
        self.flush()
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _send_notes(self) -> None:
        if self._notes:
            notes, self._notes = self._notes, []
            self._pool.submit(_run, notes)


def _run(notes: list[Note]) -> None:
    for note in notes:
        note()
