"""A server under test: started, watched and ended."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psutil

_START_S: Final = 300.0
_SAMPLE_S: Final = 0.05
_NAMES_CLOCKS: Final[bool] = sys.platform == "linux"
_CPU_CLOCK: Final = 2
"""CPUCLOCK_SCHED of Linux: CPU in user and kernel mode."""
_SAMPLE_LINE: Final = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)


class ServerUnderTest:
    """Where a server answers, and its processes if they can be seen.

    Args:
        url: Base URL.
        pid: Of the server's first process; None if it is elsewhere.

    Raises:
        ValueError: If there is no such process.
    """

    def __init__(self, url: str, pid: int | None = None) -> None:
        self.url = url.rstrip("/")
        try:
            self._process = None if pid is None else psutil.Process(pid)
        except psutil.NoSuchProcess as exc:
            raise ValueError(f"there is no process {pid}") from exc

    @property
    def is_visible(self) -> bool:
        """Whether its processes can be watched."""
        return self._process is not None

    def tree(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._process, *self._process.children(recursive=True)]
        return []

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        total = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                total += _cpu_s(process)
        return total

    def rss(self) -> int:
        """Memory of all its processes, in bytes; shared pages count in each."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def set_cores(self, cores: Sequence[int]) -> None:
        """Let every thread of every process run on these cores only (Linux)."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, cores)

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name, labels as written) -> value, from `/metrics`; empty if there is none."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:  # noqa: S310  # the user's
                text = answer.read().decode()
        except (urllib.error.URLError, OSError):
            return {}
        found: dict[tuple[str, str], float] = {}
        for name, labels, value in _SAMPLE_LINE.findall(text):
            with contextlib.suppress(ValueError):
                found[name, labels] = float(value)
        return found

    def require_answer(self) -> None:
        """Check that a server answers, whatever it says: one of another make may have no health.

        Raises:
            RuntimeError: If none does.
            ValueError: If the URL is none of `http` or `https`.
        """
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{self.url!r} is not the http URL of a server")
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=30).close()  # noqa: S310  # checked
        except urllib.error.HTTPError as exc:
            exc.close()
        except (http.client.HTTPException, OSError, ValueError) as exc:
            raise RuntimeError(f"no server answers at {self.url}: {exc}") from exc

    def wait_for(self, gauge: str, timeout_s: float) -> None:
        """Return when a gauge is not zero, or was for so long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.metrics().get((gauge, "")):
            time.sleep(0.1)


@contextlib.contextmanager
def started_server(
    command: Sequence[str], port: int, *, start_s: float = _START_S
) -> Iterator[ServerUnderTest]:
    """Run a server that listens on `port` until the block ends.

    Raises:
        RuntimeError: If it ends or does not answer; with the end of its log.
    """
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(  # noqa: S603  # our own words
            command, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            server = ServerUnderTest(f"http://127.0.0.1:{port}", process.pid)
            deadline = time.monotonic() + start_s
            while not _answers(server.url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    tail = log.read()[-3000:].decode(errors="replace")
                    raise RuntimeError(f"the server did not start:\n{tail}")
                time.sleep(0.1)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def own_command(model: str, port: int, *, engine: str, flags: Sequence[str] = ()) -> list[str]:
    """The command that serves `model` with this library."""
    return [
        *(sys.executable, "-m", "lazydecode", "serve", model),
        *("--port", str(port), "--engine", engine, "--log-level", "warning"),
        *flags,
    ]


def eager_command(model: str, port: int) -> list[str]:
    """The command that serves `model` in today's way."""
    return [sys.executable, "-m", "lazydecode.bench.eager_server", model, str(port)]


def floor_command(port: int) -> list[str]:
    """The command of a server that receives and identifies media, and does nothing else."""
    return [sys.executable, "-m", "lazydecode.bench.floor_server", str(port)]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310  # loopback
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process; on Linux to the nanosecond, elsewhere in ticks of 10 ms."""
    if _NAMES_CLOCKS:
        # The clock of a process is named by its id (clock_getcpuclockid(3)).
        return time.clock_gettime(~process.pid << 3 | _CPU_CLOCK)
    times = process.cpu_times()
    return float(times.user + times.system)


class MemoryWatch:
    """The largest memory of a server while the block runs."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-memory", daemon=True)
        self.peak = server.rss()

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self.peak = max(self.peak, self._server.rss())

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.peak = max(self.peak, self._server.rss())


def histogram_percentile(
    before: dict[tuple[str, str], float],
    after: dict[tuple[str, str], float],
    name: str,
    fraction: float,
) -> float | None:
    """Return the upper bound of the bucket that holds a percentile of what came in between.

    None if nothing came.
    """
    buckets: list[tuple[float, float]] = []
    for (sample, labels), value in after.items():
        if sample == f"{name}_bucket" and labels.startswith('le="'):
            bound = float(labels[4:-1].replace("+Inf", "inf"))
            buckets.append((bound, value - before.get((sample, labels), 0.0)))
    buckets.sort()
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return None
    return next(bound for bound, count in buckets if count >= fraction * total)


def difference(
    before: dict[tuple[str, str], float], after: dict[tuple[str, str], float], name: str
) -> Any:
    """Return by how much a counter grew, over all its labels; None if the server has none."""
    grown = [value - before.get(key, 0.0) for key, value in after.items() if key[0] == name]
    return sum(grown) if grown else None
