from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lazydecode.bench.goals import goals_grid
from lazydecode.bench.idle_loop import IdleLoop
from lazydecode.bench.lean_client import measure_rate
from lazydecode.bench.page import write_page
from lazydecode.bench.plots import write_plots
from lazydecode.bench.record import read_record, write_record
from lazydecode.bench.scenarios import (
    RENDER,
    Batch,
    MediaPool,
    image_part,
    request_body,
    scenarios,
)
from lazydecode.bench.serve import ServeOptions, run_serve
from lazydecode.bench.server_process import floor_command, free_port, started_server
from lazydecode.cli.main import cli
from tests.server.harness import Server


@pytest.fixture(scope="module")
def server(tiny_model: Any) -> Iterator[Server]:
    with Server(tiny_model("qwen2_5_vl", weights=False), engine="none") as server:
        yield server


@pytest.fixture(scope="module")
def record(server: Server) -> dict[str, Any]:
    options = ServeOptions(url=server.url, requests=2, concurrency=(2,), tiny=True)
    return run_serve(options)


def test_every_scenario_runs(record: dict[str, Any]) -> None:
    assert json.loads(json.dumps(record)) == record
    names = [row["name"] for row in record["scenarios"]]
    assert names == [s.name for s in scenarios(MediaPool(tiny=True), chat=False)]
    for row in record["scenarios"]:
        levels = [run["concurrency"] for run in row["runs"]]
        assert levels == ([2] if row["name"] not in ("storm", "heavy") else levels)
        for run in row["runs"]:
            assert run["errors"] == {}
            assert {"mean", "p50", "p95", "p99", "max"} == run["latency_ms"].keys()
            assert "cpu_ms_per_request" not in run  # Nobody said which process it is.
            idle = run.get("idle_loop_lag_p99_ms")
            assert idle is None if row["name"] != "heavy" else idle >= 0


def test_what_is_known_is_not_decoded_and_what_is_unseen_is(record: dict[str, Any]) -> None:
    decodes = {
        row["name"]: [run.get("decodes") or 0 for run in row["runs"]] for row in record["scenarios"]
    }
    assert decodes["hot-720p"] == decodes["headers-720p"] == [0]
    assert decodes["unique-720p"] == [2]
    assert decodes["video-cold"] == [2]
    assert decodes["video-hot"] == [0]
    assert decodes["unseen-4x720p-none"] == [0]
    assert decodes["storm"] == [1]


