"""A function that runs step by step in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from lazydecode.engine.turns import Stepper


def test_runs_to_the_next_pause_and_no_further() -> None:
    seen: list[int] = []

    def count(pause: Callable[[], None]) -> None:
        for number in range(3):
            seen.append(number)
            pause()

    stepper = Stepper(count, name="count")
    assert seen == []
    for number in range(3):
        next(stepper)
        assert seen == list(range(number + 1))
    assert list(stepper) == []
    with pytest.raises(StopIteration):
        next(stepper)


def test_errors_come_out_of_next_once() -> None:
    def fail(pause: Callable[[], None]) -> None:
        pause()
        raise KeyError("inside")

    stepper = Stepper(fail, name="fail")
    next(stepper)
    with pytest.raises(KeyError, match="inside"):
        next(stepper)
    with pytest.raises(StopIteration):
        next(stepper)


def test_close_unwinds_the_function_and_ends_its_thread() -> None:
    unwound = threading.Event()

    def wait(pause: Callable[[], None]) -> None:
        try:
            while True:
                pause()
        finally:
            unwound.set()

    stepper = Stepper(wait, name="unwound-thread")
    next(stepper)
    stepper.close()
    assert unwound.is_set()
    assert "unwound-thread" not in {thread.name for thread in threading.enumerate()}
    stepper.close()
    with pytest.raises(StopIteration):
        next(stepper)


def test_close_before_the_first_step_runs_nothing() -> None:
    stepper = Stepper(lambda pause: pytest.fail("it ran"), name="never")
    stepper.close()
    with pytest.raises(StopIteration):
        next(stepper)
