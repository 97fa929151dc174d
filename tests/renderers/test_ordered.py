"""The ordered worker: jobs and notes keep their order, and a note wakes nobody by itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.renderers import ordered
from lazydecode.renderers.ordered import OrderedWorker


@pytest.fixture
def worker() -> Iterator[OrderedWorker]:
    with OrderedWorker("ordered") as worker:
        yield worker


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "_SOON_S", 0.01)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "_SOON_S", 3600.0)


@given(st.lists(st.booleans(), max_size=30))
def test_all_run_in_the_order_of_asking_on_one_thread(kinds: list[bool]) -> None:
    ran: list[tuple[int, int]] = []

    def run(number: int) -> None:
        ran.append((number, threading.get_ident()))

    async def ask(worker: OrderedWorker) -> None:
        for number, is_note in enumerate(kinds):
            if is_note:
                worker.note(partial(run, number))
            else:
                worker.submit(run, number)

    with OrderedWorker("ordered") as worker:
        asyncio.run(ask(worker))
    assert [number for number, _ in ran] == [*range(len(kinds))]
    assert len({thread for _, thread in ran}) <= 1


async def test_a_note_waits_for_the_next_job(worker: OrderedWorker, never: None) -> None:
    ran: list[str] = []
    worker.note(lambda: ran.append("a"))
    worker.note(lambda: ran.append("b"))
    await asyncio.sleep(0.05)
    assert ran == []
    assert await asyncio.wrap_future(worker.submit(ran.copy)) == ["a", "b"]


async def test_a_note_without_a_job_runs_soon(worker: OrderedWorker, soon: None) -> None:
    for _ in range(2):  # the timer is set again
        ran = threading.Event()
        worker.note(ran.set)
        assert await asyncio.to_thread(ran.wait, 60)


def test_notes_that_a_loop_left_behind_go_with_those_of_the_next(
    worker: OrderedWorker, soon: None
) -> None:
    ran = threading.Event()

    async def leave() -> None:
        worker.note(lambda: None)

    async def follow() -> bool:
        worker.note(ran.set)
        return await asyncio.to_thread(ran.wait, 10)

    asyncio.run(leave())
    assert asyncio.run(follow())


async def test_at_the_end_all_notes_have_run(never: None) -> None:
    ran: list[int] = []
    worker = OrderedWorker("ordered")
    worker.note(lambda: ran.append(1))
    worker.shutdown()
    assert ran == [1]
    with pytest.raises(RuntimeError, match="shutdown"):
        worker.submit(print)
