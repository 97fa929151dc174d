"""Run by a test in a process of its own: a supervisor and two workers that tell their metrics.

Worker 0 dies with its metrics as its last words, while the supervisor is stopped, so that they
and its death are noticed together. Its successor asks for the others' metrics twice, and worker 1
answers once it was asked twice. What the successor is told is printed as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lazydecode.server import membership
from lazydecode.server.membership import Ask, Group, Inbox, Message, Serving, Tell, send
from lazydecode.server.samples import Family, Sample
from lazydecode.server.supervisor import Supervisor


def counted(value: float, help_text: str = "") -> list[Family]:
    return [Family("a", "counter", help_text, [Sample("a_total", {}, value)])]


def hear(control: socket.socket) -> Iterator[Message]:
    inbox = Inbox(control)
    while True:
        yield from inbox.receive()


def die_while_it_is_stopped(supervisor: int, control: socket.socket) -> None:
    next(message for message in hear(control) if message == Group(True))
    os.kill(supervisor, signal.SIGSTOP)
    send(control, Ask(0, counted(5.0, "more than is read at once" * 6000)))


def ask_twice(control: socket.socket) -> dict[int, float]:
    for number in range(2):
        send(control, Ask(number, []))
    told: dict[int, float] = {}
    for message in hear(control):
        if isinstance(message, Tell):
            told[message.number] = sum(s.value for f in message.families for s in f.samples)
            if len(told) == 2:
                break
    return told


def answer_twice(control: socket.socket) -> None:
    asked: list[int] = []
    for message in hear(control):
        if isinstance(message, Group) and not message.is_complete:
            # What it was asked for the one that died. That all serve again may be said between
            # the successor's two questions.
            asked.clear()
        elif isinstance(message, Ask):
            asked.append(message.number)
        if len(asked) == 2:
            for number, value in zip(asked, (1.0, 2.0), strict=True):
                send(control, Tell(number, counted(value)))


def run_worker(
    supervisor: int, has_died: Path, number: int, listener: socket.socket, control: socket.socket
) -> int:
    send(control, Serving())
    if number:
        answer_twice(control)
    if has_died.exists():
        print(json.dumps(ask_twice(control)), flush=True)  # noqa: T201  # what the test reads
        os.kill(supervisor, signal.SIGTERM)
    else:
        has_died.touch()
        die_while_it_is_stopped(supervisor, control)
    return 0


if __name__ == "__main__":
    membership.COLLECT_S = 600.0  # type: ignore[misc]
    Supervisor(
        [socket.create_server(("127.0.0.1", 0)) for _ in range(2)],
        run_worker=partial(run_worker, os.getpid(), Path(sys.argv[1])),
        run_engine=lambda control: 0,
        grace_s=0.0,
        silence_s=0,
        on_serving=lambda: None,
    ).run()
