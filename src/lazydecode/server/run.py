"""From a model's name to a listening server, and down again without leaving anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import uvicorn
import uvloop

from lazydecode.config import Settings
from lazydecode.server.allocator import tune_allocator
from lazydecode.server.app import create_app
from lazydecode.server.context import ServerContext
from lazydecode.server.loading import load_context

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_DRAIN_S: Final = 30
"""How long running requests may take to finish after a stop signal."""
_KEEPALIVE_S: Final = 30
_BACKLOG: Final = 2048
_SWITCH_INTERVAL_S: Final = 0.001
"""The loop waits for the interpreter's lock behind decode and processing threads; the default
of 5 ms per thread adds up to noticeable lag."""


def run_server(
    model: str, settings: Settings, *, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve `model` until SIGINT or SIGTERM; return when everything is closed.

    Args:
        model: Local folder or hub id.
        settings: What to serve and how.
        on_ready: Called with the server's base URL once it answers.

    Raises:
        LazyDecodeError: If the model cannot be loaded.
        OSError: If the address cannot be listened on.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    tune_allocator()
    listener = _listen(settings.host, settings.port)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(model, settings, listener, on_ready))
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded: a taken port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    return listener


async def _serve(
    model: str,
    settings: Settings,
    listener: socket.socket,
    on_ready: Callable[[str], None] | None,
) -> None:
    stop = _StopSignals()
    with stop:
        logger.info("loading %s", model)
        context = await _until_stopped(stop, lambda: load_context(model, settings))
        # Closing a starting engine ends it, so this may be cancelled.
        starting = asyncio.create_task(_enter(context), name="start-engine")
        stop.on_first = starting.cancel
        try:
            running = await starting
        except asyncio.CancelledError:
            logger.info("stopped while starting")
            return
        async with running:
            await _answer_requests(context, listener, stop, on_ready)
    logger.info("stopped")


async def _enter(context: ServerContext) -> contextlib.AsyncExitStack:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(context.running())
        return stack.pop_all()


async def _answer_requests(
    context: ServerContext,
    listener: socket.socket,
    stop: _StopSignals,
    on_ready: Callable[[str], None] | None,
) -> None:
    """Serve until a stop signal; running requests may then finish."""
    server = _Server(
        uvicorn.Config(
            create_app(context, runs_context=False),
            log_config=None,
            access_log=False,
            http="httptools",
            loop="none",
            lifespan="off",
            timeout_graceful_shutdown=_DRAIN_S,
            timeout_keep_alive=_KEEPALIVE_S,
            backlog=_BACKLOG,
        )
    )

    def begin_to_stop() -> None:
        logger.info("stopping: running requests may finish; a second signal ends them")
        server.should_exit = True

    stop.on_first, stop.on_second = begin_to_stop, server.force
    if stop.is_set:
        begin_to_stop()
    announcing = asyncio.create_task(
        _announce(server, listener, context, on_ready), name="announce"
    )
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        await asyncio.wait((announcing,))


async def _announce(
    server: uvicorn.Server,
    listener: socket.socket,
    context: ServerContext,
    on_ready: Callable[[str], None] | None,
) -> None:
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    logger.info("serving %s at %s", ", ".join(context.model_names), url)
    if on_ready is not None:
        on_ready(url)


async def _until_stopped(stop: _StopSignals, load: Callable[[], _T]) -> _T:
    """Load on a thread of its own; a stop signal ends the process at once.

    Loading is one long call into foreign code that nothing can interrupt, and there is nothing
    yet that would have to be closed.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[_T] = loop.create_future()

    def deliver(result: _T | None, error: BaseException | None) -> None:
        if error is not None:
            loaded.set_exception(error)
        else:
            loaded.set_result(result)  # type: ignore[arg-type]  # None only if load returns it

    def run() -> None:
        result, error = None, None
        try:
            result = load()
        except BaseException as exc:  # delivered to the waiting task
            error = exc
        loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="load-model", daemon=True).start()
    stopping = asyncio.create_task(stop.wait(), name="stop-signal")
    await asyncio.wait((loaded, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not loaded.done():
        logger.info("stopped while loading")
        logging.shutdown()
        os._exit(0)
    stopping.cancel()
    return loaded.result()


class _StopSignals:
    """SIGINT and SIGTERM: the first one calls `on_first`, the next ones call `on_second`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.on_first: Callable[[], object] | None = None
        self.on_second: Callable[[], object] | None = None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def __exit__(self, *exc_info: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        react = self.on_second if self._event.is_set() else self.on_first
        self._event.set()
        if react is not None:
            react()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would raise the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def force(self) -> None:
        """Stop waiting for running requests."""
        self.force_exit = True
