"""Timing of several ways to do the same, in turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

_MIN_SAMPLE_S: Final = 0.005
"""Shorter calls are repeated within a sample until they take so long."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call takes; medians over the rounds."""

    wall_ms: float
    cpu_ms: float
    """CPU of the whole process, worker threads included: steadier than wall time when the
    machine has other work."""
    p10_ms: float
    """Of the CPU time."""
    p90_ms: float
    rounds: int
    calls_per_round: int

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def measure(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, max_s: float = 20.0
) -> dict[str, Timing]:
    """Time each contestant once per round, in an order that moves on with every round.

    Each runs once before, unmeasured. The garbage collector is off meanwhile. After `max_s`
    seconds no further round begins, but three are always run (or `rounds`, if fewer).
    """
    calls = {name: _calls_per_sample(run) for name, run in contestants.items()}
    names = list(contestants)
    walls: dict[str, list[float]] = {name: [] for name in names}
    cpus: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.perf_counter() + max_s
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            if number >= 3 and time.perf_counter() > deadline:
                break
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                run, count = contestants[name], calls[name]
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(count):
                    run()
                cpus[name].append((time.process_time() - cpu) / count)
                walls[name].append((time.perf_counter() - wall) / count)
    finally:
        if was_enabled:
            gc.enable()
    return {name: _timing(walls[name], cpus[name], calls[name]) for name in names}


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of the values lie, interpolated; 0 if none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _calls_per_sample(run: Callable[[], object]) -> int:
    run()
    taken = min(_wall_s(run), _wall_s(run))  # One may have been interrupted.
    return max(1, min(2000, int(_MIN_SAMPLE_S / max(taken, 1e-7))))


def _wall_s(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _timing(walls: Sequence[float], cpus: Sequence[float], calls: int) -> Timing:
    return Timing(
        wall_ms=statistics.median(walls) * 1e3,
        cpu_ms=statistics.median(cpus) * 1e3,
        p10_ms=percentile(cpus, 0.1) * 1e3,
        p90_ms=percentile(cpus, 0.9) * 1e3,
        rounds=len(walls),
        calls_per_round=calls,
    )
