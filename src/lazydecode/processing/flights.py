"""One decode and one processing of an item, whoever waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from lazydecode.cache import LRUCache, item_nbytes
from lazydecode.inputs import MultiModalKwargsItem
from lazydecode.limits import MIB
from lazydecode.media import executor as media_executor
from lazydecode.media.base import MediaRef

WARM_OUTPUT_NBYTES: Final = 256 * MIB


@dataclass(frozen=True, slots=True)
class ItemOutput:
    """The result of processing one item: tensors, and what its prompt needs."""

    kwargs: MultiModalKwargsItem
    updates: Sequence[Any]


class WarmOutputs:
    """Results that were made but not committed to a cache: their request failed or went away.

    The mirrored caches must not learn of an item that the engine never gets. So the work of a
    request that ends badly waits here for the next one that wants it. Bounded; thread-safe.

    Args:
        capacity: Most bytes that are kept.
    """

    def __init__(self, capacity: int = WARM_OUTPUT_NBYTES) -> None:
        self._lru: LRUCache[ItemOutput] = LRUCache(capacity, warn_oversized=False)

    def __len__(self) -> int:
        return len(self._lru)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._lru

    def get(self, mm_hash: str) -> ItemOutput | None:
        """Return a result and keep it longest; None if it is not here."""
        return self._lru.get(mm_hash)

    def put(self, mm_hash: str, output: ItemOutput) -> None:
        """Keep a result."""
        self._lru.put(mm_hash, output, item_nbytes(output.kwargs))

    def discard(self, mm_hash: str) -> None:
        """Let go of a result: a cache has it now."""
        self._lru.pop(mm_hash)

    def clear(self) -> None:
        """Let go of all."""
        self._lru.clear()


ProcessItem: TypeAlias = Callable[[MediaRef[Any] | None], ItemOutput]
"""Processes one item, given the flight's own decoded reference (None: it was none)."""


def _started_future() -> Future[Any]:
    """Return a future that cannot be cancelled: others wait for it too."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class _Flight:
    """The shared work for one hash. `num_waiting` and `must_finish` are under the table's lock."""

    __slots__ = (
        "decode_future",
        "decode_s",
        "mm_hash",
        "must_finish",
        "num_waiting",
        "process",
        "process_s",
        "queued_at",
        "ref",
        "result_future",
        "wait_s",
    )

    def __init__(
        self, mm_hash: str, ref: MediaRef[Any] | None, process: ProcessItem | None
    ) -> None:
        self.mm_hash = mm_hash
        self.ref = ref
        self.process = process
        self.num_waiting = 1
        self.must_finish = False
        self.decode_future: Future[None] = _started_future()
        self.result_future: Future[ItemOutput] = _started_future()
        self.queued_at = time.perf_counter()
        self.wait_s = self.decode_s = self.process_s = 0.0

    @property
    def is_wanted(self) -> bool:
        return self.num_waiting > 0 or self.must_finish

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
        """Seconds that the decode took."""
        return self._flight.decode_s

    @property
    def process_s(self) -> float:
        """Seconds that the processing took."""
        return self._flight.process_s

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
    (on the processing pool). A waiter may leave at any time; work that nobody waits for is not
    begun, but a decode that runs is never cut short. Results go to `outputs` before the flight
    leaves the table, so that no moment exists in which an item is in neither.

    The lock covers the table and the counts of waiters; decodes and processing run outside it.

    Args:
        processing_executor: Runs the model's processor. Its jobs never wait for each other.
        outputs: Where results are kept until a cache has them.
        media_executor: Runs decodes; None is the media pool of the process.
    """

    def __init__(
        self,
        processing_executor: Executor,
        *,
        outputs: WarmOutputs | None = None,
        media_executor: Executor | None = None,
    ) -> None:
        self.outputs = WarmOutputs() if outputs is None else outputs
        self._processing_executor = processing_executor
        self._media_executor = media_executor
        self._flights: dict[str, _Flight] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of flights that have not landed."""
        return len(self._flights)

    def join(self, mm_hash: str, ref: MediaRef[Any] | None, process: ProcessItem) -> ItemFlight:
        """Wait for an item together with whoever waits for it already.

        Args:
            mm_hash: The item's identity: equal hashes give equal results.
            ref: The encoded media. The first one's is forked and decoded; it must not be
                released before `decode_future` is done. None if `process` needs no decode.
            process: Makes the result; the first one's is used.

        Raises:
            RuntimeError: If the table or a pool was shut down.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("no more items are processed: the flights were closed")
            flight = self._flights.get(mm_hash)
            if flight is not None:
                flight.num_waiting += 1
                return ItemFlight(self, flight, is_shared=True)
            output = self.outputs.get(mm_hash)
            if output is not None:
                flight = _Flight(mm_hash, None, None)
                flight.decode_future.set_result(None)
                flight.result_future.set_result(output)
                return ItemFlight(self, flight, is_shared=True)
            fork = None if ref is None else ref.fork()
            flight = self._flights[mm_hash] = _Flight(mm_hash, fork, process)
        try:
            if fork is None or fork.is_decoded:
                flight.decode_future.set_result(None)
                self._submit_processing(flight)
            else:
                executor = self._media_executor or media_executor.global_thread_pool
                executor.submit(self._decode, flight)
        except BaseException as exc:
            self._fail(flight, exc)
            raise
        return ItemFlight(self, flight, is_shared=False)

    def close(self) -> None:
        """Take no more items and return when all flights have landed. Blocks."""
        with self._lock:
            self._is_closed = True
            flights = list(self._flights.values())
        wait([flight.result_future for flight in flights])

    def _leave(self, flight: _Flight, *, finish: bool) -> None:
        with self._lock:
            flight.num_waiting -= 1
            flight.must_finish = flight.must_finish or finish

    def _decode(self, flight: _Flight) -> None:
        if self._drop_if_unwanted(flight):
            return
        start = time.perf_counter()
        flight.wait_s = start - flight.queued_at
        assert flight.ref is not None
        try:
            flight.ref.decode()
        except BaseException as exc:
            self._fail(flight, exc)
            return
        flight.decode_s = time.perf_counter() - start
        flight.decode_future.set_result(None)
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
        start = time.perf_counter()
        assert flight.process is not None
        try:
            output = flight.process(flight.ref)
        except BaseException as exc:
            self._fail(flight, exc)
            return
        flight.process_s = time.perf_counter() - start
        with self._lock:
            self.outputs.put(flight.mm_hash, output)
            self._flights.pop(flight.mm_hash, None)
        flight.land()
        flight.result_future.set_result(output)

    def _drop_if_unwanted(self, flight: _Flight) -> bool:
        with self._lock:
            if flight.is_wanted:
                return False
            self._flights.pop(flight.mm_hash, None)
        self._end(flight, CancelledError("nobody waits for this item any more"))
        return True

    def _fail(self, flight: _Flight, exc: BaseException) -> None:
        with self._lock:
            self._flights.pop(flight.mm_hash, None)
        self._end(flight, exc)

    @staticmethod
    def _end(flight: _Flight, exc: BaseException) -> None:
        flight.land()
        if not flight.decode_future.done():
            flight.decode_future.set_exception(exc)
        flight.result_future.set_exception(exc)
