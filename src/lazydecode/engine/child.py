"""A process as its parent sees it: spawned anew, or forked from a parent that is ready.

Both hear of their work over a control socket, an engine of its front ends, and end when it closes.
A spawned one is a fresh interpreter and imports torch and Transformers for itself, which takes
seconds; a forked one has what its parent had imported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

logger = logging.getLogger(__name__)

_BOOT: Final = Path(__file__).with_name("boot.py")
_ATTACH: Final = struct.Struct("<Q")  # bytes of shared memory; the descriptors come beside it
_POLL_S: Final = 0.01
_DRIVER: Final = "/dev/nvidia"


class Child(Protocol):
    """A process that was started here. Methods are thread-safe."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    @property
    def control(self) -> socket.socket:
        """Our end of the control socket."""
        ...

    def poll(self) -> int | None:
        """Return how it ended, as `subprocess` counts: negative for a signal; None: it runs."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Return how it ended; None if it still runs then."""
        ...

    def kill(self) -> None:
        """End it at once; nothing if it has ended."""
        ...


def attach_front_end(
    control: socket.socket, channel: socket.socket, memory: tuple[int, int] | None
) -> None:
    """Tell an engine of a front end.

    Args:
        control: The engine's control socket.
        channel: The engine's end of the connection to the front end; the caller closes its copy.
        memory: Descriptor and size of the memory that they share, if there is.

    Raises:
        OSError: If the engine is gone.
    """
    descriptors, size = [channel.fileno()], 0
    if memory is not None:
        descriptors.append(memory[0])
        size = memory[1]
    socket.send_fds(control, [_ATTACH.pack(size)], descriptors)


def receive_front_end(control: socket.socket) -> tuple[socket.socket, tuple[int, int] | None]:
    """Return the next front end's connection and memory, in the engine.

    Raises:
        EOFError: If the engine shall end.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(control, _ATTACH.size, 2)
    except OSError as exc:
        raise EOFError(str(exc)) from exc
    if len(data) < _ATTACH.size or not descriptors:
        raise EOFError("the control socket was closed")
    (size,) = _ATTACH.unpack(data)
    memory = (descriptors[1], size) if len(descriptors) > 1 else None
    return socket.socket(fileno=descriptors[0]), memory


class SpawnedChild:
    """A fresh interpreter: no threads, locks or CUDA of ours in it, whatever state we are in.

    Not `multiprocessing`, which would import the caller's main module again and leave a resource
    tracker behind.

    Args:
        main: Module and name of the function that it runs, as `module:name`; as for a `ForkedChild`
            it gets its end of the control socket, and returns the status.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, main: str = "lazydecode.engine.core:main") -> None:
        self.control, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own file, no shell
                [sys.executable, "-P", str(_BOOT), str(theirs.fileno()), main],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the command that runs the front end
            )
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()
        path = json.dumps([str(Path.cwd()) if entry == "" else entry for entry in sys.path])
        with contextlib.suppress(OSError):  # it ended at once: whoever attaches will notice
            self.control.sendall(struct.pack("<I", len(path.encode())) + path.encode())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return how it ended; None: it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Return how it ended; None if it still runs then."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


class ForkedChild:
    """A copy of this process, which runs `main(control)` and ends with the status it returns.

    To be made while this process has one Python thread: a lock that another one holds would stay
    locked in the copy for ever. The lock covers reaping.

    Args:
        main: Runs in the child; gets its end of the control socket.
        close: Descriptors that the child must not keep.
        name: Of the child in lists of processes, where the system can; at most 15 letters.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(
        self,
        main: Callable[[socket.socket], int],
        *,
        close: Iterable[int] = (),
        name: str = "lazydecode",
    ) -> None:
        ours, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write what is in the buffers
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of native threads too: those of BLAS, which survive it.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if self.pid == 0:
            _run_forked(main, theirs, [ours.fileno(), *close], name)
        theirs.close()
        self.control = ours
        self._lock = threading.Lock()
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return how it ended; None: it runs."""
        with self._lock:
            if self._status is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # reaped by another, as nobody should
                    pid, status = self.pid, 0
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
            return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Return how it ended; None if it still runs then."""
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return status

    def kill(self) -> None:
        """End it at once; nothing if it has ended."""
        self.poll()
        # Nobody else reaps under the lock: the number is this process's until then.
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)


def _run_forked(
    main: Callable[[socket.socket], int], control: socket.socket, close: Sequence[int], name: str
) -> None:
    """Become the child; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)  # standard output belongs to the command that runs the front end
        name_process(name)
        status = main(control)
    except BaseException:
        # Wide: nothing may run on into the code of the parent, whose copy this is.
        logger.exception("the process %s failed", name)
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def name_process(name: str) -> None:
    """Name this process in lists of processes, where the system can; at most 15 letters."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def can_fork() -> bool:
    """Whether a copy of this process would work: one Python thread, and no GPU in use.

    Native pools of BLAS libraries are ended and restarted by those themselves. CUDA does not
    survive a fork once its driver was opened, which merely counting the devices does.
    """
    if threading.active_count() > 1 or not hasattr(os, "fork") or sys.platform == "darwin":
        return False
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").startswith(_DRIVER):
                    return False
    return True
