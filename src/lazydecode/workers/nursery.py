"""The process that workers are forked from: it loads the model once, and then only forks.

It has one thread, so that a copy of it is whole. A worker costs what it writes to; the model's
processor, its tokenizer and all libraries are pages that all share.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import transformers

from lazydecode.config import Settings
from lazydecode.engine.child import ForkedChild
from lazydecode.errors import LazyDecodeError
from lazydecode.models.findings import Findings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.renderers.warm_up import sample_of
from lazydecode.workers.worker import Memory, process_item, run_worker

logger = logging.getLogger(__name__)

_SIZE: Final = struct.Struct("<Q")
_FORK: Final = struct.Struct("<QQ")
_PID: Final = struct.Struct("<q")
_WATCH_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1


class NurseryGoneError(OSError):
    """The process that workers are forked from has ended, or does not answer."""


@dataclass(frozen=True, slots=True)
class Configure:
    """What to load."""

    model: str
    settings: Settings
    fingerprint: str
    """The server's own; another one here would mean other results."""
    findings: Findings | None
    """What the server found out about the processor, so that it is not found out again."""


def run_nursery(
    control: socket.socket,
    prepare: Callable[[], object] | None = None,
    tidy: Callable[[], object] | None = None,
) -> int:
    """Load what the server says, then fork workers until the server is gone.

    Args:
        control: Connection to the server.
        prepare: Called in each worker before it begins.
        tidy: Called when the model is loaded, and in each worker once in many items.

    Returns:
        The exit status.
    """
    parent = os.getppid()
    try:
        (size,) = _SIZE.unpack(_read(control, _SIZE.size))
        # Pickled by our own server, over a socket that nobody else holds.
        configure: Configure = pickle.loads(_read(control, size))  # noqa: S301
    except EOFError:
        return 0
    # A spawned process has no handlers yet, and a forked one keeps its parent's.
    logging.basicConfig(
        level=configure.settings.log_level.upper(),
        format="%(asctime)s %(levelname)s media[%(process)d] %(name)s: %(message)s",
    )
    try:
        frontend = _load(configure)
    except Exception as exc:
        # Wide: whatever it is, the server is told, and goes on without workers.
        reason = exc.message if isinstance(exc, LazyDecodeError) else f"{type(exc).__name__}: {exc}"
        _say(control, reason)
        return 1
    if tidy is not None:
        tidy()  # what loading left free would be free in every worker
    if not _say(control, ""):
        return 0
    return _Nursery(control, parent, frontend, prepare, tidy).run()


def start_nursery(control: socket.socket, configure: Configure) -> None:
    """Tell a nursery what to load, and return when it is ready to fork. Blocks for seconds.

    Raises:
        OSError: If it cannot load it; says why.
        NurseryGoneError: If it is gone.
    """
    data = pickle.dumps(configure)
    try:
        control.sendall(_SIZE.pack(len(data)) + data)
        (size,) = _SIZE.unpack(_read(control, _SIZE.size))
        reason = _read(control, size).decode()
    except (ConnectionError, EOFError) as exc:
        raise NurseryGoneError("the process that workers are forked from is gone") from exc
    if reason:
        raise OSError(f"workers cannot load the model: {reason}")


def fork_worker(control: socket.socket, sock: socket.socket, memory: Memory | None) -> int:
    """Let a nursery fork a worker; return its process id.

    Args:
        control: Connection to the nursery.
        sock: The worker's end of its connection; the caller closes its own copy.
        memory: What it shares with the server; the caller closes its own descriptors.

    Raises:
        OSError: If it cannot be forked.
        NurseryGoneError: If the nursery has ended, or does not answer within the socket's time.
    """
    descriptors, sizes = [sock.fileno()], (0, 0)
    if memory is not None:
        descriptors += [memory.payloads_fd, memory.results_fd]
        sizes = (memory.payloads_bytes, memory.results_bytes)
    try:
        socket.send_fds(control, [_FORK.pack(*sizes)], descriptors)
        (pid,) = _PID.unpack(_read(control, _PID.size))
    except (ConnectionError, EOFError, TimeoutError) as exc:
        raise NurseryGoneError("the process that workers are forked from is gone") from exc
    if pid < 0:
        raise OSError("a worker cannot be forked")
    return int(pid)


