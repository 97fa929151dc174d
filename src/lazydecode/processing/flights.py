"""One decode and one processing of an item, whoever waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from lazydecode.errors import LazyDecodeError, forget_frames
from lazydecode.media import executor as media_executor
from lazydecode.media.base import MediaRef
from lazydecode.processing.failures import time_limit_error
from lazydecode.processing.outputs import ItemOutput, WarmOutputs
from lazydecode.processing.remote import ItemJob, ItemWorker, ItemWorkers, RefusedError

ProcessItem: TypeAlias = Callable[[MediaRef[Any] | None], ItemOutput]
"""Processes one item, given the flight's own decoded reference (None: it was none)."""


def _started_future() -> Future[Any]:
    """Return a future that cannot be cancelled: others wait for it too."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class _Flight:
    """The shared work for one hash.

    `num_waiting`, `must_finish` and `has_ended` are under the table's lock.
    """

    __slots__ = (
        "decode_future",
        "decode_s",
        "has_ended",
        "mm_hash",
        "must_finish",
        "num_waiting",
        "process",
        "process_s",
        "queued_at",
        "ref",
        "result_future",
        "started_at",
        "wait_s",
    )

    def __init__(
        self, mm_hash: str | None, ref: MediaRef[Any] | None, process: ProcessItem | None
    ) -> None:
        self.mm_hash = mm_hash
        self.ref = ref
        self.process = process
        self.num_waiting = 1
        self.must_finish = False
        self.decode_future: Future[None] = _started_future()
        self.result_future: Future[ItemOutput] = _started_future()
        self.queued_at = time.perf_counter()
        self.started_at: float | None = None
        """When a thread began what it does now; None: none does."""
        self.has_ended = False
        """Whether those who wait were told, or are being told."""
        self.wait_s = self.decode_s = self.process_s = 0.0

    @property
    def is_wanted(self) -> bool:
        return self.num_waiting > 0 or self.must_finish

    def end_decode(self, failure: BaseException | None = None) -> None:
        """Tell those who wait that the decode has ended; again does nothing.

        A thread that ends a decode and one that expires it may both come here at once.
        """
        with suppress(InvalidStateError):
            if failure is None:
                self.decode_future.set_result(None)
            else:
                self.decode_future.set_exception(failure)

    def land(self) -> None:
        """Let go of payload and closure; those who wait hold only the result from here on."""
        if self.ref is not None:
            self.ref.release()
        self.ref = self.process = None


class ItemFlight:
    """One waiter's part in a flight. The futures are shared and cannot be cancelled."""

    __slots__ = ("_flight", "_flights", "_has_left", "is_shared")

    def __init__(self, flights: ItemFlights, flight: _Flight, *, is_shared: bool) -> None:
        self._flights = flights
        self._flight = flight
        self._has_left = False
        self.is_shared = is_shared
        """Whether another waiter had started the work, or it was done before."""

    @property
    def decode_future(self) -> Future[None]:
        """Done when the decode has ended; the payload may then be released."""
        return self._flight.decode_future

    @property
    def result_future(self) -> Future[ItemOutput]:
        """The processed item. Fails with what the decode or the processing raised."""
        return self._flight.result_future

    @property
    def wait_s(self) -> float:
        """Seconds that the decode stood in the queue."""
        return self._flight.wait_s

    @property
    def decode_s(self) -> float:
        """Seconds that the decode took, also if it failed; 0 if none has ended."""
        return self._flight.decode_s

    @property
    def is_processed(self) -> bool:
        """Whether there is a result."""
        future = self._flight.result_future
        return future.done() and future.exception() is None

    @property
    def process_s(self) -> float:
        """Seconds that the processing took."""
        return self._flight.process_s

    def expire(self) -> None:
        """End the wait for all, if a thread has worked on it for longer than the limit.

        A thread cannot be interrupted: it goes on, and what comes of it is dropped.
        """
        self._flights._expire(self._flight)

    def leave(self, *, finish: bool = False) -> None:
        """Stop waiting; calling it again is harmless.

        Args:
            finish: Whether the work goes on even if nobody else waits, so that its result is
                there for the next request.
        """
        if not self._has_left:
            self._has_left = True
            self._flights._leave(self._flight, finish=finish)


