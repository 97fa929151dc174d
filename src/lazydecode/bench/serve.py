"""`bench serve`: a server under load, scenario by scenario."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pybase64

from lazydecode.bench.costs import costs_section
from lazydecode.bench.idle_loop import IdleLoop
from lazydecode.bench.load import HealthPoll, LoadResult, run_load
from lazydecode.bench.measure import measure
from lazydecode.bench.record import machine, new_record
from lazydecode.bench.scaling import scaling_section
from lazydecode.bench.scenarios import RENDER, Batch, MediaPool, Scenario, scenarios
from lazydecode.bench.server_process import (
    MemoryWatch,
    ServerUnderTest,
    difference,
    eager_command,
    floor_command,
    free_port,
    histogram_percentile,
    own_command,
    started_server,
)

LAG: Final = "lazydecode_event_loop_lag_seconds"
PROCESSES: Final = "lazydecode_media_processes"
_PROCESSES_S: Final = 60.0
_WARM_UP: Final = 3
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is run, and how much of it."""

    model: str | None = None
    """Folder of a model to serve; None: `url` is given."""
    url: str | None = None
    """A server that runs already."""
    pid: int | None = None
    """Its process, if its CPU and memory are to be seen."""
    headers: dict[str, str] | None = None
    engine: str = "none"
    """Of the server that is started: `none`, or `transformers` for the chat scenarios too."""
    with_eager: bool = False
    """Whether a server that works in today's way is measured beside it."""
    scaling: bool = True
    """Whether misses are also measured with the server on one core (Linux, started servers)."""
    requests: int = 32
    """Per scenario and concurrency."""
    concurrency: tuple[int, ...] = (1, 8, 32)
    names: tuple[str, ...] = ()
    """Scenarios; none given: all."""
    tiny: bool = False
    """Small media, for trying the runner."""
    server_flags: tuple[str, ...] = ()


