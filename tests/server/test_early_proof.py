"""What another process finds out is taken for what it was found out about, and only then."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lazydecode.config import Settings
from lazydecode.models import discovery
from lazydecode.models.findings import Findings, write_findings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.server import early_proof
from lazydecode.server.early_proof import EarlyProof, begin_proof


@pytest.fixture(scope="module")
def frontend(tiny_model: Callable[..., Path]) -> ModelFrontend:
    return load_model_frontend(str(tiny_model("qwen2_audio", weights=False)), Settings())


@pytest.fixture
def proof_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes, int], EarlyProof]]:
    """Return `make(answer, status)`: a process that writes `answer` and ends so.

    It runs none of torch's code: a copy of a process that has threads could not.
    """
    made: list[EarlyProof] = []

    def make(answer: bytes, status: int = 0) -> EarlyProof:
        def write(model: str, settings: Settings, control: socket.socket) -> int:
            control.sendall(answer)
            if status < 0:
                os.kill(os.getpid(), -status)
            return status

        monkeypatch.setattr(early_proof, "_prove", write)
        made.append(EarlyProof("no model", Settings()))
        return made[-1]

    yield make
    for proof in made:
        proof.close()


def answer_of(frontend: ModelFrontend) -> bytes:
    assert frontend.findings is not None
    return f"{frontend.fingerprint}\n{write_findings(frontend.findings)}".encode()


def test_findings_arrive_as_they_were_and_as_often_as_they_are_asked_for(
    frontend: ModelFrontend, proof_of: Callable[..., EarlyProof]
) -> None:
    proof = proof_of(answer_of(frontend))
    proof.wait()
    proof.close()
    assert proof.take(frontend.fingerprint) == frontend.findings
    assert proof.take(frontend.fingerprint) == frontend.findings
    assert proof.take("another fingerprint") is None


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5])
def test_a_process_that_dies_while_it_writes_has_found_nothing(
    kept: float, frontend: ModelFrontend, proof_of: Callable[..., EarlyProof]
) -> None:
    answer = answer_of(frontend)
    proof = proof_of(answer[: int(kept * len(answer))], -signal.SIGKILL)
    assert proof.take(frontend.fingerprint) is None


def test_what_was_found_out_is_not_found_out_again(
    frontend: ModelFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("it was proven again")

    asked: list[str] = []

    def proven(mark: str) -> Findings | None:
        asked.append(mark)
        return frontend.findings

    monkeypatch.setattr(discovery, "_findings", {})
    monkeypatch.setattr(discovery, "probe_family", never)
    again = load_model_frontend(frontend.model_id, Settings(), proven=proven)
    assert asked == [frontend.fingerprint]
    assert again.findings is frontend.findings


def test_a_process_that_is_not_waited_for_ends_when_it_is_closed(
    proof_of: Callable[..., EarlyProof], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(model: str, settings: Settings, control: socket.socket) -> int:
        time.sleep(600)
        return 0

    monkeypatch.setattr(early_proof, "_prove", hang)
    with closing(EarlyProof("no model", Settings())) as proof:
        pid = proof._child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_none_is_begun_where_it_could_not_help(tmp_path: Path) -> None:
    for settings in (Settings(proof_cache=tmp_path), Settings(trust_remote_code=True)):
        assert begin_proof("no model", settings, close=[]) is None
