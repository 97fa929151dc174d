"""The media threads: one owner for the pool that decodes and the pool that reads and digests."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

DEFAULT_MAX_WORKERS: Final = 8
_QUICK_WORKERS: Final = 4


def yield_cpu(niceness: int) -> None:
    """Let the calling thread step back behind the process's other threads by `niceness` (0 to 19).

    For threads that compute: an event loop that wakes up then gets a core at once, while idle
    cores are used as before. Only Linux has a priority per thread (setpriority(2), "C
    library/kernel differences"); elsewhere nothing happens.
    """
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        lowered = os.getpriority(os.PRIO_PROCESS, thread) + niceness
        os.setpriority(os.PRIO_PROCESS, thread, min(lowered, 19))


class MediaExecutor(Executor):
    """Owns the media threads. Creating one starts nothing; the first job does.

    As an `Executor` it runs decodes. `quick` is a second, small pool for what is linear in an
    encoded payload (reading, digesting, base64): a request that only needs an identity then
    never waits behind the decodes of others. A job never waits for another job of its pool.

    Args:
        max_workers: Threads for decodes, at least 1.
        niceness: How far the decode threads step back behind the other threads, as
            `yield_cpu` says.
    """

    def __init__(self, max_workers: int = DEFAULT_MAX_WORKERS, *, niceness: int = 0) -> None:
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        self.max_workers = max_workers
        self.quick: Executor = LazyThreadPool(_QUICK_WORKERS, "lazydecode-media-quick")
        self._decodes = LazyThreadPool(max_workers, "lazydecode-media", niceness=niceness)

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run `fn` on a decode thread.

        Raises:
            RuntimeError: If the executor was shut down.
        """
        return self._decodes.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; with `wait`, return when all are done and the threads are gone."""
        self._decodes.shutdown(wait, cancel_futures=cancel_futures)
        self.quick.shutdown(wait, cancel_futures=cancel_futures)

    def __repr__(self) -> str:
        return f"<MediaExecutor of {self.max_workers} threads>"


class LazyThreadPool(Executor):
    """A `ThreadPoolExecutor` that exists from its first job on.

    The lock covers the creation of the pool and nothing else.
    """

    def __init__(self, max_workers: int, name: str, *, niceness: int = 0) -> None:
        self._max_workers = max_workers
        self._name = name
        self._niceness = niceness
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._is_shut_down = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run `fn` on a thread of the pool.

        Raises:
            RuntimeError: If the pool was shut down.
        """
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the media threads were shut down")
            # A forked child has the pool but not its threads: jobs would wait for ever.
            if self._pool is None or self._pid != os.getpid():
                self._pool = ThreadPoolExecutor(
                    self._max_workers, self._name, yield_cpu, (self._niceness,)
                )
                self._pid = os.getpid()
            pool = self._pool
        return pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; with `wait`, return when the threads are gone."""
        with self._lock:
            self._is_shut_down = True
            pool = self._pool
        if pool is not None:
            pool.shutdown(wait, cancel_futures=cancel_futures)


global_thread_pool: Final = MediaExecutor()
"""The executor of whoever names no other. The interpreter joins its threads at exit."""
