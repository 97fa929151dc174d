"""What a second core is worth: misses with each server on one core and on all.

A server cannot gain more than the machine gives. Cores share the way to memory, and decoding and
processing pictures needs it: so processes that share nothing else are measured beside it.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from lazydecode.bench.bare_work import bare_workers
from lazydecode.bench.lean_client import measure_rate
from lazydecode.bench.scenarios import MediaPool, scenarios
from lazydecode.bench.server_process import ServerUnderTest

_SCENARIO: Final = "unique-720p"
_CONCURRENCY: Final = 8
_TURNS: Final = 5
_SHORT_TURNS: Final = 3
"""Of a server that is slow, and for trying."""
_BARE_PICTURES: Final = 40


def scaling_section(
    model: str,
    servers: Mapping[str, ServerUnderTest],
    *,
    requests: int,
    headers: Mapping[str, str] | None,
    progress: Callable[[str], None],
    tiny: bool = False,
) -> dict[str, Any]:
    """Return the rates of misses on one core and on all, and of bare work; medians over turns.

    The client runs on the same cores: one that had the second core to itself while the server has
    one, and shares it while the server has both, would make two cores look like less. Rates are
    those of the time in which all connections are busy.

    Args:
        model: What the servers serve.
        servers: By side.
        requests: Per turn; of a side that is not slow four times as many.
        headers: Of each request.
        progress: Told what is done.
        tiny: For trying.
    """
    cores = sorted(os.sched_getaffinity(0))
    pool = MediaPool(tiny=tiny)
    scenario = next(s for s in scenarios(pool, chat=False) if s.name == _SCENARIO)
    counts = sorted({1, len(cores)})
    found: dict[str, Any] = {"cores": len(cores)}
    with bare_workers(model, cores) as bare:
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for turn in range(_SHORT_TURNS if tiny else _TURNS):
            progress(f"scaling, bare decoder and processor: turn {turn + 1}")
            for count in counts:
                rates[count].append(bare.rate(count, 1 if tiny else _BARE_PICTURES))
        found["floor"] = _result(rates)
    for side, server in servers.items():
        rates = {count: [] for count in counts}
        client_ms: list[float] = []
        turns, factor = (_SHORT_TURNS, 1) if side == "eager" or tiny else (_TURNS, 4)
        for turn in range(turns):
            for count in counts:
                progress(f"scaling, {side}: {count} core(s)")
                batch = scenario.build(max(2, factor * requests), 5000 + 10 * turn + count)
                server.set_cores(cores[:count])
                os.sched_setaffinity(0, cores[:count])
                url = server.url + scenario.route
                client = time.process_time()
                load = measure_rate(url, batch.bodies, _CONCURRENCY, headers=headers)
                try:
                    rates[count].append(asyncio.run(load))
                finally:
                    os.sched_setaffinity(0, cores)
                client_ms.append((time.process_time() - client) * 1e3 / len(batch.bodies))
        server.set_cores(cores)
        found[side] = {**_result(rates), "client_cpu_ms": statistics.median(client_ms)}
    return found


def _result(rates: Mapping[int, list[float]]) -> dict[str, Any]:
    medians = {count: statistics.median(values) for count, values in rates.items()}
    return {
        "requests_per_s": {str(count): rate for count, rate in medians.items()},
        "speedup": medians[max(medians)] / medians[1] if medians[1] else None,
    }
