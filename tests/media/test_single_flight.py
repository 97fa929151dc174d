from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import pytest

from lazydecode.errors import FetchError
from lazydecode.media.single_flight import SingleFlight

REPEATS = int(os.environ.get("LAZYDECODE_TEST_REPEATS", "1"))


class Work:
    """Work that runs until it is told to end; counts what happens to it."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.started += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return "result"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_concurrent_callers_share_one_run() -> None:
    flights: SingleFlight[str, str] = SingleFlight("test")
    work = Work()
    callers = [asyncio.create_task(flights.run("key", work)) for _ in range(64)]
    await settle()
    assert len(flights) == 1
    work.go.set()
    results = await asyncio.gather(*callers)
    assert work.started == 1
    assert Counter(results) == {("result", False): 1, ("result", True): 63}
    assert len(flights) == 0


async def test_results_are_not_kept_and_keys_are_apart() -> None:
    flights: SingleFlight[str, str] = SingleFlight("test")
    work = Work()
    work.go.set()
    await flights.run("a", work)
    await flights.run("a", work)
    await asyncio.gather(flights.run("b", work), flights.run("c", work))
    assert work.started == 4


async def test_a_cancelled_leader_hands_over() -> None:
    flights: SingleFlight[str, str] = SingleFlight("test")
    work = Work()
    leader, follower = (asyncio.create_task(flights.run("key", work)) for _ in range(2))
    await settle()
    leader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leader
    work.go.set()
    assert (await follower)[0] == "result"
    assert (work.started, work.cancelled) == (1, 0)


async def test_the_last_one_to_leave_ends_the_work() -> None:
    flights: SingleFlight[str, str] = SingleFlight("test")
    work = Work()
    callers = [asyncio.create_task(flights.run("key", work)) for _ in range(3)]
    await settle()
    for caller in callers:
        assert work.cancelled == 0
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert work.cancelled == 1
    assert len(flights) == 0


async def test_who_comes_after_the_last_one_left_starts_anew() -> None:
    flights: SingleFlight[str, str] = SingleFlight("test")
    may_end = asyncio.Event()

    async def slow_to_end() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
        return "never"

    first = asyncio.create_task(flights.run("key", slow_to_end))
    await settle()
    first.cancel()
    await settle()
    assert not first.done()  # It leaves when the work has ended.
    work = Work()
    work.go.set()
    assert (await flights.run("key", work)) == ("result", False)
    first.cancel()  # A second time: waited out as well.
    await settle()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_failure_is_delivered_to_each_as_its_own() -> None:
    flights: SingleFlight[str, str] = SingleFlight("test")
    work = Work()
    work.error = FetchError("broken", retry_after_s=3)
    callers = [asyncio.create_task(flights.run("key", work)) for _ in range(3)]
    await settle()
    work.go.set()
    errors = await asyncio.gather(*callers, return_exceptions=True)
    assert len({id(error) for error in errors}) == 3
    for error in errors:
        assert isinstance(error, FetchError)
        assert (str(error), error.retry_after_s) == ("broken", 3)
        assert error.__cause__ is work.error
    work.error = None
    assert (await flights.run("key", work)) == ("result", False)


async def test_closing_ends_the_work_and_tells_those_who_wait() -> None:
    flights: SingleFlight[str, str] = SingleFlight("test")
    work = Work()
    caller = asyncio.create_task(flights.run("key", work))
    await settle()
    await flights.close()
    with pytest.raises(RuntimeError, match="closed"):
        await caller
    assert work.cancelled == 1


@pytest.mark.stress
async def test_any_mix_of_arrivals_and_cancellations_leaves_nothing() -> None:
    for seed in range(20 * REPEATS):
        rng = random.Random(seed)
        flights: SingleFlight[int, int] = SingleFlight("test")
        running: Counter[int] = Counter()

        async def work(key: int, rng: random.Random, running: Counter[int]) -> int:
            running[key] += 1
            assert running[key] == 1  # Never two at once for one key.
            try:
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(0)
                if rng.random() < 0.2:
                    raise FetchError("broken")
                return key
            finally:
                running[key] -= 1

        async def caller(
            rng: random.Random, flights: SingleFlight[int, int], running: Counter[int]
        ) -> None:
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            key = rng.randrange(3)
            try:
                result, _ = await flights.run(key, lambda: work(key, rng, running))
                assert result == key
            except FetchError:
                pass

        tasks = [asyncio.create_task(caller(rng, flights, running)) for _ in range(60)]
        while not all(task.done() for task in tasks):
            rng.choice(tasks).cancel()
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
        await settle()
        assert len(flights) == 0
        assert not +running