def run_serve(options: ServeOptions, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Measure, and return the record.

    Raises:
        RuntimeError: If a server does not start, or none answers at the URL.
        ValueError: If a scenario or the server's process is unknown, or neither a model nor a
            URL is given.
    """
    settings = {
        "model": None if options.model is None else Path(options.model).name,
        "engine": options.engine,
        "requests": options.requests,
        "concurrency": list(options.concurrency),
        "server_flags": list(options.server_flags),
        "tiny": options.tiny,
    }
    record = new_record("serve", settings)
    chosen = choose(options)
    with _servers(options, progress) as servers:
        record["servers"] = {side: {"rss_mb": s.rss() / 1e6} for side, s in servers.items()}
        record["scenarios"] = [
            _run_scenario(scenario, number, options, servers, progress)
            for number, scenario in enumerate(chosen)
        ]
        record["costs"] = _costs(chosen, options, servers, progress)
        if options.scaling and options.model is not None and hasattr(os, "sched_setaffinity"):
            record["scaling"] = scaling_section(
                options.model,
                servers,
                requests=options.requests,
                headers=options.headers,
                progress=progress,
                tiny=options.tiny,
            )
    return record


def choose(options: ServeOptions) -> list[Scenario]:
    """Return the scenarios of a run.

    Raises:
        ValueError: If one is unknown; it lists the known ones.
    """
    known = {s.name: s for s in scenarios(MediaPool(tiny=options.tiny), chat=_generates(options))}
    unknown = set(options.names) - known.keys()
    if unknown:
        raise ValueError(f"unknown scenario {sorted(unknown)}; known: {', '.join(known)}")
    return [s for name, s in known.items() if not options.names or name in options.names]


def without_answer(record: dict[str, Any]) -> list[str]:
    """Return the runs of a record in which every request failed, as "scenario, side"."""
    return [
        f"{row['name']}, {run['side']}"
        for row in record["scenarios"]
        for run in row["runs"]
        if run["requests"] and run["requests"] == sum(run["errors"].values())
    ]


def _generates(options: ServeOptions) -> bool:
    return options.engine != "none"


@contextlib.contextmanager
def _servers(options: ServeOptions, progress: Progress) -> Iterator[dict[str, ServerUnderTest]]:
    if options.url is not None:
        server = ServerUnderTest(options.url, options.pid)
        server.require_answer()
        yield {"ours": server}
        return
    if options.model is None:
        raise ValueError("give a model or a URL")
    with contextlib.ExitStack() as stack:
        servers = {}
        progress("starting the server")
        port = free_port()
        command = own_command(
            options.model, port, engine=options.engine, flags=options.server_flags
        )
        servers["ours"] = stack.enter_context(started_server(command, port))
        if "--media-processes" not in options.server_flags:
            wait_for_processes(servers["ours"])  # until then threads do their work
        if options.with_eager:
            progress("starting the eager server")
            port = free_port()
            servers["eager"] = stack.enter_context(
                started_server(eager_command(options.model, port), port)
            )
        yield servers


def wait_for_processes(server: ServerUnderTest) -> None:
    """Return when a server's processes for media are there, if this machine gets any."""
    if (machine()["cores"] or 1) > 1:
        server.wait_for(PROCESSES, _PROCESSES_S)


def _costs(
    chosen: Sequence[Scenario],
    options: ServeOptions,
    servers: dict[str, ServerUnderTest],
    progress: Progress,
) -> list[dict[str, Any]]:
    """What requests cost the servers, and a third one that does the least."""
    if not any(server.is_visible for server in servers.values()):
        return []
    port = free_port()
    with started_server(floor_command(port), port) as floor:
        return costs_section(
            chosen,
            {**servers, "floor": floor},
            headers=options.headers,
            progress=progress,
            tiny=options.tiny,
        )


def _run_scenario(
    scenario: Scenario,
    number: int,
    options: ServeOptions,
    servers: dict[str, ServerUnderTest],
    progress: Progress,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": scenario.name,
        "about": scenario.about,
        "route": scenario.route,
        "runs": [],
    }
    levels = scenario.concurrency or options.concurrency
    for level_number, concurrency in enumerate(levels):
        count = scenario.num_requests or options.requests * scenario.factor
        if options.tiny:
            count = min(count, options.requests)
        label = f"{scenario.name}, {concurrency} at a time"
        progress(f"{label}: building")
        batch = scenario.build(count, 100 * number + level_number)
        if level_number == 0:
            row["media_bytes"] = sum(map(len, batch.media))
            row["identify_floor_ms"] = _identify_floor(batch.media)
        # The same requests to each server, one server after the other.
        for side, server in servers.items():
            if side == "eager" and scenario.route != RENDER:
                continue
            progress(f"{label}: {side}")
            run = asyncio.run(_measure(server, scenario, batch, concurrency, options, level_number))
            row["runs"].append({"side": side, "concurrency": concurrency, **run})
    return row


async def _measure(
    server: ServerUnderTest,
    scenario: Scenario,
    batch: Batch,
    concurrency: int,
    options: ServeOptions,
    level_number: int,
) -> dict[str, Any]:
    url = server.url + scenario.route
    if batch.prime and level_number == 0:
        await run_load(url, batch.prime, 1, headers=options.headers)
    if level_number == 0 and len(batch.prime) > 0:
        await run_load(url, batch.prime[:_WARM_UP], 1, headers=options.headers)
    before = await asyncio.to_thread(server.metrics)
    cpu = server.cpu_s()
    with contextlib.ExitStack() as watches:
        memory = watches.enter_context(MemoryWatch(server))
        health = watches.enter_context(HealthPoll(server.url))
        idle = watches.enter_context(IdleLoop()) if scenario.is_about_lag else None
        result: LoadResult = await run_load(url, batch.bodies, concurrency, headers=options.headers)
    cpu = server.cpu_s() - cpu
    after = await asyncio.to_thread(server.metrics)
    measured = result.to_dict()
    if idle is not None:
        measured["idle_loop_lag_p99_ms"] = idle.percentile_ms(0.99)
    measured["health_ms"] = health.to_dict()
    if server.is_visible:
        measured["cpu_ms_per_request"] = cpu * 1e3 / len(batch.bodies)
        measured["peak_rss_mb"] = memory.peak / 1e6
    lag = histogram_percentile(before, after, LAG, 0.99)
    if lag is not None:
        measured["loop_lag_p99_ms_at_most"] = lag * 1e3
    decodes = difference(before, after, "lazydecode_decodes_total")
    if decodes is not None:
        measured["decodes"] = decodes
    return measured


def _identify_floor(media: Sequence[bytes]) -> float:
    """CPU ms to decode the base64 of one request's media, and to digest them once."""
    if not media:
        return 0.0
    texts = [pybase64.b64encode(data) for data in media]

    def identify() -> None:
        for text in texts:
            hashlib.sha256(pybase64.b64decode(text, validate=True)).digest()

    return measure({"identify": identify}, rounds=7, max_s=2)["identify"].cpu_ms
