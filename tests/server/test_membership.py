"""A worker's end of the connection to its supervisor, with the other end in our hands."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from lazydecode.server.membership import Ask, Clear, Inbox, Member, Message, Tell, send
from lazydecode.server.samples import Family


class Supervised:
    """A member, and the supervisor's socket."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(10)
        self._inbox = Inbox(self.socket)
        self.has_lost = threading.Event()
        self.member = Member(theirs, on_lost=self.has_lost.set)
        self._theirs = theirs

    def hear(self) -> Message:
        """Return the next message of the member."""
        while not (messages := self._inbox.receive()):
            pass
        (message,) = messages
        return message

    def close(self) -> None:
        """Be gone, and wait until the member knows."""
        self.socket.close()
        assert self.has_lost.wait(10)
        self._theirs.close()


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    made = Supervised()
    yield made
    made.close()


def test_a_worker_whose_metrics_cannot_be_read_tells_the_last_ones_and_lives(
    supervised: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    known = [Family("requests_total", "counter", "Requests", [])]
    supervised.member.read_own = lambda: known
    send(supervised.socket, Ask(1, []))
    assert supervised.hear() == Tell(1, known)

    def fail() -> list[Family]:
        raise RuntimeError("a plug-in's cache does not know its length")

    supervised.member.read_own = fail
    send(supervised.socket, Ask(2, []))
    assert supervised.hear() == Tell(2, known)
    assert not supervised.has_lost.is_set()
    assert "the metrics cannot be read" in caplog.text


def test_a_worker_that_cannot_empty_its_caches_lives(
    supervised: Supervised, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the event loop is closed")

    supervised.member.on_clear = fail
    send(supervised.socket, Clear())
    send(supervised.socket, Ask(7, []))
    assert supervised.hear() == Tell(7, [])
    assert not supervised.has_lost.is_set()
    assert "the caches cannot be emptied" in caplog.text