class _Nursery:
    """Forks and reaps."""

    def __init__(
        self,
        control: socket.socket,
        parent: int,
        frontend: ModelFrontend,
        prepare: Callable[[], object] | None,
        tidy: Callable[[], object] | None,
    ) -> None:
        self._control = control
        self._parent = parent
        self._frontend = frontend
        self._prepare = prepare
        self._tidy = tidy
        self._workers: list[ForkedChild] = []

    def run(self) -> int:
        """Fork on request; return when the server is gone, which ends the workers."""
        while os.getppid() == self._parent:
            # The closed socket says so too, but not while another process that was forked from
            # the server still holds its end.
            ready, _, _ = select.select([self._control], [], [], _WATCH_S)
            self._reap()
            if ready:
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._control, _FORK.size, 3)
                    if len(data) < _FORK.size:
                        break
                    self._control.sendall(_PID.pack(self._fork(data, descriptors)))
                except OSError:
                    break
        self._end()
        return 0

    def _fork(self, data: bytes, descriptors: list[int]) -> int:
        sizes = _FORK.unpack(data)
        memory = None
        if len(descriptors) == 3:
            memory = Memory(descriptors[1], sizes[0], descriptors[2], sizes[1])
        own = [self._control.fileno(), *(w.control.fileno() for w in self._workers)]
        nursery = os.getpid()

        def work(_: socket.socket) -> int:
            _die_with(nursery)
            if self._prepare is not None:
                self._prepare()
            sock = socket.socket(fileno=descriptors[0])
            return run_worker(sock, memory, self._frontend, tidy=self._tidy)

        try:
            worker = ForkedChild(work, close=own, name="lazydecode-item")
        except OSError as exc:
            logger.warning("a worker cannot be forked: %s", exc)
            return -1
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._workers.append(worker)
        return worker.pid

    def _reap(self) -> None:
        for worker in list(self._workers):
            if worker.poll() is not None:
                worker.control.close()
                self._workers.remove(worker)

    def _end(self) -> None:
        for worker in self._workers:
            worker.kill()


def _load(configure: Configure) -> ModelFrontend:
    # No thread may be left when workers are forked.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # the server has said it
    logging.getLogger(load_model_frontend.__module__).setLevel(logging.ERROR)
    os.nice(configure.settings.worker_niceness)

    def proven(mark: str) -> Findings | None:
        return configure.findings if mark == configure.fingerprint else None

    gc.disable()
    try:
        frontend = load_model_frontend(configure.model, configure.settings, proven=proven)
    finally:
        gc.enable()
    if frontend.fingerprint != configure.fingerprint:
        raise ValueError("its processor differs from the server's")
    for modality in frontend.modalities:
        try:
            _warm_up(frontend, modality)
        except Exception:
            # Wide: only the first item of each worker is slower for it.
            logger.debug("workers are not warmed up with one %s", modality, exc_info=True)
    gc.collect()
    gc.freeze()  # a collector that wrote into these objects would copy the shared pages
    return frontend


def _warm_up(frontend: ModelFrontend, modality: str) -> None:
    """Decode and process one small item: libraries that load late do it before the fork."""
    media_io = frontend.info.get_media_io(modality)
    recipe = media_io.get_decode_spec()
    if recipe is not None:
        process_item(
            frontend,
            modality,
            sample_of(modality),
            recipe=recipe,
            spec=None,
            options={},
            on_decoded=lambda _: None,
        )


def _die_with(parent: int) -> None:
    """End this process with its parent, whatever it is doing then (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that was said
            os._exit(0)


def _say(control: socket.socket, reason: str) -> bool:
    """Tell the server why there will be no workers; returns whether it is still there."""
    data = reason.encode()
    try:
        control.sendall(_SIZE.pack(len(data)) + data)
    except OSError:
        return False
    return True


def _read(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = control.recv(size - len(data))
        except OSError as exc:
            raise EOFError(str(exc)) from exc
        if not part:
            raise EOFError("the other side is gone")
        data += part
    return data
