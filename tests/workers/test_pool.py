"""One worker after the other on one thread: what it says, and what its death means."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lazydecode.config import Settings
from lazydecode.engine.arena import ArenaView, SharedArena
from lazydecode.engine.channel import ChannelClosedError, TensorChannel
from lazydecode.engine.child import ForkedChild
from lazydecode.engine.messages import form_of_error
from lazydecode.errors import CorruptMediaError, TimeLimitError, WorkerDiedError
from lazydecode.inputs import BatchedField, FlatField, MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.media.base import DecodeSpec
from lazydecode.models.expansion import ItemText
from lazydecode.models.tokenization import CollapsedText, Run
from lazydecode.processing.outputs import ItemOutput
from lazydecode.processing.remote import ItemJob, RefusedError
from lazydecode.workers import keeper, pool
from lazydecode.workers.messages import (
    Decoded,
    Failed,
    Hello,
    Job,
    Refused,
    form_of_output,
    output_of_form,
)
from lazydecode.workers.nursery import Configure, NurseryGoneError
from lazydecode.workers.pool import WorkerPool, _Slot
from lazydecode.workers.worker import Memory

RESULT_BYTES = 1 << 20
LIMIT_S = 0.5
PATIENT_S = 30.0
JOB = ItemJob("image", DecodeSpec({"decoder": "image/1"}), DecodeSpec({"a": 1}), {"size": [1, 2]})
OUTPUT = ItemOutput(
    MultiModalKwargsItem(
        {
            "pixels": MultiModalFieldElem(
                torch.arange(100_000, dtype=torch.int64).reshape(-1, 100), FlatField()
            ),
            "grid": MultiModalFieldElem(torch.tensor([1, 2, 3]), BatchedField(keep_on_cpu=True)),
        }
    ),
    (
        ItemText(
            "video",
            CollapsedText("a<v>b", (Run(1, "<v>", 7),)),
            None,
            (2, 48, 64, (("duration", 1.5), ("frames_indices", (0, 4)))),
            ("audio",),
        ),
        ItemText("audio", None, (5, 6)),
    ),
)

Part = Callable[[TensorChannel[Any], Job, bytes], None]


class Workers:
    """Stand in for forked workers: each is a thread that plays a part, once per job."""

    def __init__(self, *parts: Part | None) -> None:
        self._parts = list(parts)
        self.threads: list[threading.Thread] = []
        self.arenas: list[SharedArena] = []
        self._process = subprocess.Popen(["sleep", "100"])  # what is killed

    def fork(self, sock: socket.socket, memory: Memory | None) -> int:
        part = self._parts.pop(0)
        if part is gone:
            raise NurseryGoneError("gone")
        if part is None:
            raise OSError("no process left")
        assert memory is not None
        ours = socket.socket(fileno=os.dup(sock.fileno()))
        view = ArenaView(os.dup(memory.payloads_fd), memory.payloads_bytes)
        arena = SharedArena(os.dup(memory.results_fd), memory.results_bytes)
        self.arenas.append(arena)
        channel: TensorChannel[Any] = TensorChannel(ours, Job, arena=arena, view=view)
        thread = threading.Thread(target=self._play, args=(channel, arena, part), daemon=True)
        self.threads.append(thread)
        thread.start()
        return self._process.pid

    @staticmethod
    def _play(channel: TensorChannel[Any], arena: SharedArena, part: Part) -> None:
        try:
            if part is ends_at_once:
                return
            channel.send(Hello(1))
            while True:
                job = channel.receive()
                arena.release(job.released)
                part(channel, job, bytes(job.payload.data))
        except ChannelClosedError:
            pass
        finally:
            channel.close()
            arena.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def good(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    assert json.loads(job.recipe) == {"decoder": "image/1"}
    assert (job.modality, job.options) == ("image", {"size": [1, 2]})
    channel.send(Decoded(len(data)))
    channel.send(form_of_output(OUTPUT, 0.25, []))


def dies(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    raise ChannelClosedError


def gone(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    """There is no worker, nor what it is forked from."""


def ends_at_once(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    """The worker does not come to say that it is there."""


def dies_late(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    channel.send(Decoded(1.0))
    raise ChannelClosedError


def hangs(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    channel.receive()


def stops_within_a_frame(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    channel.send(Decoded(1.0))
    channel._socket.sendall(b"\1\0\0")  # of a frame's eight first bytes
    channel.receive()


def stops_reading(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    good(channel, job, data)
    poll = select.poll()
    poll.register(channel._socket, 0)
    poll.poll()  # until the other side is gone


def fails(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    channel.send(Failed(form_of_error(CorruptMediaError("no picture", parameter="p"))))


def refuses(channel: TensorChannel[Any], job: Job, data: bytes) -> None:
    channel.send(Refused("another parser"))


Make = Callable[..., tuple[_Slot, Workers]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[tuple[_Slot, Workers]] = []

    def slot(*parts: Part | None, limit_s: float = 30.0) -> tuple[_Slot, Workers]:
        workers = Workers(*parts)
        made.append((_Slot(workers.fork, RESULT_BYTES, limit_s), workers))
        return made[-1]

    yield slot
    for own, workers in made:
        own.end()
        workers.close()


def same(left: ItemOutput, right: ItemOutput) -> bool:
    return left.updates == right.updates and all(
        torch.equal(elem.data, right.kwargs[name].data) and elem.field == right.kwargs[name].field
        for name, elem in left.kwargs.items()
    )


def test_results_come_as_they_were_made(make: Make) -> None:
    slot, workers = make(good)
    decoded: list[float] = []
    for size in (0, 1000, 300_000, 300_000):  # inline and through shared memory
        output, seconds = slot.run(JOB, b"x" * size, decoded.append)
        assert seconds == 0.25
        assert same(output, OUTPUT)
        assert hash(output.updates[0]) == hash(OUTPUT.updates[0])
    assert decoded == [0, 1000, 300_000, 300_000]
    assert len(workers.threads) == 1


def test_memory_is_lent_until_the_tensors_die(make: Make) -> None:
    slot, workers = make(good)
    kept = slot.run(JOB, b"", lambda _: None)[0]
    for _ in range(5):  # more than the memory holds, if nothing came back
        assert same(slot.run(JOB, b"", lambda _: None)[0], OUTPUT)
    assert workers.arenas[0].lent_bytes <= 3 * 800_000
    slot.end()
    workers.close()
    assert same(kept, OUTPUT)  # also after the worker is gone


def test_full_memory_takes_the_socket_and_says_so_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    slot, _ = make(good)
    kept = [slot.run(JOB, b"", lambda _: None)[0] for _ in range(4)]
    assert all(same(output, OUTPUT) for output in kept)
    assert caplog.text.count("are full") == 1


def test_a_job_is_begun_anew_once(make: Make) -> None:
    slot, workers = make(dies, good)
    output, _ = slot.run(JOB, b"", lambda _: None)
    assert same(output, OUTPUT)
    assert len(workers.threads) == 2


@pytest.mark.parametrize("death", [dies, dies_late])
def test_a_job_that_kills_two_workers_fails_and_the_next_one_does_not(
    make: Make, death: Part
) -> None:
    slot, _ = make(death, death, good)
    with pytest.raises(WorkerDiedError) as caught:
        slot.run(JOB, b"", lambda _: None)
    assert (caught.value.status, caught.value.retryable) == (503, True)
    assert same(slot.run(JOB, b"", lambda _: None)[0], OUTPUT)


def test_a_job_that_hangs_ends_with_the_time_limit(make: Make) -> None:
    slot, workers = make(hangs, good, limit_s=LIMIT_S)
    started = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"longer than the 0\.5 s"):
        slot.run(JOB, b"", lambda _: None)
    assert time.monotonic() - started >= LIMIT_S
    assert workers._process.wait(60) == -9
    slot._time_limit_s = PATIENT_S
    assert same(slot.run(JOB, b"", lambda _: None)[0], OUTPUT)


def test_a_worker_that_stops_within_an_answer_ends_with_the_time_limit(make: Make) -> None:
    slot, workers = make(stops_within_a_frame, good, limit_s=LIMIT_S)
    with pytest.raises(TimeLimitError):
        slot.run(JOB, b"", lambda _: None)
    assert workers._process.wait(60) == -9
    slot._time_limit_s = PATIENT_S
    assert same(slot.run(JOB, b"", lambda _: None)[0], OUTPUT)


def test_a_worker_that_stops_reading_ends_with_the_time_limit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_PAYLOAD_BYTES", 1 << 20)
    data = bytes(2 << 20)  # too much for the shared memory, and for what a socket holds
    slot, workers = make(stops_reading, good, limit_s=PATIENT_S)
    assert same(slot.run(JOB, data, lambda _: None)[0], OUTPUT)
    assert slot._worker is not None
    slot._worker._channel._socket.settimeout(LIMIT_S)
    with pytest.raises(TimeLimitError):
        slot.run(JOB, data, lambda _: None)
    assert workers._process.wait(60) == -9
    assert same(slot.run(JOB, data, lambda _: None)[0], OUTPUT)


def test_a_nursery_that_stops_is_ended_and_no_late_answer_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "_ANSWER_S", LIMIT_S)
    monkeypatch.setattr(keeper, "start_nursery", lambda *_: None)
    nursery = ForkedChild(lambda _: time.sleep(100) or 0)  # type: ignore[func-returns-value]
    workers = WorkerPool(nursery, count=2, result_bytes=RESULT_BYTES, time_limit_s=LIMIT_S)
    workers.start(Configure("", Settings(), "", None))
    deadline = time.monotonic() + 120
    while nursery.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert nursery.poll() == -9
    assert not workers.is_ready
    workers.close()


def test_an_error_is_the_items_and_the_worker_stays(make: Make) -> None:
    slot, workers = make(fails)
    for _ in range(2):
        with pytest.raises(CorruptMediaError, match="no picture") as caught:
            slot.run(JOB, b"", lambda _: None)
        assert caught.value.parameter == "p"
    assert len(workers.threads) == 1


def test_an_answer_that_was_not_read_to_its_end_is_not_the_next_ones(make: Make) -> None:
    slot, workers = make(good, good)

    def fail(_: float) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        slot.run(JOB, b"", fail)
    decoded: list[float] = []
    assert same(slot.run(JOB, b"x" * 5, decoded.append)[0], OUTPUT)
    assert decoded == [5]
    assert len(workers.threads) == 2


def test_what_is_refused_or_cannot_be_sent_is_for_this_process(make: Make) -> None:
    slot, workers = make(refuses)
    with pytest.raises(RefusedError, match="another parser"):
        slot.run(JOB, b"", lambda _: None)
    own = ItemJob("image", JOB.recipe, JOB.spec, {"size": object()})
    with pytest.raises(RefusedError, match="object"):
        slot.run(own, b"", lambda _: None)
    assert len(workers.threads) == 1


def test_without_a_worker_jobs_are_refused(make: Make) -> None:
    slot, _ = make(None, None)
    with pytest.raises(RefusedError, match="no worker"):
        slot.run(JOB, b"", lambda _: None)
    assert not slot.is_filled


@pytest.mark.parametrize(
    "parts", [(dies, gone), (dies, dies, gone), (dies, ends_at_once, gone), (gone,)]
)
def test_a_job_whose_workers_died_with_what_they_are_forked_from_is_for_this_process(
    make: Make, parts: tuple[Part, ...]
) -> None:
    slot, _ = make(*parts, good)
    with pytest.raises(RefusedError, match="no worker"):
        slot.run(JOB, b"", lambda _: None)
    assert same(slot.run(JOB, b"", lambda _: None)[0], OUTPUT)  # there is another one


def test_updates_of_another_kind_do_not_leave_their_process() -> None:
    with pytest.raises(TypeError, match="stays in its process"):
        form_of_output(ItemOutput(MultiModalKwargsItem(), (object(),)), 0.0, [])


def test_a_result_without_text_has_none() -> None:
    form = form_of_output(ItemOutput(MultiModalKwargsItem(), ()), 0.0, [])
    assert output_of_form(form).updates == ()
