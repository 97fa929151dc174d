"""An event loop that does nothing, beside a server: how late its timers are is the machine's doing.

`python -m lazydecode.bench.idle_loop` samples until its input ends, and prints the samples.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from types import TracebackType
from typing import Final

import uvloop

from lazydecode.bench.measure import percentile

_PERIOD_S: Final = 0.02
"""As often as the server samples its own."""


class IdleLoop:
    """Watches the lag of a process of its own while the block runs."""

    def __init__(self) -> None:
        self.samples_ms: list[float] = []
        """How late each timer was, in ms; there when the block has ended."""

    def __enter__(self) -> IdleLoop:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lazydecode.bench.idle_loop"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it begins
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        answer, _ = self._process.communicate(timeout=60)
        if kind is None:
            self.samples_ms = json.loads(answer)

    def percentile_ms(self, fraction: float) -> float:
        """Return a percentile of how late its timers were, in ms."""
        return percentile(self.samples_ms, fraction)


async def _sample() -> list[float]:
    """Return how late a timer was, in ms, again and again, until the input ends."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    samples_ms: list[float] = []
    while not ended.is_set():
        due = time.perf_counter() + _PERIOD_S
        await asyncio.sleep(_PERIOD_S)
        samples_ms.append(max(0.0, time.perf_counter() - due) * 1e3)
    loop.remove_reader(sys.stdin.fileno())
    return samples_ms


def main() -> None:
    """Sample, and print the samples as JSON."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.write(json.dumps(runner.run(_sample())))


if __name__ == "__main__":
    main()
