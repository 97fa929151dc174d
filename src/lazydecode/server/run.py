"""From a model's name to a listening server, and down again without leaving anything behind.

The order of a start: bind (a taken port is told at once), import what all processes need, fork
the one that runs the model, import what loads a model, fork the one that proves it, import the
rest, then load the front end. Forks come while this process has one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final

from lazydecode.config import Settings
from lazydecode.engine.child import Child, ForkedChild, can_fork
from lazydecode.errors import LazyDecodeError
from lazydecode.server.allocator import tune_allocator
from lazydecode.server.preloading import (
    preload_generation,
    preload_libraries,
    preload_models,
    preload_server,
)
from lazydecode.server.thread_slices import shorten_slices

if TYPE_CHECKING:
    from lazydecode.server.early_proof import EarlyProof
    from lazydecode.server.membership import Member

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 0.001
"""The loop waits for the interpreter's lock behind decode and processing threads; the default
of 5 ms per thread adds up to noticeable lag."""


def run_server(
    model: str, settings: Settings, *, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve `model` until SIGINT or SIGTERM; return when everything is closed.

    To be called on the main thread.

    Args:
        model: Local folder or hub id.
        settings: What to serve and how.
        on_ready: Called with the server's base URL once it answers.

    Raises:
        LazyDecodeError: If the model cannot be loaded.
        OSError: If the address cannot be listened on.
    """
    listeners = _listen(settings.host, settings.port, settings.workers)
    try:
        _end_on_signals()
        logger.info("loading %s", model)
        generates = settings.engine != "none"
        preload_libraries()
        kept = [listener.fileno() for listener in listeners]
        child = None
        if generates and settings.workers == 1:
            child = _fork_engine(model, settings, close=kept)
        elif generates:
            preload_generation()  # an engine that has to be started anew has it then
        if child is not None:
            kept.append(child.control.fileno())
        preload_models()
        from lazydecode.server.early_proof import begin_proof

        proof = begin_proof(model, settings, close=kept)
        if proof is not None:
            kept.append(proof.fileno())
        serving = _Announcement(listeners[0], on_ready)
        preload_server()
        if settings.workers == 1:
            nursery = _fork_nursery(settings, close=kept)
            _run_front_end(
                model, settings, listeners[0], serving, child=child, nursery=nursery, proof=proof
            )
        else:
            _supervise(model, settings, listeners, serving, proof)
    finally:
        for listener in listeners:
            listener.close()


class _Announcement:
    """Says that the server serves, and where."""

    def __init__(self, listener: socket.socket, on_ready: Callable[[str], None] | None) -> None:
        host, port = listener.getsockname()[:2]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._on_ready = on_ready

    def __call__(self, names: Sequence[str]) -> None:
        logger.info("serving %s at %s", ", ".join(names), self._url)
        if self._on_ready is not None:
            self._on_ready(self._url)


def _run_front_end(
    model: str,
    settings: Settings,
    listener: socket.socket,
    on_ready: Callable[[Sequence[str]], None],
    *,
    child: Child | None = None,
    nursery: Child | None = None,
    member: Member | None = None,
    proof: EarlyProof | None = None,
) -> None:
    # After the forks: an engine keeps the allocator's defaults.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    tune_allocator()
    shorten_slices()
    import uvloop

    from lazydecode.server.serving import serve

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve(
                model,
                settings,
                listener,
                child=child,
                nursery=nursery,
                member=member,
                proof=proof,
                on_ready=on_ready,
            )
        )


def _supervise(
    model: str,
    settings: Settings,
    listeners: list[socket.socket],
    on_ready: Callable[[Sequence[str]], None],
    proof: EarlyProof | None,
) -> None:
    """Run several workers and their engine; each in a process that is forked from this one."""
    from lazydecode.cache.shared_bindings import SharedUuidBindings
    from lazydecode.engine.core import main as run_engine
    from lazydecode.server import membership
    from lazydecode.server.supervisor import Supervisor

    if not can_fork():
        raise OSError("workers cannot be forked here (a GPU driver is open, or macOS): use one")
    own = settings.of_worker
    bindings = SharedUuidBindings()  # before the forks, which share it
    if proof is not None:
        with contextlib.closing(proof):
            proof.wait()  # once, and every worker knows

    def run_worker(number: int, listener: socket.socket, control: socket.socket) -> int:
        name_logs(f"worker-{number}[%(process)d] ")
        # While there is one thread.
        nursery = _fork_nursery(own, close=[listener.fileno(), control.fileno()])
        # A supervisor that is gone took the engine with it.
        member = membership.Member(control, on_lost=lambda: os._exit(1), bindings=bindings)
        try:
            _run_front_end(
                model,
                own,
                listener,
                lambda names: member.say(membership.Serving()),
                nursery=nursery,
                member=member,
                proof=proof,
            )
        except (LazyDecodeError, OSError) as exc:
            member.say(membership.Failed(str(exc)))
            return 1
        return 0

    Supervisor(
        listeners,
        run_worker=run_worker,
        run_engine=run_engine,
        grace_s=settings.shutdown_grace,
        silence_s=settings.worker_timeout,
        on_serving=lambda: on_ready(settings.served_model_name or (model,)),
    ).run()
    logger.info("stopped")


def name_logs(name: str) -> None:
    """Put a process's name before its log lines."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {name}%(name)s: %(message)s")
        )


def _fork_engine(model: str, settings: Settings, *, close: Sequence[int]) -> Child | None:
    """Return an engine process that loads `model`; None: it is to be spawned."""
    if not can_fork():
        return None

    def run(control: socket.socket) -> int:
        from lazydecode.engine import core
        from lazydecode.engine.factory import load_early

        name_logs("engine[%(process)d] ")
        gc.disable()  # until the model is loaded, as in `engine.boot`

        def prepare() -> Mapping[str, object]:
            preload_generation()
            # Code that comes with a model is copied by Transformers, one process at a time.
            return {} if settings.trust_remote_code else load_early(model, settings)

        return core.main(control, prepare=prepare)

    try:
        return ForkedChild(run, close=close, name="lazydecode-eng")
    except OSError as exc:
        logger.warning("the engine cannot be forked (%s); it is spawned", exc)
        return None


def _fork_nursery(settings: Settings, *, close: Sequence[int]) -> Child | None:
    """Return a process that workers can be forked from; None: threads do their work.

    Args:
        settings: How many workers there shall be.
        close: Descriptors that the process must not keep.
    """
    if not settings.num_media_processes:
        return None
    from lazydecode.server.nursery import NAME, main

    try:
        if not can_fork():
            raise OSError("a GPU driver is open, or this is macOS")
        return ForkedChild(main, close=close, name=NAME)
    except OSError as exc:
        logger.warning("no processes for media (%s); threads decode and process", exc)
        return None


def _end_on_signals() -> None:
    """Until the event loop has its own handlers: nothing has to be closed yet."""

    def end(number: int, frame: FrameType | None) -> None:
        logger.info("stopped while loading")
        logging.shutdown()
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def _listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Bind before anything is loaded; connections are refused until there is who answers.

    Several sockets share one port, which the first of them must have had for itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listeners: list[socket.socket] = []
    try:
        with contextlib.ExitStack() as stack:
            first = _bound(family, host, port, is_shared=False)
            if count == 1:
                return [first]
            with first:
                port = first.getsockname()[1]
            for _ in range(count):
                listener = _bound(family, host, port, is_shared=True)
                stack.callback(listener.close)
                listeners.append(listener)
            stack.pop_all()
    except OSError as exc:
        raise OSError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    return listeners


def _bound(family: int, host: str, port: int, *, is_shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
