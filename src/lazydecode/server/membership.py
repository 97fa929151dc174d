"""What a worker process and its supervisor say to each other, and the worker's end of it.

One socket per worker. A frame is its length and one JSON message; descriptors for the engine
come beside `Attach`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final

import msgspec

from lazydecode.cache import Bindings
from lazydecode.server.samples import Family

logger = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
_MAX_DESCRIPTORS: Final = 8
_CHUNK: Final = 1 << 16
_ATTACH_S: Final = 60.0
BEAT_S: Final = 1.0
COLLECT_S: Final = 2.0
"""How long the metrics of the other workers are waited for."""


class _Form(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Attach(_Form, frozen=True):
    """Worker: introduce me to the engine; its ends come as descriptors."""

    memory_bytes: int
    """Size of the shared memory; 0: there is none, and no second descriptor."""


class Attached(_Form, frozen=True):
    """Supervisor: it has them."""

    pid: int
    """Of the engine; 0: there is none."""


class Serving(_Form, frozen=True):
    """Worker: I am loaded and answer."""


class Alive(_Form, frozen=True):
    """Worker: my event loop goes round. Said every `BEAT_S` seconds."""


class Failed(_Form, frozen=True):
    """Worker: I cannot start, and end."""

    reason: str


class Group(_Form, frozen=True):
    """Supervisor: whether all workers serve."""

    is_complete: bool


class Clear(_Form, frozen=True):
    """Worker, and supervisor to the others: empty the caches."""


class Ask(_Form, frozen=True):
    """Worker: what are the others' metrics, beside mine? Supervisor: what are yours?"""

    number: int
    families: list[Family]
    """The worker's own, empty from the supervisor: they stay counted when the worker is gone."""


class Tell(_Form, frozen=True):
    """Worker: mine. Supervisor: theirs, and those of workers that are gone."""

    number: int
    families: list[Family]


Message = Attach | Attached | Serving | Alive | Failed | Group | Clear | Ask | Tell
_DECODER: Final = msgspec.json.Decoder(Message)


def send(sock: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Write one message.

    Raises:
        OSError: If the other side is gone, or does not read within the socket's time limit.
    """
    body = msgspec.json.encode(message)
    data = _LENGTH.pack(len(body)) + body
    sent = socket.send_fds(sock, [data], list(descriptors)) if descriptors else 0
    sock.sendall(data[sent:])


class Inbox:
    """Puts together what arrives at one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._data = bytearray()
        self.descriptors: list[int] = []
        """Those that came and were not taken yet, in order."""

    def receive(self) -> list[Message]:
        """Read once and return the messages that are complete now.

        Raises:
            EOFError: If the other side is gone.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, _MAX_DESCRIPTORS)
        except OSError as exc:
            raise EOFError(str(exc)) from exc
        self.descriptors += descriptors
        if not data:
            raise EOFError("the connection was closed")
        self._data += data
        messages: list[Message] = []
        while len(self._data) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + size
            if len(self._data) < end:
                break
            messages.append(_DECODER.decode(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return messages


class Member:
    """A worker's connection to its supervisor; an `EngineBroker`.

    A thread reads; the lock covers writing and what is asked.

    Args:
        sock: The worker's end.
        on_lost: Called when the supervisor is gone, on the reading thread.
        bindings: What uuids stand for, to all workers.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_lost: Callable[[], object],
        bindings: Bindings | None = None,
    ) -> None:
        self._socket = sock
        self.bindings = bindings
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._attaching: Future[int] | None = None
        self._asked: dict[int, Future[list[Family]]] = {}
        self._next_number = 0
        self.is_complete = False
        """Whether all workers serve, as far as the supervisor said."""
        self.read_own: Callable[[], list[Family]] = list
        """Returns this worker's metrics."""
        self._told: list[Family] = []
        """What it returned last."""
        self.on_clear: Callable[[], object] = lambda: None
        """Called, on the reading thread, when the caches shall be emptied."""
        threading.Thread(target=self._read, name="lazydecode-member", daemon=True).start()

    # -- what the worker says

    async def beat(self) -> None:
        """Tell the supervisor that the running event loop goes round, until cancelled."""
        while True:
            self.say(Alive())
            await asyncio.sleep(BEAT_S)

    def say(self, message: Serving | Alive | Failed | Clear) -> None:
        """Tell the supervisor; nothing if it is gone."""
        try:
            self._send(message)
        except OSError:
            logger.debug("the supervisor is gone")

    def attach(self, channel: socket.socket, memory: tuple[int, int] | None) -> int:
        """Have the supervisor hand these to the engine; returns its process id.

        Raises:
            OSError: If there is no engine, or no supervisor.
        """
        future: Future[int] = Future()
        self._attaching = future
        descriptors = [channel.fileno()] if memory is None else [channel.fileno(), memory[0]]
        self._send(Attach(0 if memory is None else memory[1]), descriptors)
        pid = future.result(_ATTACH_S)
        if not pid:
            raise OSError("there is no engine process")
        return pid

    def ask_others(self, own: list[Family]) -> list[Family]:
        """Return the metrics of the other workers, summed up; blocks for a moment.

        Those that do not answer in time count with what they said last.

        Args:
            own: This worker's.
        """
        future: Future[list[Family]] = Future()
        with self._lock:
            number = self._next_number
            self._next_number += 1
            self._asked[number] = future
        try:
            self._send(Ask(number, own))
            return future.result(2 * COLLECT_S)
        except (OSError, TimeoutError):
            return []
        finally:
            with self._lock:
                self._asked.pop(number, None)

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            send(self._socket, message, descriptors)

    # -- what it hears

    def _read(self) -> None:
        inbox = Inbox(self._socket)
        try:
            while True:
                for message in inbox.receive():
                    self._handle(message)
        except EOFError:
            pass
        except Exception:
            # Wide: without this thread the worker would hear of nothing any more.
            logger.exception("the supervisor cannot be understood")
        self._on_lost()

    def _handle(self, message: Message) -> None:
        match message:
            case Attached(pid):
                if self._attaching is not None:
                    self._attaching.set_result(pid)
                    self._attaching = None
            case Group(is_complete):
                self.is_complete = is_complete
            case Clear():
                with _contained("the caches cannot be emptied"):
                    self.on_clear()
            case Ask(number, _):
                self._answer(number)
            case Tell(number, families):
                future = self._asked.get(number)
                if future is not None:
                    future.set_result(families)
            case _:
                raise AssertionError(f"unexpected message {type(message).__name__}")

    def _answer(self, number: int) -> None:
        with _contained("the metrics cannot be read; the last ones are told"):
            self._told = self.read_own()
        try:
            self._send(Tell(number, self._told))
        except OSError:
            logger.debug("the supervisor is gone")


@contextlib.contextmanager
def _contained(what: str) -> Iterator[None]:
    """Log what fails; it must not end the thread that hears of everything else."""
    try:
        yield
    except Exception:
        # Wide: a plug-in's cache is asked in there, and may raise what it likes.
        logger.exception("%s", what)
