"""Stop signals end the process also while the event loop hangs in somebody's code."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import uvloop

from lazydecode.server import stopping
from lazydecode.server.stopping import StopSignals

LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set in the place of ending the process."""
    event = threading.Event()
    monkeypatch.setattr(StopSignals, "abandon", lambda self, status: event.set())
    return event


def hang_until(event: threading.Event) -> bool:
    """Keep the interpreter busy, as a template does that loops; at most ten seconds."""
    deadline = time.monotonic() + 10
    while not event.is_set() and time.monotonic() < deadline:
        sum(range(1000))
    return event.is_set()


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_loop_that_hangs_is_ended(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    num_signals: int,
    abandoned: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "_CLOSING_S", 0.1 if num_signals == 1 else 60.0)
    monkeypatch.setattr(stopping, "_AT_ONCE_S", 0.1)
    before = signal.getsignal(signal.SIGUSR1)

    async def serve() -> bool:
        stop = StopSignals(0.0, on_abandon=list, numbers=(signal.SIGUSR1, signal.SIGUSR2))
        with stop:
            send(*(signal.SIGUSR1, signal.SIGUSR2)[:num_signals])
            is_ended = hang_until(abandoned)
            assert not stop.is_set  # nobody could tell the loop
            return is_ended

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(serve())
    assert signal.getsignal(signal.SIGUSR1) == before
    assert "stop-watchdog" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_loop_that_runs_is_told_and_not_ended(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    abandoned: threading.Event,
) -> None:
    told: list[str] = []

    async def serve() -> None:
        stop = StopSignals(60.0, on_abandon=list, numbers=(signal.SIGUSR1,))
        stop.on_first = lambda: told.append("stop")
        with stop:
            send(signal.SIGUSR1)
            async with asyncio.timeout(10):
                await stop.wait()
            stop.stop()  # is nothing after a signal

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())
    assert told == ["stop"]
    assert not abandoned.is_set()
    assert "stop-watchdog" not in {thread.name for thread in threading.enumerate()}
