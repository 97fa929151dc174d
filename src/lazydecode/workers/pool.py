"""The server's worker processes: jobs go to the next free one, and what dies is replaced.

Each worker has a thread here that waits for it. Until the workers are there, and for what they
refuse, items are done by the threads of this process as if there were none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from lazydecode.engine.arena import ArenaView, Notices, SharedArena
from lazydecode.engine.channel import Blob, ChannelClosedError, TensorChannel
from lazydecode.engine.child import Child
from lazydecode.engine.messages import error_of_form
from lazydecode.errors import LazyDecodeError, WorkerDiedError
from lazydecode.limits import MIB
from lazydecode.processing.failures import time_limit_error
from lazydecode.processing.outputs import ItemOutput
from lazydecode.processing.remote import ItemJob, ItemWorker, RefusedError
from lazydecode.workers.keeper import NurseryKeeper
from lazydecode.workers.messages import (
    Answer,
    Decoded,
    Done,
    Failed,
    Hello,
    Job,
    Refused,
    output_of_form,
)
from lazydecode.workers.nursery import Configure, NurseryGoneError
from lazydecode.workers.worker import Memory

logger = logging.getLogger(__name__)

_PAYLOAD_BYTES: Final = 64 * MIB
"""Shared memory for one payload; it stays in use, so a larger one goes through the socket."""
_ATTEMPTS: Final = 2
_START_S: Final = 30.0
_WATCH_S: Final = 1.0
"""How often idle workers are looked after."""
_PEER: Final = "the workers"

Task: TypeAlias = Callable[[ItemWorker], None]
Fork: TypeAlias = Callable[[socket.socket, Memory | None], int]


class WorkerPool:
    """Worker processes as `ItemWorkers`. Creating one starts nothing.

    The lock covers the threads that there are: none is started once the pool is closed.

    Args:
        nursery: The process that workers are forked from; ended with the pool.
        count: Workers, at least 1.
        result_bytes: Shared memory for the results of one worker that are in use.
        time_limit_s: How long one decode, or the processing of one item, may take.
        spawn: Starts another nursery when one has ended; None: threads do the work then.
    """

    def __init__(
        self,
        nursery: Child,
        *,
        count: int,
        result_bytes: int,
        time_limit_s: float,
        spawn: Callable[[], Child] | None = None,
    ) -> None:
        self._nursery = NurseryKeeper(nursery, spawn)
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        fork = self._nursery.fork
        notices = Notices()  # one for all: what is said of one worker's memory is true of all
        self._slots = [
            _Slot(fork, result_bytes, time_limit_s, notices=notices) for _ in range(count)
        ]
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """Whether jobs are taken now."""
        return self._nursery.is_ready and any(slot.is_filled for slot in self._slots)

    @property
    def num_alive(self) -> int:
        """Workers that take jobs, or work on one."""
        return sum(slot.is_filled for slot in self._slots)

    def start(self, configure: Configure) -> None:
        """Let the nursery load the model, and start the workers; returns at once."""
        self._nursery.start(configure, self._start_threads)

    def submit(self, task: Task) -> None:
        """Call `task` with the next free worker, on that worker's thread.

        Raises:
            RuntimeError: If the pool was closed.
        """
        if self._is_closed:
            raise RuntimeError("the workers were closed")
        self._tasks.put(task)

    def close(self) -> None:
        """End all processes and threads; jobs must have ended. Blocks."""
        with self._lock:
            self._is_closed = True
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._nursery.close()

    def _start_threads(self) -> None:
        with self._lock:
            if self._is_closed or self._threads:
                return
            for number, slot in enumerate(self._slots):
                thread = threading.Thread(
                    target=self._serve, args=(slot,), name=f"lazydecode-worker_{number}"
                )
                self._threads.append(thread)
                thread.start()

    def _serve(self, slot: _Slot) -> None:
        slot.fill()
        while True:
            try:
                task = self._tasks.get(timeout=_WATCH_S)
            except queue.Empty:
                # Also in the place of one that died idle.
                if slot.is_filled or self._nursery.is_ready:
                    slot.fill()
                continue
            if task is None:
                break
            task(slot)  # tells whoever waits how it went, and raises nothing
            del task
            slot.fill()
        slot.end()


class _Slot:
    """One worker and its successors, on one thread."""

    def __init__(
        self,
        fork: Fork,
        result_bytes: int,
        time_limit_s: float,
        *,
        notices: Notices | None = None,
    ) -> None:
        self._fork = fork
        self._result_bytes = result_bytes
        self._time_limit_s = time_limit_s
        self._notices = notices
        self._worker: _Worker | None = None
        self._has_failed = False
        self._is_orphaned = False
        """Whether the last worker could not be followed by one for want of a nursery."""

    @property
    def is_filled(self) -> bool:
        """Whether there is a worker."""
        return self._worker is not None

    def fill(self) -> None:
        """Start a worker if there is none that lives; to be called between two jobs."""
        if self._worker is not None and self._worker.is_gone:
            logger.error("worker %d died", self._worker.pid)
            self._drop()
        if self._worker is None:
            self._is_orphaned = False
            try:
                self._worker = _Worker(
                    self._fork, self._result_bytes, self._time_limit_s, self._notices
                )
                self._has_failed = False
            except NurseryGoneError:
                self._is_orphaned = True  # whoever keeps the nursery has said it
            except (OSError, ChannelClosedError) as exc:
                if not self._has_failed:
                    logger.warning("a worker does not start: %s (said once)", exc)
                self._has_failed = True

    def _follow(self) -> None:
        """Start a worker after one that died; twice, as the first may die with the nursery."""
        for _ in range(2):
            if self._worker is None and not self._is_orphaned:
                self.fill()

    def end(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def run(
        self, job: ItemJob, data: bytes, on_decoded: Callable[[float], None]
    ) -> tuple[ItemOutput, float]:
        """As `ItemWorker.run`; what dies under a job is replaced, and the job begun anew once.

        Workers that died with their nursery say nothing about the job.
        """
        num_died = 0
        self.fill()
        while self._worker is not None and num_died < _ATTEMPTS:
            try:
                return self._worker.run(job, data, on_decoded)
            except ChannelClosedError:
                logger.error("worker %d died under an item (%s)", self._worker.pid, job.modality)
                num_died += 1
                self._drop()
                self._follow()
            except TimeoutError:
                logger.error("worker %d is killed: its item (%s) takes too long",
                             self._worker.pid, job.modality)  # fmt: skip
                self.end()
                raise time_limit_error(self._time_limit_s) from None
            except (LazyDecodeError, RefusedError):
                raise
            except BaseException:
                # Wide: whatever the worker still says to this job would be taken for its answer
                # to the next one.
                self.end()
                raise
        if not num_died or self._is_orphaned:
            raise RefusedError("there is no worker")
        raise WorkerDiedError("the process that works on it died")


class _Worker:
    """One worker process and the connection to it.

    Raises:
        OSError: If it cannot be started.
        ChannelClosedError: If it ended at once.
    """

    def __init__(
        self, fork: Fork, result_bytes: int, time_limit_s: float, notices: Notices | None
    ) -> None:
        self._time_limit_s = time_limit_s
        ours, theirs = socket.socketpair()
        create = partial(SharedArena.create, peer=_PEER, notices=notices)
        self._arena = create(_PAYLOAD_BYTES)
        results = None if self._arena is None else create(result_bytes)
        self._view: ArenaView | None = None
        memory = None
        if self._arena is not None and results is not None:
            memory = Memory(self._arena.fd, _PAYLOAD_BYTES, results.fd, result_bytes)
        try:
            self.pid = fork(theirs, memory)
            if results is not None and memory is not None:
                self._view = ArenaView(os.dup(results.fd), result_bytes)
        except BaseException:
            ours.close()
            if self._arena is not None:
                self._arena.close()
            raise
        finally:
            theirs.close()
            if results is not None:
                results.close()
        self._released: list[int] = []
        self._channel: TensorChannel[Any] = TensorChannel(
            ours,
            Answer,
            arena=self._arena if memory is not None else None,
            view=self._view,
            stall_s=time_limit_s,  # it may stop while it is written to, or writes
        )
        try:
            hello = self._receive(_START_S)
        except (ChannelClosedError, TimeoutError) as exc:
            self.end()
            raise ChannelClosedError("it ended at once") from exc
        assert isinstance(hello, Hello)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; between two jobs, when it says nothing."""
        return self._channel.wait(0)

    def run(
        self, job: ItemJob, data: bytes, on_decoded: Callable[[float], None]
    ) -> tuple[ItemOutput, float]:
        """As `ItemWorker.run`.

        Raises:
            ChannelClosedError: If the process died.
            TimeoutError: If it takes too long.
        """
        if self._view is not None:
            self._released += self._view.take_released()
        message = Job(
            job.modality,
            job.recipe.canonical_bytes(),
            job.spec.canonical_bytes(),
            dict(job.options),
            Blob(memoryview(data)),
            self._released,
        )
        try:
            self._channel.send(message)
        except TypeError as exc:  # options of a kind that only this process knows
            raise RefusedError(str(exc)) from exc
        self._released = []
        answer = self._receive(self._time_limit_s)
        if isinstance(answer, Decoded):
            on_decoded(answer.seconds)
            answer = self._receive(self._time_limit_s)
        assert isinstance(answer, Done | Failed | Refused)
        if self._arena is not None:
            self._arena.release(answer.released)
        if isinstance(answer, Failed):
            raise error_of_form(answer.error)
        if isinstance(answer, Refused):
            logger.debug("a worker refuses an item: %s", answer.reason)
            raise RefusedError(answer.reason)
        return output_of_form(answer), answer.seconds

    def end(self) -> None:
        """Kill the process and let go of it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Let go of what was shared; results that are in use stay as they are."""
        self._channel.close()
        if self._arena is not None:
            self._arena.close()

    def _receive(self, time_limit_s: float) -> Any:
        if not self._channel.wait(time_limit_s):
            raise TimeoutError
        return self._channel.receive()
