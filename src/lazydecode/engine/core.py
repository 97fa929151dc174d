"""The engine process: a scheduler and a model, and a receiver cache per front end.

The main thread loads and runs the model. One thread takes front ends from the control socket, and
ends the process when that closes. Each front end has a reader (see `connection`). The watch ends
the process when its parent has died.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from lazydecode.engine.arena import ArenaView
from lazydecode.engine.channel import Channel
from lazydecode.engine.child import receive_front_end
from lazydecode.engine.connection import Connection, Loaded, split_id
from lazydecode.engine.generation import ModelRunner
from lazydecode.engine.messages import Configure, Outputs
from lazydecode.engine.protocol import EngineOutput
from lazydecode.engine.scheduler import Scheduler
from lazydecode.errors import LazyDecodeError

logger = logging.getLogger(__name__)

_STALL: Final = struct.pack("ll", 30, 0)
"""How long a front end may leave its answers unread, as a `timeval`; then it is dropped."""
_WATCH_INTERVAL_S: Final = 1.0
_GRACE_S: Final = 2.0
"""How long a running model step may take before the process ends without it."""


Prepare: TypeAlias = Callable[[], Mapping[str, object]]
"""Makes options of the runner that need not wait for what the front end says."""


def main(control: socket.socket, *, prepare: Prepare | None = None) -> int:
    """Run the engine until the control socket closes.

    Args:
        control: Brings front ends, as `child.attach_front_end` sends them.
        prepare: Runs before there is a front end, or while it gets ready. What it raises is told
            to the front end, as if the runner had raised it.

    Returns:
        The exit status.
    """
    parent = os.getppid()
    threading.Thread(target=_watch_parent, args=(parent,), name="engine-watch", daemon=True).start()
    return _Core(control, prepare).run()


class _Core:
    """Wires front ends, scheduler and model together.

    The lock covers the list of connections and the first configuration.
    """

    def __init__(self, control: socket.socket, prepare: Prepare | None) -> None:
        self._control = control
        self._prepare = prepare
        self._changed = threading.Condition()
        self._connections: list[Connection] = []
        self._configure: Configure | None = None
        self._loaded = Loaded()
        self._scheduler: Scheduler | None = None
        self._is_ending = threading.Event()

    def run(self) -> int:
        """Serve until the control socket closes."""
        threading.Thread(target=self._take_front_ends, name="engine-control", daemon=True).start()
        prepared: Mapping[str, object] | Exception = {}
        if self._prepare is not None:
            try:
                prepared = self._prepare()
            except Exception as exc:  # told once there is somebody to tell
                prepared = exc
        with self._changed:
            while self._configure is None:
                self._changed.wait()
            configure = self._configure
        _configure_logging(configure.log_level)
        try:
            if isinstance(prepared, Exception):
                raise prepared
            runner = _load_runner(configure, prepared)
        except Exception as exc:
            # Wide: whatever a model folder provokes is told to the one who starts the server.
            logger.debug("the model cannot be loaded", exc_info=True)
            text = f"{type(exc).__name__}: {exc}"
            self._loaded.fail(exc.message if isinstance(exc, LazyDecodeError) else text)
            # The front ends hear of it, and close.
            self._is_ending.wait(_GRACE_S)
            return 1
        gc.enable()
        gc.freeze()
        try:
            self._scheduler = Scheduler(
                runner,
                max_batch_size=configure.max_batch_size,
                send=self._send_outputs,
                fail=self._send_failure,
                on_idle=self._send_released,
            )
            self._loaded.succeed(runner.info, self._scheduler)
            self._scheduler.run()
        except Exception:
            # Wide: this is the process's last line. The front ends see their sockets close.
            logger.exception("the engine cannot go on")
            return 1
        return 0

    # -- the control thread

    def _take_front_ends(self) -> None:
        number = 0
        try:
            while True:
                sock, memory = receive_front_end(self._control)
                view = None if memory is None else ArenaView(*memory)
                # One front end that was halted must not halt the model for the others.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _STALL)
                channel = Channel(sock, view=view)
                connection = Connection(number, channel, view, self._loaded, self._begin)
                with self._changed:
                    self._connections = [c for c in self._connections if not c.is_closed]
                    self._connections.append(connection)
                connection.start()
                number += 1
        except EOFError:
            pass  # no front end is left, or none wants more
        except BaseException:
            # Wide: without this thread nobody can end the process.
            logger.exception("the engine's control failed")
            os._exit(1)
        self._is_ending.set()
        if self._scheduler is None:
            os._exit(0)  # loading cannot be interrupted
        self._scheduler.stop()
        time.sleep(_GRACE_S)
        os._exit(0)

    def _begin(self, configure: Configure) -> None:
        """Take the first configuration; those of further front ends say the same."""
        with self._changed:
            if self._configure is None:
                self._configure = configure
                self._changed.notify_all()

    # -- the scheduler's side, on the main thread

    def _send_outputs(self, outputs: list[EngineOutput]) -> None:
        by_number: dict[int, list[EngineOutput]] = {}
        for output in outputs:
            number, request_id = split_id(output.request_id)
            own = msgspec.structs.replace(output, request_id=request_id)
            by_number.setdefault(number, []).append(own)
        for connection in self._connections:
            if own_outputs := by_number.get(connection.number):
                connection.send(Outputs(own_outputs))
        self._send_released()

    def _send_failure(self, scheduled_id: str, error: Exception) -> None:
        number, request_id = split_id(scheduled_id)
        for connection in self._connections:
            if connection.number == number:
                connection.send_failure(request_id, error)

    def _send_released(self) -> None:
        for connection in self._connections:
            connection.send_released()


def _load_runner(configure: Configure, prepared: Mapping[str, object]) -> ModelRunner:
    module, _, name = configure.runner.partition(":")
    factory = getattr(importlib.import_module(module), name)
    # Pickled by our own front end, over a socket that nobody else holds.
    options = pickle.loads(configure.runner_options)  # noqa: S301
    runner: ModelRunner = factory(**options, **prepared)
    return runner


def _watch_parent(parent: int) -> None:
    """End the process when its parent has changed, that is, died.

    The closed socket says so too, but not while another process that was forked from the
    parent still holds its end.
    """
    while os.getppid() == parent:
        time.sleep(_WATCH_INTERVAL_S)
    os._exit(0)


def _configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s engine[%(process)d] %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,  # a forked process has its parent's handlers
    )
