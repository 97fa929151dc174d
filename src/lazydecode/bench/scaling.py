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
from lazydecode.bench.measure import percentile
from lazydecode.bench.scenarios import MediaPool, Scenario, scenarios
from lazydecode.bench.server_process import ServerUnderTest

_SCENARIO: Final = "unique-720p"
_CONCURRENCY: Final = 8
_TURNS: Final = 9
_SHORT_TURNS: Final = 3
"""Of a server that is slow, and for trying."""
_QUIET: Final = 0.9
"""Percentile of the rates: of a turn in which nobody else wanted the machine."""
_CACHE_BYTES: Final = "lazydecode_cache_bytes"
_GROWN: Final = 1.01
_MAX_FILLING: Final = 32
"""Batches after which a cache that still grows is taken as it is."""
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
    """Return the rates of misses on one core and on all, and of bare work, in quiet turns.

    The client runs on the same cores: one that had the second core to itself while the server has
    one, and shares it while the server has both, would make two cores look like less. Rates are
    those of the time in which all connections are busy. Before, the server's cache is filled: until
    then each result lies in memory that nobody has used, whose pages cost a virtual machine up to
    half of a miss, or next to nothing, as its host has them at hand or not.

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
        turns, factor = (_SHORT_TURNS, 1) if side == "eager" or tiny else (_TURNS, 2)
        if side != "eager":
            progress(f"scaling, {side}: filling the cache")
            asyncio.run(_fill(server, scenario, requests, headers))
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


async def _fill(
    server: ServerUnderTest,
    scenario: Scenario,
    requests: int,
    headers: Mapping[str, str] | None,
) -> None:
    """Send misses until the server's caches grow no more, if it says how large they are."""
    held = -1.0
    for number in range(_MAX_FILLING):
        samples = await asyncio.to_thread(server.metrics)
        now = sum(value for (name, _), value in samples.items() if name == _CACHE_BYTES)
        if now <= held * _GROWN:
            return
        held = now
        batch = scenario.build(2 * requests, 4000 + number)
        await measure_rate(server.url + scenario.route, batch.bodies, _CONCURRENCY, headers=headers)


def _result(rates: Mapping[int, list[float]]) -> dict[str, Any]:
    quiet = {count: percentile(values, _QUIET) for count, values in rates.items()}
    most = max(quiet)
    ratios = [many / one for one, many in zip(rates[1], rates[most], strict=True) if one]
    return {
        "requests_per_s": {str(count): rate for count, rate in quiet.items()},
        "speedup": quiet[most] / quiet[1] if quiet[1] else None,
        "median_speedup": statistics.median(ratios) if ratios else None,
    }
