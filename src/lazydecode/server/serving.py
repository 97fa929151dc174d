"""One front end process: it answers from the start, loads, serves, and closes what it opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

import uvicorn

from lazydecode.config import Settings
from lazydecode.engine.child import Child
from lazydecode.server.app import create_app
from lazydecode.server.context import ServerContext
from lazydecode.server.doorway import Doorway
from lazydecode.server.early_proof import EarlyProof
from lazydecode.server.http_protocol import BodyTurns, UncopiedBodies
from lazydecode.server.loading import load_context
from lazydecode.server.membership import Member
from lazydecode.server.stopping import StopSignals

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_KEEPALIVE_S: Final = 30
_BACKLOG: Final = 2048
_LAST_WORDS_S: Final = 1.0
"""How long clients of requests that were cancelled at the end have to read what is written."""


async def serve(
    model: str,
    settings: Settings,
    listener: socket.socket,
    *,
    child: Child | None = None,
    nursery: Child | None = None,
    member: Member | None = None,
    proof: EarlyProof | None = None,
    on_ready: Callable[[Sequence[str]], None],
) -> None:
    """Serve `model` until SIGINT or SIGTERM; in a worker until SIGTERM.

    Args:
        model: Local folder or hub id.
        settings: What to serve and how.
        listener: Bound.
        child: An engine process that waits for us, if there is.
        nursery: A process that workers can be forked from, if there is.
        member: Connection to the supervisor, in a worker.
        proof: What another process finds out about the model meanwhile.
        on_ready: Called with the names of the model once requests are served.

    Raises:
        LazyDecodeError: If the model cannot be loaded.
    """

    def kill_processes() -> None:
        for process in (child, nursery):
            if process is not None:
                process.kill()

    stop = StopSignals(
        settings.shutdown_grace,
        on_abandon=kill_processes,
        # Ctrl-C reaches the supervisor too, which sends SIGTERM.
        numbers=(signal.SIGTERM,) if member is not None else (signal.SIGINT, signal.SIGTERM),
    )
    door = Doorway()
    server = _Server(
        uvicorn.Config(
            door,
            log_config=None,
            access_log=False,
            http=partial(UncopiedBodies, turns=BodyTurns()),  # type: ignore[arg-type]  # makes one
            ws="none",
            proxy_headers=False,  # nobody looks at a client's address
            loop="none",
            lifespan="off",
            timeout_graceful_shutdown=settings.shutdown_grace,  # type: ignore[arg-type]  # a float does
            timeout_keep_alive=_KEEPALIVE_S,
            backlog=_BACKLOG,
        )
    )
    with stop:
        answering = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        try:
            context = await _until_stopped(
                stop,
                lambda: load_context(
                    model,
                    settings,
                    child=child,
                    nursery=nursery,
                    member=member,
                    proven=None if proof is None else proof.take,
                ),
            )
            if proof is not None:
                proof.close()
            # Closing a starting engine ends it, so this may be cancelled.
            starting = asyncio.create_task(_enter(context), name="start-engine")
            stop.on_first = starting.cancel
            try:
                running = await starting
            except asyncio.CancelledError:
                logger.info("stopped while starting")
                return
            async with running:
                door.open(create_app(context, runs_context=False))
                await _until_stopping(server, stop, lambda: on_ready(context.model_names))
                await _finish(server, answering)
        finally:
            await _finish(server, answering)
    logger.info("stopped")


async def _enter(context: ServerContext) -> contextlib.AsyncExitStack:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(context.running())
        return stack.pop_all()


async def _until_stopping(
    server: uvicorn.Server, stop: StopSignals, on_ready: Callable[[], None]
) -> None:
    """Say that requests are served; return when no more shall be."""
    stop.on_first = lambda: logger.info(
        "stopping: running requests may finish; a second signal ends them"
    )
    if stop.is_set:
        stop.on_first()
        return
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    on_ready()
    await stop.wait()


async def _finish(server: uvicorn.Server, answering: asyncio.Task[None]) -> None:
    """Take no more requests, and return when those that run have ended, or were cancelled."""
    server.should_exit = True
    await answering
    if not server.server_state.tasks:
        return
    _, left = await asyncio.wait(server.server_state.tasks, timeout=_LAST_WORDS_S)
    if left:
        for connection in list(server.server_state.connections):
            if isinstance(connection, UncopiedBodies) and connection.flow.write_paused:
                connection.transport.abort()  # who does not read would be waited for
        await asyncio.wait(left)


async def _until_stopped(stop: StopSignals, load: Callable[[], _T]) -> _T:
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
        stop.abandon(0)
    stopping.cancel()
    return loaded.result()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would raise the signal again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
