"""Engine processes forked from one that has imported what all of them import.

A spawned engine imports torch and Transformers anew: ten times the work of loading a tiny model,
for each of the dozens that the tests start. Here a source process imports them once per test
process, as `lazydecode serve` does before it forks its engine, and forks what tests ask for.
Commands and scripts that tests run as processes of their own are not touched: those fork and spawn
as always, and `engine/test_shared.py` spawns one too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, Final

from lazydecode.engine.child import ForkedChild, SpawnedChild

_SIZE: Final = struct.Struct("<I")
_PID: Final = struct.Struct("<i")
_MAIN: Final = "lazydecode.engine.core:main"
_PR_SET_CHILD_SUBREAPER: Final = 36


class EngineSource:
    """The source process as its parent sees it, which becomes the parent of the engines too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source: SpawnedChild | None = None

    def fork(self, main: str = _MAIN) -> AdoptedChild:
        """Return a new engine process, with our import path, environment, folder and stderr."""
        state = {
            "main": main,
            "path": [os.getcwd() if entry == "" else entry for entry in sys.path],
            "environ": dict(os.environ),
            "cwd": os.getcwd(),
        }
        message = json.dumps(state).encode()
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock, _adopting():
                control = self._running().control
                socket.send_fds(control, [_SIZE.pack(len(message))], [theirs.fileno(), 2])
                control.sendall(message)
                (pid,) = _PID.unpack(_read(control, _PID.size))
        except BaseException:
            ours.close()
            raise
        return AdoptedChild(pid, ours)

    def close(self) -> None:
        """End the source; engines go on."""
        if self._source is not None:
            self._source.control.close()
            self._source.wait(10)
            self._source.kill()

    def _running(self) -> SpawnedChild:
        if self._source is None or self._source.poll() is not None:
            self._source = SpawnedChild(f"{__name__}:{run_source.__name__}")
        return self._source


class AdoptedChild(ForkedChild):
    """A child of this process that another one forked for it."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        self._lock = threading.Lock()
        self._status: int | None = None


def run_source(control: socket.socket) -> int:
    """Import, then fork until the control socket closes; has one thread throughout."""
    from lazydecode.server.preloading import preload_generation, preload_libraries

    preload_libraries()
    preload_generation()
    for module in ("lazydecode.engine.core", "lazydecode.engine.transformers"):
        importlib.import_module(module)
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, _SIZE.size, 2)
        if not head:
            return 0
        state = json.loads(_read(control, *_SIZE.unpack(head)))
        control.sendall(_PID.pack(_fork(state, descriptors, control)))
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(state: dict[str, Any], descriptors: list[int], control: socket.socket) -> int:
    """Fork an engine by way of a child that ends at once: our parent inherits it."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        engine = os.fork()
        if engine:
            os.write(writer, _PID.pack(engine))
            os._exit(0)
        try:
            os.close(reader)
            os.close(writer)
            control.close()
            while os.getppid() == between:
                time.sleep(0.001)
            _run_engine(state, *descriptors)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    os.waitpid(between, 0)
    with open(reader, "rb") as pipe:
        (pid,) = _PID.unpack(pipe.read())
    return int(pid)


def _run_engine(state: dict[str, Any], control: int, stderr: int) -> None:
    """What `lazydecode.engine.boot` does in a fresh interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(stderr, 2)
    os.dup2(stderr, 1)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(state["environ"])
    os.chdir(state["cwd"])
    sys.path[:] = state["path"]
    module, _, name = state["main"].partition(":")
    status = getattr(importlib.import_module(module), name)(socket.socket(fileno=control))
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of descendants whose own parent ends meanwhile."""
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return data
