"""Who generates when: room, turns, aborts, and one request's failure beside others."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from lazydecode.engine.generation import Generation
from lazydecode.engine.protocol import EngineOutput, EngineRequest, SamplingParams
from lazydecode.engine.scheduler import Scheduler
from tests.engine.scripted import FAIL, FATAL, FatalError, ScriptedRunner


class Recorder:
    """Takes what the scheduler sends, and waits for ends."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, Exception] = {}
        self.order: list[str] = []
        self._changed = threading.Condition()

    def send(self, outputs: list[EngineOutput]) -> None:
        with self._changed:
            for output in outputs:
                self.tokens[output.request_id] += output.new_token_ids
                self.order += [output.request_id] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    assert output.request_id not in self.reasons
                    self.reasons[output.request_id] = output.finish_reason
            self._changed.notify_all()

    def fail(self, request_id: str, error: Exception) -> None:
        with self._changed:
            assert request_id not in self.errors
            self.errors[request_id] = error
            self._changed.notify_all()

    def wait_ended(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.reasons) + len(self.errors) >= count, timeout=120
            )

    def wait_tokens(self, request_id: str, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.tokens[request_id]) >= count, timeout=120
            )


class GatedRunner(ScriptedRunner):
    """Waits for a permit before each step, and counts what runs together."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.closed = 0

    def generate(self, batch: Sequence[Generation]) -> Iterator[None]:
        self.sizes.append(len(batch))
        steps = super().generate(batch)
        try:
            while True:
                self.permits.acquire()
                try:
                    next(steps)
                except StopIteration:
                    return
                yield
        finally:
            self.closed += 1


class Running:
    """A scheduler with its thread."""

    def __init__(self, runner: ScriptedRunner, max_batch_size: int = 8) -> None:
        self.recorder = Recorder()
        self.error: BaseException | None = None
        self.runner = runner
        self.scheduler = Scheduler(
            runner,
            max_batch_size=max_batch_size,
            send=self.recorder.send,
            fail=self.recorder.fail,
        )
        self.thread = threading.Thread(target=self._run, name="test-scheduler")

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except BaseException as exc:
            self.error = exc

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 5) -> Generation:
        request = EngineRequest(request_id, prompt, sampling=SamplingParams(max_tokens=max_tokens))
        generation = Generation(request, [], self.runner.info)
        self.scheduler.add(generation)
        return generation

    def __enter__(self) -> Running:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.scheduler.stop()
        if isinstance(self.runner, GatedRunner):
            self.runner.permits.release(10_000)
        self.thread.join(120)
        assert not self.thread.is_alive()


def test_every_request_gets_its_tokens() -> None:
    with Running(ScriptedRunner(), max_batch_size=3) as running:
        for number in range(20):
            running.add(f"r{number}", [100 * number], max_tokens=1 + number % 7)
        running.recorder.wait_ended(20)
    for number in range(20):
        expected = [100 * number + step for step in range(1, 2 + number % 7)]
        assert running.recorder.tokens[f"r{number}"] == expected
    assert set(running.recorder.reasons.values()) == {"length"}


def test_what_waits_starts_as_one_batch_up_to_the_limit() -> None:
    runner = GatedRunner()
    running = Running(runner, max_batch_size=4)
    for number in range(6):
        running.add(f"r{number}", [number], max_tokens=1)
    with running:
        runner.permits.release(100)
        running.recorder.wait_ended(6)
    assert runner.sizes == [4, 2]


def test_a_late_request_does_not_wait_for_anothers_last_token() -> None:
    runner = GatedRunner()
    with Running(runner) as running:
        running.add("long", [1], max_tokens=500)
        runner.permits.release(1)
        running.recorder.wait_tokens("long", 1)
        running.add("short", [1], max_tokens=2)
        runner.permits.release(6)
        running.recorder.wait_tokens("short", 2)
        assert len(running.recorder.tokens["long"]) < 10


def test_a_finished_member_makes_room() -> None:
    runner = GatedRunner()
    running = Running(runner, max_batch_size=2)
    running.add("short", [1], max_tokens=1)
    running.add("long", [1], max_tokens=50)
    running.add("next", [1], max_tokens=1)
    with running:
        runner.permits.release(3)
        running.recorder.wait_tokens("next", 1)
        assert "long" not in running.recorder.reasons


def test_an_aborted_request_ends_before_its_next_token_and_others_go_on() -> None:
    runner = GatedRunner()
    running = Running(runner)
    running.add("a", [1], max_tokens=50)
    running.add("b", [1], max_tokens=4)
    with running:
        runner.permits.release(2)
        running.recorder.wait_tokens("a", 2)
        running.scheduler.abort("a")
        running.scheduler.abort("unknown")
        runner.permits.release(100)
        running.recorder.wait_ended(2)
    assert running.recorder.reasons == {"a": "abort", "b": "length"}
    assert len(running.recorder.tokens["a"]) <= 3
    assert running.recorder.tokens["b"] == [2, 3, 4, 5]


def test_a_waiting_request_can_be_aborted() -> None:
    runner = GatedRunner()
    running = Running(runner, max_batch_size=1)
    running.add("a", [1], max_tokens=3)
    running.add("b", [1], max_tokens=3)
    running.scheduler.abort("b")
    with running:
        runner.permits.release(100)
        running.recorder.wait_ended(2)
    assert running.recorder.reasons == {"a": "length", "b": "abort"}
    assert running.recorder.tokens["b"] == []


def test_only_the_guilty_request_of_a_batch_fails() -> None:
    running = Running(ScriptedRunner())
    running.add("a", [1], max_tokens=5)
    running.add("bad", [FAIL, 1], max_tokens=5)
    running.add("c", [7], max_tokens=5)
    with running:
        running.recorder.wait_ended(3)
        running.add("later", [9], max_tokens=1)
        running.recorder.wait_ended(4)
    assert list(running.recorder.errors) == ["bad"]
    assert str(running.recorder.errors["bad"]) == "out of memory at 0x1234"
    assert running.recorder.tokens["a"] == [2, 3, 4, 5, 6]
    assert running.recorder.tokens["c"] == [8, 9, 10, 11, 12]
    assert running.recorder.tokens["later"] == [10]


def test_a_batch_that_fails_late_goes_on_where_it_was() -> None:
    class FailsOnce(ScriptedRunner):
        failed = False

        def generate(self, batch: Sequence[Generation]) -> Iterator[None]:
            for number, _ in enumerate(super().generate(batch)):
                if number == 2 and not self.failed:
                    self.failed = True
                    raise RuntimeError("once")
                yield

    running = Running(FailsOnce())
    running.add("a", [1], max_tokens=6)
    running.add("b", [10], max_tokens=6)
    with running:
        running.recorder.wait_ended(2)
    assert running.recorder.errors == {}
    assert running.recorder.tokens == {"a": [2, 3, 4, 5, 6, 7], "b": [11, 12, 13, 14, 15, 16]}


class SmallMemory(ScriptedRunner):
    """Has memory for so many requests at a time."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.running = 0

    def group(self, waiting: Sequence[Generation]) -> list[list[Generation]]:
        return [[generation] for generation in waiting]

    def generate(self, batch: Sequence[Generation]) -> Iterator[None]:
        self.running += 1
        try:
            if self.running > self.room:
                raise MemoryError("no room")
            yield from super().generate(batch)
        finally:
            self.running -= 1


