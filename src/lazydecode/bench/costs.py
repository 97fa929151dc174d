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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lazydecode.bench.lean_client import measure_rate
from lazydecode.bench.measure import percentile
from lazydecode.bench.scenarios import Batch, Scenario
from lazydecode.bench.server_process import ServerUnderTest

COSTED: Final = ("hot-720p", "headers-720p", "hot-4k", "unseen-4x720p-none")
"""Scenarios of which the cost is claimed."""
_SEED: Final = 7000


@dataclass(frozen=True, slots=True)
class _Amount:
    """How much is sent."""

    rounds: int
    counted: int
    """Requests per round whose cost is taken."""
    ahead: int
    """Requests before them: what ran in between has left the core's caches to them."""
    warm_up: int
    """Requests before all rounds: the first ones of a process take longer."""

    @property
    def per_round(self) -> int:
        """All requests of a round."""
        return self.ahead + self.counted


_FULL: Final = _Amount(15, counted=16, ahead=4, warm_up=32)
_UNSEEN: Final = _Amount(15, counted=8, ahead=2, warm_up=8)
"""Of media that have to be encoded first."""
_EAGER: Final = _Amount(3, counted=4, ahead=1, warm_up=2)
"""Of a server that takes ten to a hundred times as long."""
_TINY: Final = _Amount(2, counted=2, ahead=1, warm_up=2)


@dataclass(frozen=True, slots=True)
class _Contest:
    """One scenario on one server."""

    scenario: Scenario
    side: str
    server: ServerUnderTest
    warm_up: Sequence[bytes]
    """What is sent before: also what the scenario takes as known."""
    amount: _Amount
    rounds: Sequence[Sequence[bytes]]
    """Requests of each round."""
    cpu_ms: list[float]


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
    seen = {side: server for side, server in servers.items() if server.is_visible}
    contests: list[_Contest] = []
    for number, scenario in enumerate(s for s in scenarios if s.name in COSTED):
        progress(f"cost of a request, {scenario.name}: building")
        amount = _UNSEEN if scenario.name.startswith("unseen") else _FULL
        amount = _TINY if tiny else amount
        count = amount.warm_up + amount.rounds * amount.per_round
        batch = scenario.build(count, _SEED + 10 * number)
        contests += [
            _contest(scenario, batch, side, server, amount) for side, server in seen.items()
        ]
    with _apart(seen.values()):
        for contest in contests:
            progress(f"cost of a request, {contest.scenario.name}: {contest.side}, warming up")
            _send(contest, contest.warm_up, headers)
        rounds = max((len(contest.rounds) for contest in contests), default=0)
        for turn in range(rounds):
            progress(f"cost of a request: round {turn + 1} of {rounds}")
            shift = turn % len(contests)
            for contest in contests[shift:] + contests[:shift]:
                if turn < len(contest.rounds):
                    ahead = contest.amount.ahead
                    bodies = contest.rounds[turn][ahead:]
                    _send(contest, contest.rounds[turn][:ahead], headers)
                    before = contest.server.cpu_s()
                    _send(contest, bodies, headers)
                    spent = contest.server.cpu_s() - before
                    contest.cpu_ms.append(spent * 1e3 / len(bodies))
    return [
        {
            "name": contest.scenario.name,
            "side": contest.side,
            "requests": contest.amount.rounds * contest.amount.counted,
            "cpu_ms": statistics.median(contest.cpu_ms),
            "p10_ms": percentile(contest.cpu_ms, 0.1),
            "p90_ms": percentile(contest.cpu_ms, 0.9),
        }
        for contest in contests
    ]


def _contest(
    scenario: Scenario, batch: Batch, side: str, server: ServerUnderTest, built: _Amount
) -> _Contest:
    amount = built
    if side == "eager" and built is not _TINY:
        amount = _EAGER
    begins = [built.warm_up + turn * built.per_round for turn in range(amount.rounds)]
    return _Contest(
        scenario,
        side,
        server,
        [*batch.prime, *batch.bodies[: amount.warm_up]],
        amount,
        [batch.bodies[begin : begin + amount.per_round] for begin in begins],
        [],
    )


@contextlib.contextmanager
def _apart(servers: Collection[ServerUnderTest]) -> Iterator[None]:
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
