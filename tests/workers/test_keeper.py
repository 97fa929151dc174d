"""A nursery that ends is replaced; one that cannot load the model, or is closed, is not."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lazydecode.config import Settings
from lazydecode.engine.child import Child, ForkedChild
from lazydecode.workers import keeper
from lazydecode.workers.keeper import NurseryKeeper
from lazydecode.workers.nursery import Configure, NurseryGoneError

CONFIGURE = Configure("", Settings(), "", None)
WAIT_S = 60.0

Make = Callable[[Callable[[socket.socket], int]], ForkedChild]


@pytest.fixture
def make() -> Iterator[Make]:
    """Return `make(main)`: a process that plays a nursery; ended by the end of the test."""
    made: list[ForkedChild] = []

    def start(main: Callable[[socket.socket], int]) -> ForkedChild:
        others = [child.control.fileno() for child in made]
        made.append(ForkedChild(main, close=[number for number in others if number >= 0]))
        return made[-1]

    yield start
    assert all(child.poll() is not None for child in made)
    assert all(child.control.fileno() == -1 for child in made)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_MIN_PAUSE_S", 0.01)


def loads(control: socket.socket) -> int:
    """Has loaded at once, and stays until it is closed."""
    read(control)
    control.sendall(struct.pack("<Q", 0))
    control.recv(1)
    return 0


def hangs(control: socket.socket) -> int:
    time.sleep(600)
    return 0


def cannot(control: socket.socket) -> int:
    """Says that it cannot load the model."""
    read(control)
    reason = b"no such model"
    control.sendall(struct.pack("<Q", len(reason)) + reason)
    return 1


def read(control: socket.socket) -> None:
    (size,) = struct.unpack("<Q", control.recv(8, socket.MSG_WAITALL))
    control.recv(size, socket.MSG_WAITALL)


def fork(kept: NurseryKeeper) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return kept.fork(theirs, None)


def test_one_that_ends_is_replaced_as_often_as_it_does(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    children = [make(loads)]
    ready, may_start = threading.Semaphore(0), threading.Semaphore(0)

    def spawn() -> Child:
        assert may_start.acquire(timeout=WAIT_S)
        children.append(make(loads))
        return children[-1]

    kept = NurseryKeeper(children[0], spawn)
    assert not kept.is_ready
    kept.start(CONFIGURE, ready.release)
    for count in range(1, 4):
        assert ready.acquire(timeout=WAIT_S)
        assert kept.is_ready
        assert len(children) == count
        children[-1].kill()
        for _ in range(2):
            with pytest.raises(NurseryGoneError):
                fork(kept)
        may_start.release()
    assert ready.acquire(timeout=WAIT_S)
    assert caplog.text.count("until there are workers") == 3
    kept.close()
    assert not kept.is_ready
    assert len(children) == 4


def test_one_that_says_why_not_is_not_replaced(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    kept = NurseryKeeper(make(cannot), lambda: pytest.fail("another one would say the same"))
    kept.start(CONFIGURE, lambda: pytest.fail("it is not ready"))
    assert kept._thread is not None
    kept._thread.join(WAIT_S)
    assert "workers cannot load the model: no such model" in caplog.text
    kept.close()


@pytest.mark.parametrize("has_started", [False, True])
def test_one_that_hangs_is_ended_by_closing(
    make: Make, monkeypatch: pytest.MonkeyPatch, has_started: bool
) -> None:
    child = make(hangs)
    kept = NurseryKeeper(child, lambda: pytest.fail("it is closed"))
    if has_started:
        kept.start(CONFIGURE, lambda: pytest.fail("it is not ready"))
    kept.close()
    assert child.poll() == -9
    with pytest.raises(NurseryGoneError):
        fork(kept)


def test_closing_ends_the_wait_for_the_next_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_MIN_PAUSE_S", 600.0)
    child, ready = make(loads), threading.Event()
    kept = NurseryKeeper(child, lambda: pytest.fail("it is closed"))
    kept.start(CONFIGURE, ready.set)
    assert ready.wait(WAIT_S)
    child.kill()
    with pytest.raises(NurseryGoneError):
        fork(kept)
    kept.close()


def test_a_process_that_cannot_be_started_is_tried_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ready, attempts = threading.Semaphore(0), [OSError("no process left")]

    def spawn() -> Child:
        if attempts:
            raise attempts.pop()
        return make(loads)

    first = make(loads)
    kept = NurseryKeeper(first, spawn)
    kept.start(CONFIGURE, ready.release)
    assert ready.acquire(timeout=WAIT_S)
    first.kill()
    with pytest.raises(NurseryGoneError):
        fork(kept)
    assert ready.acquire(timeout=WAIT_S)
    assert "cannot be started again: no process left" in caplog.text
    kept.close()