def test_a_request_that_lacks_memory_gets_the_model_to_itself() -> None:
    running = Running(SmallMemory(2))
    for number in range(6):
        running.add(f"r{number}", [10 * number], max_tokens=3 + number)
    with running:
        running.recorder.wait_ended(6)
    assert running.recorder.errors == {}
    for number in range(6):
        expected = [10 * number + step for step in range(1, 4 + number)]
        assert running.recorder.tokens[f"r{number}"] == expected


def test_a_request_that_lacks_memory_even_alone_fails() -> None:
    running = Running(SmallMemory(0))
    running.add("a", [1])
    running.add("b", [1])
    with running:
        running.recorder.wait_ended(2)
    assert sorted(running.recorder.errors) == ["a", "b"]


def test_a_model_that_stops_early_is_a_failure_not_a_hang() -> None:
    class Lazy(ScriptedRunner):
        def generate(self, batch: Sequence[Generation]) -> Iterator[None]:
            return iter(())

    with Running(Lazy()) as running:
        running.add("a", [1])
        running.recorder.wait_ended(1)
    assert "stopped before the last token" in str(running.recorder.errors["a"])


def test_what_the_process_cannot_survive_ends_the_scheduler() -> None:
    running = Running(ScriptedRunner())
    running.add("a", [FATAL])
    running.thread.start()
    running.thread.join(120)
    assert isinstance(running.error, FatalError)


def test_stop_closes_the_running_batches() -> None:
    runner = GatedRunner()
    with Running(runner) as running:
        running.add("a", [1], max_tokens=500)
        runner.permits.release(1)
        running.recorder.wait_tokens("a", 1)
    assert runner.closed == 1
    assert "a" not in running.recorder.reasons


@pytest.mark.parametrize("resumed", [3, 5])
def test_a_request_that_needs_no_more_tokens_ends_without_a_batch(resumed: int) -> None:
    runner = GatedRunner()
    request = EngineRequest(
        "r", [1] * 8, sampling=SamplingParams(max_tokens=3), num_resumed_tokens=resumed
    )
    with Running(runner) as running:
        running.scheduler.add(Generation(request, [], runner.info))
        running.recorder.wait_ended(1)
    assert running.recorder.reasons == {"r": "length"}
    assert runner.sizes == []
