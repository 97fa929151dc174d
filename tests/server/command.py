"""A `lazydecode` command as a process, for tests that start, watch and end one."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

START_S = 180.0


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; any may end, and be gone, while it is looked at."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Process:
    """A `lazydecode` process and what it wrote."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lazydecode", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.output = ""

    def read_until(self, pattern: str) -> str:
        """Return the first match in the output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_S
        while (found := re.search(pattern, self.output)) is None:
            ready, _, _ = select.select([self.process.stdout], [], [], 1.0)
            # Not readline: lines that its buffer holds would never make the descriptor ready.
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            self.output += chunk.decode(errors="replace")
            ended = ready and not chunk
            assert not ended and time.monotonic() < deadline, self.output
        return found[1] if found.groups() else found[0]

    def below(self) -> list[psutil.Process]:
        """The processes below this one that run."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if runs(process)]

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=START_S)
        self.output += rest
        return self.process.returncode


@contextmanager
def lazydecode(*arguments: str) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()
