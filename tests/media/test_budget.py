from __future__ import annotations

import asyncio
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazydecode.errors import MediaTooLargeError, OverloadedError
from lazydecode.media.budget import ByteBudget, Reservation

REPEATS = int(os.environ.get("LAZYDECODE_TEST_REPEATS", "1"))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Holder:
    """Holds a reservation in a task until it is told to let go."""

    def __init__(self, budget: ByteBudget, nbytes: int) -> None:
        self.held = False
        self.reservation: Reservation | None = None
        self._let_go = asyncio.Event()
        self.task = asyncio.create_task(self._hold(budget, nbytes))

    async def _hold(self, budget: ByteBudget, nbytes: int) -> None:
        async with budget.reserve(nbytes) as self.reservation:
            self.held = True
            await self._let_go.wait()
        self.held = False

    async def let_go(self) -> None:
        self._let_go.set()
        await self.task
        await settle()


async def hold(budget: ByteBudget, *sizes: int) -> list[Holder]:
    holders = []
    for size in sizes:
        holders.append(Holder(budget, size))
        await settle()
    return holders


async def test_what_fits_is_held_at_once() -> None:
    budget = ByteBudget(100)
    async with budget.reserve(60) as first, budget.reserve(40):
        assert budget.held_bytes == 100
        assert first.nbytes == 60
    assert budget.held_bytes == 0
    async with budget.reserve(0):
        assert budget.held_bytes == 0


async def test_who_waits_is_served_in_order_and_not_overtaken() -> None:
    budget = ByteBudget(100)
    first, big, small = await hold(budget, 60, 90, 10)
    assert [h.held for h in (first, big, small)] == [True, False, False]  # 10 would fit.
    assert budget.num_waiting == 2
    await first.let_go()
    assert [h.held for h in (big, small)] == [True, True]
    await big.let_go()
    await small.let_go()
    assert budget.held_bytes == 0


async def test_a_cancelled_waiter_makes_way() -> None:
    budget = ByteBudget(100)
    first, big, small = await hold(budget, 60, 90, 10)
    big.task.cancel()
    await settle()
    assert small.held
    assert budget.num_waiting == 0
    await first.let_go()
    await small.let_go()
    assert budget.held_bytes == 0


async def test_a_grant_to_a_cancelled_waiter_is_passed_on() -> None:
    budget = ByteBudget(100)
    first, second, third = await hold(budget, 100, 100, 100)
    first._let_go.set()
    await first.task  # Grants to the second, which has not run yet ...
    second.task.cancel()  # ... and now never will.
    await settle()
    assert second.task.cancelled()
    assert third.held
    await third.let_go()
    assert budget.held_bytes == 0


async def test_an_error_in_the_block_gives_back() -> None:
    budget = ByteBudget(100)
    with pytest.raises(ZeroDivisionError):
        async with budget.reserve(100):
            raise ZeroDivisionError
    assert budget.held_bytes == 0


async def test_what_can_never_fit_is_too_large() -> None:
    budget = ByteBudget(100)
    with pytest.raises(MediaTooLargeError, match="101"):
        async with budget.reserve(101):
            pass
    assert budget.held_bytes == 0


async def test_too_many_waiters_are_turned_away() -> None:
    budget = ByteBudget(100, max_waiting=1)
    first, second = await hold(budget, 100, 1)
    with pytest.raises(OverloadedError) as caught:
        async with budget.reserve(1):
            pass
    assert caught.value.status == 503
    assert caught.value.retry_after_s is not None
    await first.let_go()
    await second.let_go()


async def test_a_wait_ends() -> None:
    budget = ByteBudget(100, max_wait_s=0.05)
    (first,) = await hold(budget, 100)
    with pytest.raises(OverloadedError, match=r"0\.05 s"):
        async with budget.reserve(1):
            pass
    assert budget.num_waiting == 0
    await first.let_go()
    assert budget.held_bytes == 0


async def test_shrinking_serves_those_who_wait() -> None:
    budget = ByteBudget(100)
    first, second = await hold(budget, 100, 50)
    assert first.reservation is not None
    first.reservation.shrink(60)
    await settle()
    assert not second.held
    first.reservation.shrink(50)
    await settle()
    assert second.held
    with pytest.raises(ValueError, match="shrink"):
        first.reservation.shrink(51)
    await first.let_go()
    assert budget.held_bytes == 50
    await second.let_go()
    assert budget.held_bytes == 0


