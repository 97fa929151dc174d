"""The soak itself, in short: it finds what a server leaks, and sees each process and kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from lazydecode.bench.endurance import EnduranceOptions, soak
from lazydecode.bench.footprint import measure_footprint
from lazydecode.bench.goals import goals_grid
from lazydecode.bench.server_process import free_port, started_server
from lazydecode.bench.tables import grids

SERVER = Path(__file__).with_name("leaking_server.py")
MIB = 2**20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's smaps_rollup")


def soaked(leaked: int, warming: int) -> dict[str, Any]:
    port = free_port()
    options = EnduranceOptions(
        "", soak_requests=1_200, soak_batch=20, soak_size=(64, 48), warm_up_requests=600
    )
    command = [sys.executable, str(SERVER), str(port), str(leaked), str(warming)]
    with started_server(command, port) as server:
        return soak(server, options)


@pytest.mark.parametrize(
    ("leaked", "warming", "verdict"), [(1024, 0, "grows"), (0, 20_000, "flat")]
)
def test_a_leak_of_a_kilobyte_per_request_is_found_and_warming_up_is_none(
    leaked: int, warming: int, verdict: str
) -> None:
    # So few requests are a short look at a whole process: now and then its heap takes a step.
    for _ in range(4):
        measured = soaked(leaked, warming)
        if measured["trend"]["verdict"] == verdict:
            break
    assert json.loads(json.dumps(measured)) == measured
    assert (measured["requests"], measured["errors"]) == (1_200, {})
    assert measured["trend"]["verdict"] == verdict
    # What is kept lies between what is freed: the heap grows by more than it holds.
    assert leaked / 1100 - 0.5 < measured["trend"]["slope_mb_per_1000"] < leaked / 500 + 1.0
    looks = measured["looks"]
    assert looks["requests"][-1] == 1_200
    sizes = looks["mb"]["anonymous"]
    assert sizes[-1] - sizes[0] > (leaked * 1_100 + warming * 400) / 1e6
    assert looks["anonymous_mb"] == {"front end": sizes}
    record = {
        "kind": "endurance",
        "settings": {"requests": 1, "images": 1, "budgets_mb": {"cache": 1}},
        "crowd": {"growth_mb": 0.0, "errors": {}},
        "soak": measured,
    }
    (row,) = (row for row in goals_grid(None, None, record).rows if "mixed requests" in row[0])
    assert row[-1] == ("yes" if verdict == "flat" else "no")
    record["soak"] = {**measured, "trend": None}
    (unknown,) = (row for row in goals_grid(None, None, record).rows if "mixed requests" in row[0])
    assert unknown[-3:] == ("too short a run to say", "-", "no")
    (grid,) = grids(record)
    assert grid.rows[0] == ("anonymous, all processes", *grid.rows[1][1:])
    assert grid.rows[1][5] == f"{sizes[-1]:.1f}"


def test_shared_memory_counts_once_and_before_it_is_mapped() -> None:
    script = """if True:
        import mmap, os, sys, time
        fd = os.memfd_create("test")
        os.ftruncate(fd, 50 << 20)
        os.pwrite(fd, bytes(8 << 20), 0)
        heap = os.urandom(6 << 20)
        if os.fork():
            memory = mmap.mmap(fd, 50 << 20)
            memory[: 4 << 20]
        os.write(1, b"ready\\n")  # at once: print writes the end of the line apart
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        root = psutil.Process(process.pid)
        found = measure_footprint([root, *root.children()])
        process.communicate()
    assert len(found.processes) == 2
    assert found.shared == found.memory_files == 8 * MIB
    parts = [pages.anonymous for pages in found.processes.values()]
    assert all(3 * MIB < part < 12 * MIB for part in parts)  # each has half of the heap, and more
    assert found.own == sum(parts) + 8 * MIB
    assert found.file > 0


def test_a_process_that_is_gone_counts_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        gone = psutil.Process(process.pid)
        process.wait()
    found = measure_footprint([psutil.Process(os.getpid()), gone])
    assert list(found.processes) == ["front end"]
