"""The proof of a model, made in a process of its own while this one still imports its server.

The proof of a small model takes a second of a start of nine, and needs nothing of the server's
own modules. A copy of the process that has imported the model's side makes it on another core,
hands over what it found as text, and ends. It is help and no more: without it, or without an
answer from it, the front end proves for itself, and says what is wrong.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterable
from functools import partial
from typing import Final

from lazydecode.config import Settings
from lazydecode.engine.child import ForkedChild, can_fork
from lazydecode.models.findings import Findings, read_findings, write_findings
from lazydecode.models.loading import load_model_frontend

logger = logging.getLogger(__name__)

_EXIT_S: Final = 5.0
_CHUNK: Final = 1 << 16


class EarlyProof:
    """A process that proves a model. To be closed; one thread uses it.

    Args:
        model: Local folder or hub id.
        settings: What it is served with.
        close: Descriptors that the process must not keep.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, model: str, settings: Settings, *, close: Iterable[int] = ()) -> None:
        self._child = ForkedChild(
            partial(_prove, model, settings), close=close, name="lazydecode-prf"
        )
        self._answer: str | None = None
        """Fingerprint and findings; empty: there are none; None: it has not been read."""

    def fileno(self) -> int:
        """Our end of the connection, which other children must not keep."""
        return self._child.control.fileno()

    def wait(self) -> None:
        """Return once the answer is here, or will not come."""
        if self._answer is not None:
            return
        parts = []
        try:
            while part := self._child.control.recv(_CHUNK):
                parts.append(part)
        except OSError as exc:
            logger.debug("the early proof is lost: %s", exc)
        self._answer = b"".join(parts).decode("utf-8", "replace")

    def take(self, mark: str) -> Findings | None:
        """Return what was found out, once it is; None if nothing is for this fingerprint."""
        self.wait()
        assert self._answer is not None
        found_mark, _, text = self._answer.partition("\n")
        if found_mark != mark:
            return None
        try:
            found = read_findings(text)
        except ValueError:  # it ended while it wrote
            return None
        logger.debug("proven in another process, in %.2f s", found.seconds)
        return found

    def close(self) -> None:
        """End and reap the process; again: nothing."""
        self._child.kill()
        self._child.wait(_EXIT_S)
        self._child.control.close()


def begin_proof(model: str, settings: Settings, *, close: Iterable[int]) -> EarlyProof | None:
    """Return an early proof; None where it would not help, or no process can be copied.

    Not where proofs are kept, as there is then nothing to prove. Not of code that comes with a
    model either: Transformers copies it into a folder of its own, one process at a time.
    """
    if settings.proof_cache is not None or settings.trust_remote_code:
        return None
    if (os.cpu_count() or 1) < 2 or not can_fork():
        return None
    try:
        return EarlyProof(model, settings, close=close)
    except OSError as exc:
        logger.debug("no early proof: %s", exc)
        return None


def _prove(model: str, settings: Settings, control: socket.socket) -> int:
    """Prove, and write fingerprint and findings to the parent."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what there is to say the parent finds too
        os.dup2(null, stream)
    threading.Thread(target=_end_with_parent, args=(control,), daemon=True).start()
    frontend = load_model_frontend(model, settings)
    if frontend.findings is None:
        return 0
    text = write_findings(frontend.findings)
    control.sendall(f"{frontend.fingerprint}\n{text}".encode())
    return 0


def _end_with_parent(control: socket.socket) -> None:
    """End the process when the parent closes its end, as it also does by dying."""
    control.recv(1)
    os._exit(1)
