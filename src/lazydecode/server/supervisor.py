"""Several worker processes behind one port, one engine for all, and who replaces what dies.

The supervisor has one thread and answers no request. It imports what all need, then forks the
workers and, when the first of them asks for it, the engine; as it stays as it was, it can fork
replacements at any time. Each worker has a socket of its own on the port (SO_REUSEPORT), which the
supervisor keeps open, so that connections wait for a worker's successor instead of being refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from lazydecode.engine.child import Child, ForkedChild, attach_front_end
from lazydecode.errors import EngineError
from lazydecode.server import membership
from lazydecode.server.membership import Inbox, Message
from lazydecode.server.samples import Family, only_accumulated, sum_up

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.5
_PAUSE_S: Final = 5.0
"""A supervisor that has not come round for so long was stopped, or the whole machine was."""
_SEND_S: Final = 2.0
"""A worker that does not read for so long is killed."""
_MAX_BACKOFF_S: Final = 30.0
_CLOSING_S: Final = 20.0
"""How long workers may take to end after the grace; then they are killed."""
_ENGINE_EXIT_S: Final = 5.0


@dataclass(slots=True)
class _Worker:
    number: int
    child: ForkedChild
    inbox: Inbox
    is_serving: bool = False
    heard_at: float = 0.0
    """When it last said that its event loop goes round."""
    reason: str = ""
    """Why it says that it cannot start."""
    families: list[Family] = field(default_factory=list)
    """Its metrics when it last told them: what was shown of it once stays in every later sum."""


@dataclass(slots=True)
class _Question:
    asker: int
    name: int
    """What the asker calls it."""
    number: int
    """Counts the questions of all workers, which are asked and answered in this order."""
    waiting: set[int]
    deadline: float


class Supervisor:
    """Runs workers until a stop signal.

    Args:
        listeners: One bound socket per worker; closed here.
        run_worker: Runs in each worker: (number, listener, control) -> exit status.
        run_engine: Runs in the engine's process: control -> exit status.
        grace_s: How long requests may go on after a stop signal.
        silence_s: How long a worker's event loop may stand still before it is killed; 0: for ever.
        on_serving: Called once, when all workers serve.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        *,
        run_worker: Callable[[int, socket.socket, socket.socket], int],
        run_engine: Callable[[socket.socket], int],
        grace_s: float,
        silence_s: float,
        on_serving: Callable[[], None],
    ) -> None:
        self._listeners = listeners
        self._run_worker = run_worker
        self._run_engine = run_engine
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._stepped_at = time.monotonic()
        self._on_serving = on_serving
        self._workers: dict[int, _Worker] = {}
        self._due: dict[int, float] = {}
        """Number -> when the worker is to be started again."""
        self._backoff_s: dict[int, float] = {}
        self._engine: Child | None = None
        self._selector = selectors.DefaultSelector()
        self._questions: list[_Question] = []
        self._num_asked = 0
        self._retired: list[Family] = []
        self._has_served = False
        self._was_complete = False
        self._deadline: float | None = None
        """When those that have not stopped are killed; None: nobody was told to stop."""
        self._signals: list[int] = []
        self._wake, self._wakes = socket.socketpair()

    def run(self) -> None:
        """Serve; return when all processes have ended.

        Raises:
            EngineError: If a worker cannot start; the message is its own.
        """
        with self._watching_signals():
            try:
                for number in range(len(self._listeners)):
                    self._start(number)
                while self._workers or (self._due and self._deadline is None):
                    self._step()
            finally:
                self._end_all()

    # -- steps

    def _step(self) -> None:
        for key, _ in self._selector.select(_TICK_S):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(1024)
            else:
                self._hear(key.data)
        while self._signals:
            self._on_stop_signal(self._signals.pop(0))
        self._reap()
        now = time.monotonic()
        self._kill_silent(now)
        if self._deadline is None:
            for number in [n for n, due in self._due.items() if due <= now]:
                del self._due[number]
                self._start(number)
        elif now > self._deadline:
            logger.error("workers do not end; killing them")
            for worker in self._workers.values():
                worker.child.kill()
        for question in [q for q in self._questions if now > q.deadline]:
            self._settle(question)
        self._tell_complete()

    def _kill_silent(self, now: float) -> None:
        """Kill workers whose event loops stand still; what they said so far has been heard."""
        if now - self._stepped_at > _PAUSE_S:  # all of us stood still, not they
            for worker in self._workers.values():
                worker.heard_at = now
        self._stepped_at = now
        for worker in self._workers.values():
            silent_s = now - worker.heard_at
            if worker.is_serving and 0 < self._silence_s < silent_s:
                logger.error(
                    "worker %d (process %d) is killed: its event loop stands still for %.0f s",
                    worker.number, worker.child.pid, silent_s,
                )  # fmt: skip
                worker.child.kill()
                worker.heard_at = now

    def _start(self, number: int) -> None:
        listener = self._listeners[number]
        child = ForkedChild(
            lambda control: self._run_worker(number, listener, control),
            close=[fd for fd in self._descriptors() if fd != listener.fileno()],
            name=f"lazydecode-{number}",
        )
        child.control.settimeout(_SEND_S)
        worker = _Worker(number, child, Inbox(child.control))
        self._workers[number] = worker
        self._selector.register(child.control, selectors.EVENT_READ, worker)

    def _descriptors(self) -> list[int]:
        """What is the supervisor's own: a process that kept an end would hide another's death."""
        own = [self._wake.fileno(), self._wakes.fileno(), self._selector.fileno()]
        own += [listener.fileno() for listener in self._listeners]
        own += [worker.child.control.fileno() for worker in self._workers.values()]
        if self._engine is not None:
            own.append(self._engine.control.fileno())
        return [fd for fd in own if fd >= 0]

    def _reap_engine(self) -> None:
        engine = self._engine
        if engine is not None and (status := engine.poll()) is not None:
            logger.error("engine process %d ended (%s)", engine.pid, _describe(status))
            engine.control.close()
            self._engine = None  # the next one is started when a worker asks for it

    def _reap(self) -> None:
        self._reap_engine()
        for worker in list(self._workers.values()):
            status = worker.child.poll()
            if status is not None:
                self._bury(worker, status)

    def _bury(self, worker: _Worker, status: int) -> None:
        worker.child.control.setblocking(False)  # what it said last has arrived, all of it
        with contextlib.suppress(EOFError):
            while True:
                for message in worker.inbox.receive():
                    self._handle(worker, message)
        self._selector.unregister(worker.child.control)
        worker.child.control.close()
        del self._workers[worker.number]
        self._retired = sum_up([self._retired, only_accumulated(worker.families)])
        for question in list(self._questions):
            if question.asker == worker.number:
                self._questions.remove(question)
            elif worker.number in question.waiting:
                question.waiting.discard(worker.number)
                self._settle_if_complete(question)
        if self._deadline is not None:
            return
        if not self._has_served:
            # A start that fails for one fails for all.
            why = worker.reason or f"a worker ended while it started ({_describe(status)})"
            raise EngineError(why)
        backoff_s = 0.0 if worker.is_serving else self._backoff_s.get(worker.number, 0.5)
        self._backoff_s[worker.number] = min(2 * max(backoff_s, 0.25), _MAX_BACKOFF_S)
        self._due[worker.number] = time.monotonic() + backoff_s
        logger.error(
            "worker %d (process %d) ended (%s); starting another one",
            worker.number, worker.child.pid, worker.reason or _describe(status),
        )  # fmt: skip

    def _tell_complete(self) -> None:
        is_complete = len(self._workers) == len(self._listeners) and all(
            worker.is_serving for worker in self._workers.values()
        )
        if is_complete == self._was_complete:
            return
        self._was_complete = is_complete
        for worker in list(self._workers.values()):
            self._send(worker, membership.Group(is_complete))
        if is_complete and not self._has_served:
            self._has_served = True
            self._on_serving()

    # -- messages

    def _hear(self, worker: _Worker) -> None:
        try:
            for message in worker.inbox.receive():
                self._handle(worker, message)
        except EOFError:
            worker.child.kill()  # it is ending, or deaf; its end is noticed by waiting for it

    def _handle(self, worker: _Worker, message: Message) -> None:
        match message:
            case membership.Attach(memory_bytes):
                self._attach(worker, memory_bytes)
            case membership.Serving():
                worker.is_serving = True
                worker.heard_at = time.monotonic()
                self._backoff_s.pop(worker.number, None)
            case membership.Alive():
                worker.heard_at = time.monotonic()
            case membership.Failed(reason):
                worker.reason = reason
            case membership.Clear():
                for other in [w for w in self._workers.values() if w is not worker]:
                    self._send(other, message)
            case membership.Ask(number, families):
                worker.families = families
                self._ask(worker, number)
            case membership.Tell(number, families):
                worker.families = families
                for question in list(self._questions):
                    # One that came late says nothing of what was counted since it was asked for.
                    if question.number <= number and worker.number in question.waiting:
                        question.waiting.discard(worker.number)
                        self._settle_if_complete(question)
            case _:
                raise AssertionError(f"unexpected message {type(message).__name__}")

    def _send(self, worker: _Worker, message: Message) -> None:
        try:
            membership.send(worker.child.control, message)
        except OSError:
            worker.child.kill()

    def _attach(self, worker: _Worker, memory_bytes: int) -> None:
        count = 2 if memory_bytes else 1
        descriptors, worker.inbox.descriptors[:count] = worker.inbox.descriptors[:count], []
        pid = 0
        try:
            with socket.socket(fileno=os.dup(descriptors[0])) as channel:
                memory = (descriptors[1], memory_bytes) if memory_bytes else None
                pid = self._hand_over(channel, memory)
        except OSError as exc:
            logger.warning("worker %d gets no engine: %s", worker.number, exc)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._send(worker, membership.Attached(pid))

    def _hand_over(self, channel: socket.socket, memory: tuple[int, int] | None) -> int:
        """Attach a worker to the engine that runs, or to a new one; returns its process id."""
        if self._engine is not None:
            try:
                attach_front_end(self._engine.control, channel, memory)
                return self._engine.pid
            except OSError:  # it has died a moment ago
                self._engine.wait(_ENGINE_EXIT_S)
                self._reap_engine()
        engine = self._engine or self._start_engine()
        attach_front_end(engine.control, channel, memory)
        return engine.pid

    def _start_engine(self) -> Child:
        self._engine = ForkedChild(
            self._run_engine, close=self._descriptors(), name="lazydecode-eng"
        )
        return self._engine

    # -- metrics

    def _ask(self, asker: _Worker, name: int) -> None:
        others = [w for w in self._workers.values() if w is not asker and w.is_serving]
        question = _Question(
            asker.number,
            name,
            self._num_asked,
            {worker.number for worker in others},
            time.monotonic() + membership.COLLECT_S,
        )
        self._num_asked += 1
        self._questions.append(question)
        for worker in others:
            self._send(worker, membership.Ask(question.number, []))
        self._settle_if_complete(question)

    def _settle_if_complete(self, question: _Question) -> None:
        if not question.waiting:
            self._settle(question)

    def _settle(self, question: _Question) -> None:
        self._questions.remove(question)
        asker = self._workers.get(question.asker)
        if asker is None:
            return
        # One that is too slow counts with what it said last: a sum never falls below an older one.
        others = [w.families for w in self._workers.values() if w is not asker]
        self._send(asker, membership.Tell(question.name, sum_up([self._retired, *others])))

    # -- the end

    def _on_stop_signal(self, number: int) -> None:
        if self._deadline is not None:
            logger.warning("ending at once")
            for child in self._children():
                child.kill()
            logging.shutdown()
            os._exit(128 + number)
        logger.info("stopping: running requests may finish; a second signal ends them")
        self._deadline = time.monotonic() + self._grace_s + _CLOSING_S
        for listener in self._listeners:
            listener.close()  # or connections would wait for workers that never come
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.child.pid, signal.SIGTERM)

    def _children(self) -> list[Child]:
        children: list[Child] = [worker.child for worker in self._workers.values()]
        return children if self._engine is None else [*children, self._engine]

    def _end_all(self) -> None:
        """End what is left, the engine last; reap all."""
        for worker in self._workers.values():
            worker.child.kill()
        engine = self._engine
        if engine is not None:
            engine.control.close()
            if engine.wait(_ENGINE_EXIT_S) is None:
                engine.kill()
        for child in self._children():
            child.wait(_ENGINE_EXIT_S)
        for worker in self._workers.values():
            worker.child.control.close()
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    @contextlib.contextmanager
    def _watching_signals(self) -> Iterator[None]:
        """Let stop signals and the ends of children wake the selector."""
        self._wake.setblocking(False)
        self._wakes.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        stop = (signal.SIGINT, signal.SIGTERM)
        for number in stop:
            signal.signal(number, lambda number, frame: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in stop:
                signal.signal(number, signal.SIG_IGN)  # nothing is left to stop
            self._wake.close()
            self._wakes.close()


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