async def test_growing_takes_what_is_free_or_fails_at_once() -> None:
    budget = ByteBudget(100)
    first, waiting = await hold(budget, 60, 90)
    assert first.reservation is not None
    first.reservation.grow(100)
    assert budget.held_bytes == 100
    with pytest.raises(OverloadedError):
        first.reservation.grow(101)
    with pytest.raises(ValueError, match="grow"):
        first.reservation.grow(99)
    assert first.reservation.nbytes == 100
    await first.let_go()
    assert waiting.held
    await waiting.let_go()
    assert budget.held_bytes == 0


async def test_a_reservation_is_entered_once() -> None:
    budget = ByteBudget(100)
    reservation = budget.reserve(10)
    async with reservation:
        with pytest.raises(RuntimeError, match="once"):
            await reservation.__aenter__()
    assert reservation.nbytes == 0


def test_misuse_is_a_value_error() -> None:
    for make in (
        lambda: ByteBudget(0),
        lambda: ByteBudget(1, max_waiting=-1),
        lambda: ByteBudget(1).reserve(-1),
    ):
        with pytest.raises(ValueError, match="must"):
            make()


_STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "leave", "cancel", "shrink", "grow"]), st.integers(0, 120)),
    max_size=40,
)


@given(_STEPS)
@settings(deadline=None)
def test_any_sequence_of_steps_keeps_the_account(steps: list[tuple[str, int]]) -> None:
    """Compared with a plain model after each step: who holds, who waits, in which order."""

    async def play() -> None:
        budget = ByteBudget(100)
        holders: list[Holder] = []  # Those that hold or wait, oldest first.
        for step, number in steps:
            if step == "enter":
                holders.append(Holder(budget, number % 101))
            elif holders:
                holder = holders[number % len(holders)]
                if step == "leave" and holder.held:
                    await holder.let_go()
                    holders.remove(holder)
                elif step == "cancel":
                    holder.task.cancel()
                    holders.remove(holder)
                elif step == "shrink" and holder.held:
                    assert holder.reservation is not None
                    holder.reservation.shrink(holder.reservation.nbytes // 2)
                elif step == "grow" and holder.held:
                    assert holder.reservation is not None
                    before = holder.reservation.nbytes
                    try:
                        holder.reservation.grow(before + number % 10)
                    except OverloadedError:
                        assert budget.held_bytes + number % 10 > 100
                        assert holder.reservation.nbytes == before
            await settle()
            held = [h for h in holders if h.held]
            assert budget.held_bytes == sum(h.reservation.nbytes for h in held if h.reservation)
            assert budget.held_bytes <= budget.capacity
            assert budget.num_waiting == len(holders) - len(held)
        for holder in holders:
            holder.task.cancel()
        await settle()
        assert budget.held_bytes == budget.num_waiting == 0

    asyncio.run(play())


@pytest.mark.stress
async def test_a_crowd_with_cancellations_leaves_nothing_and_starves_no_one() -> None:
    for seed in range(10 * REPEATS):
        rng = random.Random(seed)
        budget = ByteBudget(1000, max_waiting=10_000)
        served: list[int] = []

        async def user(
            number: int, nbytes: int, turns: int, budget: ByteBudget, served: list[int]
        ) -> None:
            async with budget.reserve(nbytes):
                served.append(number)
                assert budget.held_bytes <= budget.capacity
                for _ in range(turns):
                    await asyncio.sleep(0)

        sizes = [rng.choice([1, 10, 500, 1000]) for _ in range(200)]
        users = [
            asyncio.create_task(user(number, size, rng.randrange(4), budget, served))
            for number, size in enumerate(sizes)
        ]
        cancelled = set(rng.sample(range(200), 60))
        for number in cancelled:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            users[number].cancel()
        await asyncio.gather(*users, return_exceptions=True)
        assert budget.held_bytes == budget.num_waiting == 0
        assert served == sorted(served)  # First come, first served.
        assert set(served) >= set(range(200)) - cancelled
