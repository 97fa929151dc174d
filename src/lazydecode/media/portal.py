"""`Portal`: an event loop in a thread of its own, the way of blocking callers to async code."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Portal:
    """Runs coroutines for blocking callers. The thread starts with the first call.

    The lock covers starting and stopping. The thread does not keep the interpreter alive: at
    exit the loop is stopped and the thread joined, closed or not.

    Args:
        on_stop: Awaited on the loop when it stops, after all else on it has ended.
    """

    def __init__(self, on_stop: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether there is a thread now."""
        return self._thread is not None and self._thread.is_alive()

    def call(
        self,
        function: Callable[_P, Coroutine[Any, Any, _T]],
        /,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Run `function(*args, **kwargs)` on the loop and return what it returns.

        If the waiting thread is interrupted (Ctrl-C), the coroutine is cancelled.

        Raises:
            RuntimeError: If the portal is closed, or this is called on its own thread.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking call on the portal's own thread would wait for itself")
        with self._lock:
            # Under the lock: `close` stops the loop after it has seen this, or this fails.
            loop = self._running_loop()
            future = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs on the loop, stop it, and join the thread."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        atexit.unregister(self.close)
        if thread.is_alive():  # Not in a child process after a fork.
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._is_closed:
            raise RuntimeError("the blocking form was used after close")
        if self._loop is None or not self.is_running:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run,
                args=(self._loop, self._on_stop),
                name="lazydecode-portal",
                daemon=True,
            )
            self._thread.start()
            atexit.unregister(self.close)
            atexit.register(self.close)
        return self._loop


def _run(
    loop: asyncio.AbstractEventLoop, on_stop: Callable[[], Coroutine[Any, Any, None]] | None
) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        if on_stop is not None:
            loop.run_until_complete(on_stop())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
