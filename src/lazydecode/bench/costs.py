"""What one request costs a server in CPU: few requests at a time, in turns with all others.

Under load, servers are also asked for their health, and the client takes cores and caches of
theirs. Here nothing else runs: a lean client sends one request after the other on one connection.
Client and server each keep to a core of their own. A scheduler that wakes the server now here,
now there has it find cold caches: on two cores that took it from 1.5 ms a request to 2.5.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lazydecode.bench.lean_client import measure_rate
from lazydecode.bench.measure import percentile
from lazydecode.bench.scenarios import Batch, Scenario
from lazydecode.bench.server_process import ServerUnderTest

COSTED: Final = ("hot-720p", "headers-720p", "hot-4k", "unseen-4x720p-none")
"""Scenarios of which the cost is claimed."""
_REQUESTS: Final = 16
"""Per round."""
_WARM_UP: Final = 32
"""Requests before: the first ones of a process take longer."""
_ROUNDS: Final = 15
_EAGER_ROUNDS: Final = 3
"""Of a server that takes ten to a hundred times as long."""
_SEED: Final = 7000


@dataclass(frozen=True, slots=True)
class _Contest:
    """One scenario on one server."""

    scenario: Scenario
    side: str
    server: ServerUnderTest
    batch: Batch
    """Requests to warm up with, then those of all rounds."""
    rounds: int
    per_round: int
    cpu_ms: list[float]

    @property
    def warm_up(self) -> Sequence[bytes]:
        """What is sent before: also what the scenario takes as known."""
        num_timed = self.rounds * self.per_round
        return [*self.batch.prime, *self.batch.bodies[: len(self.batch.bodies) - num_timed]]

    def bodies(self, number: int) -> Sequence[bytes]:
        """The requests of one round."""
        begin = len(self.batch.bodies) - (self.rounds - number) * self.per_round
        return self.batch.bodies[begin : begin + self.per_round]


def costs_section(
    scenarios: Sequence[Scenario],
    servers: Mapping[str, ServerUnderTest],
    *,
    headers: Mapping[str, str] | None,
    progress: Callable[[str], None],
    tiny: bool = False,
) -> list[dict[str, Any]]:
    """Return per scenario and server the CPU ms of a request; medians over the rounds.

    Args:
        scenarios: Those of `COSTED` are measured.
        servers: By side; those whose processes are not seen are left out.
        headers: Of each request.
        progress: Told what is done.
        tiny: For trying: two rounds of two requests.
    """
    rounds, per_round, warm_up = (2, 2, 2) if tiny else (_ROUNDS, _REQUESTS, _WARM_UP)
    contests = []
    for number, scenario in enumerate(s for s in scenarios if s.name in COSTED):
        progress(f"cost of a request, {scenario.name}: building")
        # Unseen media have to be encoded first.
        count, ahead = per_round, warm_up
        if scenario.name.startswith("unseen"):
            count, ahead = per_round // 2, warm_up // 4
        for side, server in servers.items():
            if server.is_visible:
                turns = min(rounds, _EAGER_ROUNDS) if side == "eager" else rounds
                batch = scenario.build(ahead + turns * count, _SEED + 10 * number)
                contests.append(_Contest(scenario, side, server, batch, turns, count, []))
    with _apart([contest.server for contest in contests]):
        for contest in contests:
            progress(f"cost of a request, {contest.scenario.name}: {contest.side}, warming up")
            _send(contest, contest.warm_up, headers)
        for turn in range(rounds):
            progress(f"cost of a request: round {turn + 1} of {rounds}")
            shift = turn % max(1, len(contests))
            for contest in contests[shift:] + contests[:shift]:
                if turn < contest.rounds:
                    bodies = contest.bodies(turn)
                    before = contest.server.cpu_s()
                    _send(contest, bodies, headers)
                    spent = contest.server.cpu_s() - before
                    contest.cpu_ms.append(spent * 1e3 / len(bodies))
    return [
        {
            "name": contest.scenario.name,
            "side": contest.side,
            "requests": len(contest.cpu_ms) * contest.per_round,
            "cpu_ms": statistics.median(contest.cpu_ms),
            "p10_ms": percentile(contest.cpu_ms, 0.1),
            "p90_ms": percentile(contest.cpu_ms, 0.9),
        }
        for contest in contests
    ]


@contextlib.contextmanager
def _apart(servers: Sequence[ServerUnderTest]) -> Iterator[None]:
    """Let this process run on the first core and the servers on the last; all on any afterwards."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[:1])
        for server in servers:
            server.set_cores(cores[-1:])
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for server in servers:
            server.set_cores(cores)


def _send(contest: _Contest, bodies: Sequence[bytes], headers: Mapping[str, str] | None) -> None:
    if bodies:
        url = contest.server.url + contest.scenario.route
        asyncio.run(measure_rate(url, bodies, 1, headers=headers))
        time.sleep(0.005)  # what follows an answer is its cost too