class ItemFlights:
    """The table of items that are being decoded or processed now, by hash.

    Whoever joins a hash waits for the one decode (on the media threads) and the one processing
    (on the processing pool); both happen in one go in a worker process where there are such. A
    waiter may leave at any time; work that nobody waits for is not begun, but a decode that runs
    is never cut short. Results go to `outputs` before the flight leaves the table, so that no
    moment exists in which an item is in neither.

    The lock covers the table and the counts of waiters; decodes and processing run outside it.

    Args:
        processing_executor: Runs the model's processor. Its jobs never wait for each other.
        outputs: Where results are kept until a cache has them.
        media_executor: Runs decodes; None is the media pool of the process.
        workers: Processes that do what they can instead of the threads; None: there are none.
        time_limit_s: How long a thread may take to decode or to process an item before
            `ItemFlight.expire` ends the wait for it. Processes have a limit of their own.
    """

    def __init__(
        self,
        processing_executor: Executor,
        *,
        outputs: WarmOutputs | None = None,
        media_executor: Executor | None = None,
        workers: ItemWorkers | None = None,
        time_limit_s: float = math.inf,
    ) -> None:
        self.outputs = WarmOutputs() if outputs is None else outputs
        self._processing_executor = processing_executor
        self._media_executor = media_executor
        self._workers = workers
        self.time_limit_s = time_limit_s
        self._flights: dict[str, _Flight] = {}
        self._private: set[_Flight] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of flights that have not landed."""
        return len(self._flights) + len(self._private)

    def join(
        self,
        mm_hash: str | None,
        ref: MediaRef[Any] | None,
        process: ProcessItem,
        job: ItemJob | None = None,
    ) -> ItemFlight:
        """Wait for an item together with whoever waits for it already.

        Args:
            mm_hash: The item's identity: equal hashes give equal results. None: the work is
                shared with nobody, and its result is not kept.
            ref: The encoded media. The first one's is forked and decoded; it must not be
                released before `decode_future` is done. None if `process` needs no decode.
            process: Makes the result; the first one's is used.
            job: The same for another process; None: only this one can do it.

        Raises:
            RuntimeError: If the table or a pool was shut down.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("no more items are processed: the flights were closed")
            if mm_hash is not None and (shared := self._find(mm_hash)) is not None:
                return ItemFlight(self, shared, is_shared=True)
            fork = None if ref is None else ref.fork()
            flight = _Flight(mm_hash, fork, process)
            if mm_hash is None:
                self._private.add(flight)
            else:
                self._flights[mm_hash] = flight
        try:
            workers = self._workers
            if job is not None and workers is not None and workers.is_ready:
                workers.submit(partial(self._run_elsewhere, flight, job))
            else:
                self._submit_here(flight)
        except BaseException as exc:
            self._fail(flight, exc)
            raise
        return ItemFlight(self, flight, is_shared=False)

    def close(self) -> None:
        """Take no more items and return when all flights have landed. Blocks."""
        with self._lock:
            self._is_closed = True
            flights = [*self._flights.values(), *self._private]
        wait([flight.result_future for flight in flights])

    def _find(self, mm_hash: str) -> _Flight | None:
        """Return the flight for a hash, with one more who waits; or its result as one."""
        flight = self._flights.get(mm_hash)
        if flight is not None:
            flight.num_waiting += 1
            return flight
        output = self.outputs.get(mm_hash)
        if output is None:
            return None
        flight = _Flight(mm_hash, None, None)
        flight.decode_future.set_result(None)
        flight.result_future.set_result(output)
        return flight

    def _expire(self, flight: _Flight) -> None:
        began = flight.started_at
        seconds = 0.0 if began is None else time.perf_counter() - began
        if seconds > self.time_limit_s:
            flight.decode_s = flight.decode_s or seconds
            self._fail(flight, time_limit_error(self.time_limit_s))

    def _leave(self, flight: _Flight, *, finish: bool) -> None:
        with self._lock:
            flight.num_waiting -= 1
            flight.must_finish = flight.must_finish or finish

    def _run_elsewhere(self, flight: _Flight, job: ItemJob, worker: ItemWorker) -> None:
        if self._drop_if_unwanted(flight):
            return
        start = time.perf_counter()
        flight.wait_s = start - flight.queued_at
        assert flight.ref is not None

        def on_decoded(seconds: float) -> None:
            flight.decode_s = seconds
            flight.end_decode()

        try:
            output, flight.process_s = worker.run(job, flight.ref.data, on_decoded)
        except RefusedError:
            try:
                self._submit_here(flight)
            except BaseException as exc:
                self._fail(flight, exc)
            return
        except BaseException as exc:
            if not flight.decode_s:
                flight.decode_s = time.perf_counter() - start
            self._fail(flight, exc)
            return
        self._succeed(flight, output)

    def _submit_here(self, flight: _Flight) -> None:
        if flight.ref is None or flight.ref.is_decoded:
            flight.end_decode()
            self._submit_processing(flight)
        else:
            executor = self._media_executor or media_executor.global_thread_pool
            executor.submit(self._decode, flight)

    def _decode(self, flight: _Flight) -> None:
        if self._drop_if_unwanted(flight):
            return
        start = time.perf_counter()
        flight.wait_s = start - flight.queued_at
        ref = flight.ref
        if ref is None:
            return
        flight.started_at = start
        try:
            ref.decode()
        except BaseException as exc:
            flight.decode_s = time.perf_counter() - start
            self._fail(flight, exc)
            return
        flight.started_at = None
        flight.decode_s = time.perf_counter() - start
        flight.end_decode()
        try:
            self._submit_processing(flight)
        except BaseException as exc:
            self._fail(flight, exc)

    def _submit_processing(self, flight: _Flight) -> None:
        if not self._drop_if_unwanted(flight):
            self._processing_executor.submit(self._process, flight)

    def _process(self, flight: _Flight) -> None:
        # Again: the last waiter may have left while this stood in the queue.
        if self._drop_if_unwanted(flight):
            return
        start = flight.started_at = time.perf_counter()
        process = flight.process
        if process is None:
            return
        try:
            output = process(flight.ref)
        except BaseException as exc:
            self._fail(flight, exc)
            return
        flight.process_s = time.perf_counter() - start
        self._succeed(flight, output)

    def _succeed(self, flight: _Flight, output: ItemOutput) -> None:
        with self._lock:
            if flight.has_ended:
                return
            if flight.mm_hash is not None:
                self.outputs.put(flight.mm_hash, output)
            self._remove(flight)
        flight.land()
        flight.result_future.set_result(output)

    def _drop_if_unwanted(self, flight: _Flight) -> bool:
        with self._lock:
            if flight.has_ended:
                return True
            if flight.is_wanted:
                return False
            self._remove(flight)
        self._end(flight, CancelledError("nobody waits for this item any more"))
        return True

    def _fail(self, flight: _Flight, exc: BaseException) -> None:
        with self._lock:
            if flight.has_ended:
                return
            self._remove(flight)
        self._end(flight, exc)

    def _remove(self, flight: _Flight) -> None:
        flight.has_ended = True
        if flight.mm_hash is None:
            self._private.discard(flight)
        else:
            del self._flights[flight.mm_hash]

    @staticmethod
    def _end(flight: _Flight, exc: BaseException) -> None:
        flight.land()
        # Of others the log wants to know where they were.
        if isinstance(exc, LazyDecodeError | CancelledError):
            forget_frames(exc)
        flight.end_decode(exc)
        flight.result_future.set_exception(exc)
