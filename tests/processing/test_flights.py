"""One decode and one processing per item, whoever waits, leaves, or fails."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lazydecode.errors import CorruptMediaError, TimeLimitError
from lazydecode.inputs import BatchedField, MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.media.base import DecodeSpec, MediaRef
from lazydecode.processing.flights import ItemFlights
from lazydecode.processing.outputs import ItemOutput, WarmOutputs
from lazydecode.processing.remote import ItemJob, RefusedError


def output(value: float = 0.0, num_floats: int = 4) -> ItemOutput:
    elem = MultiModalFieldElem(torch.full((num_floats,), value), BatchedField())
    return ItemOutput(MultiModalKwargsItem({"x": elem}), ["update"])


class Work:
    """A decode and a processing that count their runs and can be held."""

    def __init__(self) -> None:
        self.decode_gate, self.process_gate = threading.Event(), threading.Event()
        self.decode_gate.set()
        self.process_gate.set()
        self.decoding, self.processing = threading.Event(), threading.Event()
        self.num_decodes = self.num_processed = 0
        self.decode_error: Exception | None = None
        self.process_error: Exception | None = None

    def ref(self) -> MediaRef[str]:
        return MediaRef(self._decode, b"payload")

    def _decode(self) -> str:
        self.num_decodes += 1
        self.decoding.set()
        assert self.decode_gate.wait(120)
        if self.decode_error is not None:
            raise self.decode_error
        return "media"

    def process(self, ref: MediaRef[Any] | None) -> ItemOutput:
        self.num_processed += 1
        self.processing.set()
        assert self.process_gate.wait(120)
        if self.process_error is not None:
            raise self.process_error
        assert ref is None or ref.decode() == "media"
        return output(1.0)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def pools() -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    with ThreadPoolExecutor(2) as media, ThreadPoolExecutor(1) as processing:
        yield media, processing


@pytest.fixture
def flights(pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor]) -> Iterator[ItemFlights]:
    media, processing = pools
    table = ItemFlights(processing, media_executor=media)
    yield table
    table.close()
    assert len(table) == 0


def test_many_join_one_flight(flights: ItemFlights, work: Work) -> None:
    work.decode_gate.clear()
    refs = [work.ref() for _ in range(5)]
    joined = [flights.join("h", ref, work.process) for ref in refs]
    assert len(flights) == 1
    assert [flight.is_shared for flight in joined] == [False, True, True, True, True]
    work.decode_gate.set()
    results = {id(flight.result_future.result(120)) for flight in joined}
    assert len(results) == 1
    assert (work.num_decodes, work.num_processed) == (1, 1)
    assert joined[0].decode_s > 0 and joined[0].process_s > 0


def test_a_finished_item_is_warm_until_it_is_discarded(flights: ItemFlights, work: Work) -> None:
    flights.join("h", work.ref(), work.process).result_future.result(120)
    again = flights.join("h", work.ref(), work.process)
    assert again.result_future.done() and again.decode_future.done()
    assert again.is_shared
    again.leave()
    assert work.num_decodes == 1
    flights.outputs.discard("h")
    flights.join("h", work.ref(), work.process).result_future.result(120)
    assert work.num_decodes == 2


def test_the_first_may_leave_while_others_wait(flights: ItemFlights, work: Work) -> None:
    work.decode_gate.clear()
    first, second = (flights.join("h", work.ref(), work.process) for _ in range(2))
    first.leave()
    first.leave()
    work.decode_gate.set()
    assert second.result_future.result(120).updates == ["update"]


def test_nobody_left_means_no_processing(flights: ItemFlights, work: Work) -> None:
    work.decode_gate.clear()
    flight = flights.join("h", work.ref(), work.process)
    assert work.decoding.wait(120)
    flight.leave()
    work.decode_gate.set()
    assert flight.decode_future.result(120) is None
    assert isinstance(flight.result_future.exception(120), Exception)
    assert (work.num_decodes, work.num_processed) == (1, 0)
    flights.join("h", work.ref(), work.process).result_future.result(120)
    assert work.num_processed == 1


def test_a_decode_that_nobody_wants_is_not_begun(flights: ItemFlights, work: Work) -> None:
    blocker = Work()
    blocker.decode_gate.clear()
    blocked = [flights.join(name, blocker.ref(), blocker.process) for name in "ab"]
    flight = flights.join("h", work.ref(), work.process)
    flight.leave()
    blocker.decode_gate.set()
    assert flight.decode_future.exception(120) is not None
    assert work.num_decodes == 0
    for other in blocked:
        other.result_future.result(120)


def test_processing_that_nobody_wants_any_more_is_not_begun(
    flights: ItemFlights, work: Work
) -> None:
    blocker = Work()
    blocker.process_gate.clear()
    blocked = flights.join("a", None, blocker.process)
    flight = flights.join("h", work.ref(), work.process)
    assert flight.decode_future.result(120) is None
    flight.leave()
    blocker.process_gate.set()
    blocked.result_future.result(120)
    assert flight.result_future.exception(120) is not None
    assert work.num_processed == 0


def test_work_goes_on_for_later_requests_if_asked(flights: ItemFlights, work: Work) -> None:
    work.decode_gate.clear()
    flight = flights.join("h", work.ref(), work.process)
    flight.leave(finish=True)
    work.decode_gate.set()
    assert flight.result_future.result(120)
    assert "h" in flights.outputs


@pytest.mark.parametrize("stage", ["decode", "process"])
def test_a_failure_reaches_every_waiter_and_is_not_remembered(
    flights: ItemFlights, work: Work, stage: str
) -> None:
    work.decode_gate.clear()
    joined = [flights.join("h", work.ref(), work.process) for _ in range(3)]
    setattr(work, f"{stage}_error", ValueError("bad"))
    work.decode_gate.set()
    for flight in joined:
        assert str(flight.result_future.exception(120)) == "bad"
        assert (flight.decode_future.exception(120) is None) == (stage == "process")
    setattr(work, f"{stage}_error", None)
    assert len(flights) == 0
    assert "h" not in flights.outputs
    flights.join("h", work.ref(), work.process).result_future.result(120)


def test_the_flight_keeps_nothing_but_the_result(flights: ItemFlights, work: Work) -> None:
    ref = work.ref()
    flight = flights.join("h", ref, work.process)
    flight.result_future.result(120)
    assert flight._flight.ref is None and flight._flight.process is None
    assert ref.data == b"payload"
    assert ref.is_decoded


def test_a_decoded_reference_takes_no_media_thread(work: Work) -> None:
    class NoExecutor(Executor):
        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            raise AssertionError("submitted")

    with ThreadPoolExecutor(1) as processing:
        flights = ItemFlights(processing, media_executor=NoExecutor())
        ref = work.ref()
        ref.decode()
        assert flights.join("h", ref, work.process).result_future.result(120)
        assert flights.join("none", None, work.process).result_future.result(120)
        with pytest.raises(AssertionError, match="submitted"):
            flights.join("other", work.ref(), work.process)
        assert len(flights) == 0


def test_shared_futures_cannot_be_cancelled(flights: ItemFlights, work: Work) -> None:
    work.decode_gate.clear()
    flight = flights.join("h", work.ref(), work.process)
    assert not flight.result_future.cancel()
    assert not flight.decode_future.cancel()
    work.decode_gate.set()
    flight.result_future.result(120)


def test_a_processing_pool_that_is_gone_is_a_failure(work: Work) -> None:
    processing = ThreadPoolExecutor(1)
    processing.shutdown()
    with ThreadPoolExecutor(1) as media:
        flights = ItemFlights(processing, media_executor=media)
        flight = flights.join("h", work.ref(), work.process)
        assert isinstance(flight.result_future.exception(120), RuntimeError)
        assert len(flights) == 0


def test_a_closed_table_takes_nothing(flights: ItemFlights, work: Work) -> None:
    flights.close()
    with pytest.raises(RuntimeError, match="closed"):
        flights.join("h", work.ref(), work.process)


def test_warm_outputs_are_bounded() -> None:
    size = output().kwargs.nbytes + 256
    warm = WarmOutputs(2 * size)
    for name in "abc":
        warm.put(name, output())
    assert [name in warm for name in "abc"] == [False, True, True]
    assert warm.get("b") is not None
    warm.put("d", output())
    assert [name in warm for name in "bcd"] == [True, False, True]
    warm.put("huge", output(num_floats=1000))
    assert "huge" not in warm and len(warm) == 2
    warm.clear()
    assert len(warm) == 0 and warm.get("b") is None


@pytest.mark.stress
def test_waiters_that_come_and_go(pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor]) -> None:
    media, processing = pools
    flights = ItemFlights(processing, media_executor=media, outputs=WarmOutputs(0))
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for step in range(60):
                work = Work()
                number = (seed * 31 + step * 7) % 11
                if number == 0:
                    work.decode_error = ValueError("bad")
                flight = flights.join(f"h{step % 3}", work.ref(), work.process)
                if number in (1, 2, 3):
                    flight.leave(finish=number == 3)
                    continue
                try:
                    assert flight.result_future.result(120).updates == ["update"]
                except ValueError as exc:
                    assert str(exc) == "bad"
                flight.leave()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    flights.close()
    assert not errors
    assert len(flights) == 0


# -- time limits, and work that is nobody else's


@pytest.mark.parametrize("gate", ["decode_gate", "process_gate"])
def test_a_thread_that_takes_too_long_is_not_waited_for(
    work: Work, pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor], gate: str
) -> None:
    flights = ItemFlights(pools[1], media_executor=pools[0], time_limit_s=0.05)
    getattr(work, gate).clear()
    flight = flights.join("a", work.ref(), work.process)
    (work.decoding if gate == "decode_gate" else work.processing).wait(120)
    while not flight.result_future.done():
        flight.expire()
    error = flight.result_future.exception()
    assert isinstance(error, TimeLimitError)
    assert "longer than the 0.05 s" in error.message
    assert flight.decode_future.done()
    assert len(flights) == 0
    # The next one begins anew, and what the late thread makes of its own is dropped.
    again = flights.join("a", None, lambda ref: output(2.0))
    getattr(work, gate).set()
    assert again.result_future.result(120).kwargs["x"].data[0] == 2.0
    flights.close()
    for pool in pools:
        pool.shutdown()
    assert flight.result_future.exception() is error


def test_a_decode_that_ends_in_the_moment_in_which_it_expires_leaves_nobody_waiting(
    work: Work, pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor]
) -> None:
    class EndsMeanwhile(Future[None]):
        """The decode thread comes between the look at the future and its end."""

        def done(self) -> bool:
            was_done = super().done()
            if not was_done:
                super().set_result(None)
            return was_done

    flights = ItemFlights(pools[1], media_executor=pools[0], time_limit_s=0.0)
    work.decode_gate.clear()
    flight = flights.join("a", work.ref(), work.process)
    assert work.decoding.wait(120)
    flight._flight.decode_future = EndsMeanwhile()
    flight.expire()
    assert isinstance(flight.result_future.exception(120), TimeLimitError)
    work.decode_gate.set()
    flights.close()


def test_what_waits_in_a_queue_does_not_expire(
    work: Work, pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor]
) -> None:
    flights = ItemFlights(pools[1], media_executor=pools[0], time_limit_s=0.0)
    hold = threading.Event()
    held = [pool.submit(hold.wait, 30) for pool in (pools[0], pools[0], pools[1])]
    flight = flights.join("a", work.ref(), work.process)
    flight.expire()
    assert not flight.result_future.done()
    hold.set()
    assert flight.result_future.result(120) is not None
    assert all(job.result() for job in held)
    flights.close()


def test_work_without_a_hash_is_shared_with_nobody_and_not_kept(
    flights: ItemFlights, work: Work
) -> None:
    first = flights.join(None, work.ref(), work.process)
    second = flights.join(None, work.ref(), work.process)
    assert not first.is_shared and not second.is_shared
    assert first.result_future.result(120) is not second.result_future.result(120)
    assert (work.num_decodes, work.num_processed) == (2, 2)
    assert len(flights.outputs) == 0


# -- worker processes


JOB = ItemJob("image", DecodeSpec(), DecodeSpec(), {})


class Workers:
    """Takes jobs on one thread; `answer` does them."""

    def __init__(self, answer: Callable[[bytes, Callable[[float], None]], ItemOutput]) -> None:
        self.is_ready = True
        self._answer = answer
        self.pool = ThreadPoolExecutor(1)

    def submit(self, task: Callable[[Any], None]) -> None:
        self.pool.submit(task, self)

    def run(
        self, job: ItemJob, data: bytes, on_decoded: Callable[[float], None]
    ) -> tuple[ItemOutput, float]:
        assert job is JOB
        return self._answer(data, on_decoded), 0.5


@pytest.fixture
def elsewhere(
    pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor],
) -> Iterator[Callable[..., tuple[ItemFlights, Workers]]]:
    made: list[tuple[ItemFlights, Workers]] = []

    def make(answer: Any) -> tuple[ItemFlights, Workers]:
        workers = Workers(answer)
        made.append((ItemFlights(pools[1], media_executor=pools[0], workers=workers), workers))
        return made[-1]

    yield make
    for table, workers in made:
        table.close()
        workers.pool.shutdown()
        assert len(table) == 0


def test_a_worker_decodes_and_processes_in_one_go(elsewhere: Any, work: Work) -> None:
    is_decoded, may_process = threading.Event(), threading.Event()

    def answer(data: bytes, on_decoded: Callable[[float], None]) -> ItemOutput:
        assert data == b"payload"
        on_decoded(0.25)
        is_decoded.set()
        assert may_process.wait(120)
        return output(3.0)

    flights, _ = elsewhere(answer)
    flight = flights.join("a", work.ref(), work.process, JOB)
    second = flights.join("a", work.ref(), work.process, JOB)
    assert is_decoded.wait(120)
    flight.decode_future.result(120)
    assert not flight.result_future.done()
    may_process.set()
    assert flight.result_future.result(120) is second.result_future.result(120)
    assert (flight.decode_s, flight.process_s) == (0.25, 0.5)
    assert (work.num_decodes, work.num_processed) == (0, 0)
    assert "a" in flights.outputs


def test_what_a_worker_refuses_is_done_here(elsewhere: Any, work: Work) -> None:
    def answer(data: bytes, on_decoded: Callable[[float], None]) -> ItemOutput:
        raise RefusedError("no")

    flights, workers = elsewhere(answer)
    assert flights.join("a", work.ref(), work.process, JOB).result_future.result(120) is not None
    assert (work.num_decodes, work.num_processed) == (1, 1)
    workers.is_ready = False
    assert flights.join("b", work.ref(), work.process, JOB).result_future.result(120) is not None
    workers.is_ready = True
    assert flights.join("c", work.ref(), work.process).result_future.result(120) is not None
    assert (work.num_decodes, work.num_processed) == (3, 3)


@pytest.mark.parametrize("is_decoded", [True, False])
def test_a_failure_in_a_worker_ends_the_flight(
    elsewhere: Any, work: Work, is_decoded: bool
) -> None:
    def answer(data: bytes, on_decoded: Callable[[float], None]) -> ItemOutput:
        if is_decoded:
            on_decoded(0.0)
        raise CorruptMediaError("bad")

    flights, _ = elsewhere(answer)
    flight = flights.join("a", work.ref(), work.process, JOB)
    assert isinstance(flight.result_future.exception(120), CorruptMediaError)
    assert (flight.decode_future.exception(120) is None) == is_decoded
    assert "a" not in flights.outputs


def test_a_failure_keeps_nothing_that_it_came_through(elsewhere: Any, work: Work) -> None:
    kept: list[weakref.ref[Work]] = []

    def answer(data: bytes, on_decoded: Callable[[float], None]) -> ItemOutput:
        local = Work()
        kept.append(weakref.ref(local))
        try:
            raise OSError
        except OSError as exc:
            raise CorruptMediaError("bad") from exc

    flights, workers = elsewhere(answer)
    gc.collect()
    gc.disable()  # it would find the circle of error, frame and flight, but later
    try:
        flight = flights.join("a", work.ref(), work.process, JOB)
        assert isinstance(flight.result_future.exception(120), CorruptMediaError)
        workers.pool.shutdown()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_worker_does_not_begin_what_nobody_waits_for(elsewhere: Any, work: Work) -> None:
    flights, workers = elsewhere(lambda data, on_decoded: output(0.0))
    hold = threading.Event()
    workers.pool.submit(hold.wait, 30)
    flight = flights.join("a", work.ref(), work.process, JOB)
    flight.leave()
    hold.set()
    assert isinstance(flight.result_future.exception(120), CancelledError)
