"""A worker's side of the connection: whatever comes of a job, the server is answered."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from lazydecode.engine.channel import Blob, TensorChannel
from lazydecode.inputs import BatchedField, MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.processing.outputs import ItemOutput
from lazydecode.workers import worker
from lazydecode.workers.messages import Answer, Done, Hello, Job, Refused


def output(value: Any) -> ItemOutput:
    elem = MultiModalFieldElem(value, BatchedField())
    return ItemOutput(MultiModalKwargsItem({"x": elem}), ())


def answers_to(num_jobs: int, **options: Any) -> list[Any]:
    ours, theirs = socket.socketpair()
    server: TensorChannel[Any] = TensorChannel(ours, Answer)
    thread = threading.Thread(target=worker.run_worker, args=(theirs, None, None), kwargs=options)
    thread.start()
    assert isinstance(server.receive(), Hello)
    answers = []
    for _ in range(num_jobs):
        server.send(Job("image", b"{}", b"{}", {}, Blob(memoryview(b"payload"))))
        answers.append(server.receive())
    server.close()
    thread.join(60)
    theirs.close()
    return answers


def test_a_result_that_cannot_be_sent_is_refused_and_the_worker_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = [output([object()]), output(7)]
    monkeypatch.setattr(worker, "process_item", lambda *_, **__: (outputs.pop(0), 0.5))
    refused, done = answers_to(2)
    assert isinstance(refused, Refused) and "cannot send a object" in refused.reason
    assert isinstance(done, Done) and done.seconds == 0.5


def test_a_worker_tidies_up_once_in_many_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "process_item", lambda *_, **__: (output(7), 0.5))
    monkeypatch.setattr(worker, "_TIDY_AFTER", 3)
    tidied: list[None] = []
    assert len(answers_to(7, tidy=lambda: tidied.append(None))) == 7
    assert len(tidied) == 2