def test_load_is_drawn_for_every_scenario_and_the_same_each_time(
    record: dict[str, Any], tmp_path: Path
) -> None:
    first, again = (write_plots(record, tmp_path / name) for name in "ab")
    assert [path.name for path in first] == ["load.svg"]
    drawn = first[0].read_text("utf-8")
    assert drawn == again[0].read_text("utf-8")
    for row in record["scenarios"]:
        assert f">{row['name']}<" in drawn
    assert first[0].with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_goals_and_page_come_from_the_record(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    write_record(record, path)
    grid = goals_grid(None, read_record(path))
    assert any("one unseen item" in row[0] for row in grid.rows)
    page = write_page(None, read_record(path), "## What was tried\n\nThis.")
    assert "](figures/load.svg)" in page
    assert page.startswith("# Performance")
    assert "| storm |" in page
    assert "## What was tried" in page
    result = CliRunner().invoke(cli, ["bench", "goals", str(path)])
    assert result.exit_code == 0, result.output
    assert "1 decode" in result.output


def test_an_idle_loop_is_sampled_until_the_block_ends() -> None:
    with IdleLoop() as idle:
        time.sleep(0.5)
    samples = idle.samples_ms
    assert 5 <= len(samples) <= 26  # 25 on a quiet machine
    assert 0 <= min(samples) <= idle.percentile_ms(0.5) <= idle.percentile_ms(1.0) == max(samples)


def test_a_server_that_refuses_is_counted(server: Server) -> None:
    options = ServeOptions(url=server.url + "/nowhere", requests=1, concurrency=(1,),
                           names=("text",), tiny=True)  # fmt: skip
    record = run_serve(options)
    (run,) = record["scenarios"][0]["runs"]
    assert run["errors"] == {"status 404": 1}
    assert run["latency_ms"] == {}
    arguments = ["--url", server.url + "/nowhere", "--size", "tiny", "--scenario", "text"]
    result = CliRunner().invoke(cli, ["bench", "serve", *arguments])
    assert result.exit_code == 1
    assert "Under load" in result.output
    assert "no request was answered in: text, ours" in result.output


@pytest.mark.slow
def test_the_command_starts_and_ends_a_server_of_its_own(tiny_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    result = CliRunner().invoke(
        cli,
        ["bench", "serve", str(tiny_model("qwen2_5_vl", weights=False)), "--size", "tiny",
         "--with-eager", "--no-scaling", "--scenario", "hot-720p", "--concurrency", "2",
         "-o", str(path)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = read_record(path)
    runs = record["scenarios"][0]["runs"]
    assert [run["side"] for run in runs] == ["ours", "eager"]
    assert all(run["errors"] == {} and run["peak_rss_mb"] > 0 for run in runs)
    costs = {row["side"]: row for row in record["costs"]}
    assert {row["requests"] for row in costs.values()} == {4}
    assert 0 < costs["floor"]["cpu_ms"] < costs["ours"]["cpu_ms"]
    assert "a request, hot-720p" in goals_grid(None, record).to_markdown()


def test_the_floor_identifies_what_it_is_sent() -> None:
    # What is no base64 is the one thing that it cannot answer.
    port = free_port()
    with started_server(floor_command(port), port) as server:
        bodies = [request_body([image_part(bytes(size))], "none") for size in (3, 300_000, 3000)]
        bodies += [b'{"messages": []}', b"{}"]
        assert asyncio.run(measure_rate(server.url + RENDER, bodies, 2)) > 0
        wrong = [b'{"url": "data:image/png;base64,!!!!"}']
        with pytest.raises(RuntimeError):
            asyncio.run(asyncio.wait_for(measure_rate(server.url + RENDER, wrong, 1), 60))


def test_wrong_use_is_explained() -> None:
    run = CliRunner().invoke
    assert "unknown scenario" in run(cli, ["bench", "serve", "--url", "http://127.0.0.1:9",
                                           "--scenario", "x"]).output  # fmt: skip
    assert "not both" in run(cli, ["bench", "serve", "m", "--url", "http://127.0.0.1:9"]).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--url", "ftp://127.0.0.1:9"], "not the http URL of a server"),
        (["--url", "http://127.0.0.1:9", "--pid", "2147483647"], "no process 2147483647"),
        (["--scenario", "x"], "unknown scenario"),
        (["--header", "x"], "not NAME:VALUE"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_built(
    arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(cli, ["bench", "serve", "--size", "tiny", *arguments])
    assert result.exit_code in (1, 2), result.output
    assert said in result.output
    assert "building" not in result.output


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"\xffnotes")
    result = CliRunner().invoke(cli, ["bench", "goals", str(tmp_path / "notes.txt")])
    assert (result.exit_code, "notes.txt is not a benchmark record" in result.output) == (1, True)


def media_of(batch: Batch) -> list[list[Any]]:
    """What of each request's messages is no text."""
    messages = [json.loads(body)["messages"] for body in batch.bodies]
    return [
        [
            part
            for m in group
            if isinstance(m["content"], list)
            for part in m["content"]
            if part["type"] != "text"
        ]
        for group in messages
    ]


def test_unseen_media_differ_between_measurements() -> None:
    pool = MediaPool(tiny=True)
    for scenario in scenarios(pool, chat=True):
        first, second = scenario.build(3, 0), scenario.build(3, 1)
        assert len(first.bodies) == 3
        known = bool(first.prime) or scenario.name == "text"
        assert (media_of(first) == media_of(second)) == known, scenario.name
        # Questions about known pictures differ: one that came before costs less.
        asks_anew = any(word in scenario.name for word in ("hot-720p", "hot-4k", "headers-"))
        assert (first.bodies == second.bodies) == (known and not asks_anew), scenario.name
        assert all(json.loads(body)["messages"] for body in first.bodies)
