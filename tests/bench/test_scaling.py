"""What a second core is worth, beside what the machine gives to processes that share nothing."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazydecode.bench.bare_work import BareWorkers
from lazydecode.bench.goals import goals_grid
from lazydecode.bench.scaling import scaling_section
from lazydecode.bench.server_process import ServerUnderTest
from tests.server.harness import Server

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="threads are kept to cores on Linux only"
)


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> str:
    return str(tiny_model("qwen2_5_vl", weights=False))


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Server]:
    with Server(Path(model), engine="none") as server:
        yield server


@pytest.mark.slow
def test_rates_stand_beside_those_of_bare_work(model: str, server: Server) -> None:
    before = os.sched_getaffinity(0)
    found = scaling_section(
        model,
        {"ours": ServerUnderTest(server.url)},
        requests=2,
        headers=None,
        progress=lambda _: None,
        tiny=True,
    )
    assert os.sched_getaffinity(0) == before
    assert found["cores"] == len(before)
    for side in ("floor", "ours"):
        rates = found[side]["requests_per_s"]
        assert list(rates) == [str(count) for count in sorted({1, len(before)})]
        assert found[side]["speedup"] == rates[str(len(before))] / rates["1"] > 0
        assert found[side]["median_speedup"] > 0
    record = {"kind": "serve", "scenarios": [], "scaling": {**found, "cores": 2}}
    (row,) = goals_grid(None, record).rows
    floor, ours = found["floor"]["speedup"], found["ours"]["speedup"]
    assert row[2] == f"{floor:.2f}x"
    assert row[4].startswith(f"{ours:.2f}x, median ")
    assert row[5] == f"{ours / floor:.2f}x"


@pytest.mark.parametrize("wait_s", [0, 0.2])
def test_bare_work_that_ends_is_said(wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    workers = BareWorkers("model", [min(os.sched_getaffinity(0))])
    time.sleep(wait_s)  # until it has ended; or not
    with contextlib.closing(workers), pytest.raises(RuntimeError, match="has ended"):
        workers.rate(1, 1)
