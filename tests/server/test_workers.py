"""Several worker processes: both answer, and nothing that is killed stops the others."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.builders import make_jpeg
from tests.server.command import Process, lazydecode
from tests.server.harness import data_url, image, request, text

WAIT_S = 120.0
TWO = ("--port", "0", "--workers", "2", "--media-processes", "0")


def children(server: Process) -> dict[str, psutil.Process]:
    """The server's processes below the first one, by name."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return {child.name(): child for child in found if child.status() != psutil.STATUS_ZOMBIE}


def metric(url: str, name: str, labels: str = "", client: httpx.Client | None = None) -> float:
    """A sample over all workers; 0 if there is none."""
    get = httpx.get if client is None else client.get
    written = get(f"{url}/metrics", timeout=WAIT_S).text
    found = re.search(rf"^lazydecode_{name}{re.escape(labels)} (\S+)$", written, re.MULTILINE)
    return float(found[1]) if found else 0.0


def answering(client: httpx.Client, url: str, workers: list[psutil.Process]) -> psutil.Process:
    """Which worker has the client's connection, which stays open."""
    port = httpx.URL(url).port
    with client.stream("GET", f"{url}/health", timeout=WAIT_S) as answer:
        own = answer.extensions["network_stream"].get_extra_info("client_addr")
        answer.read()
    for worker in workers:
        for connection in worker.net_connections("tcp"):
            if connection.laddr.port == port and connection.raddr and connection.raddr == own:
                return worker
    raise AssertionError("the connection is nobody's")


def wait_healthy(url: str, num_processes: int, server: Process) -> None:
    """Return when all workers serve."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        # Whichever worker answers knows of all.
        if len(children(server)) == num_processes and all(
            httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200 for _ in range(4)
        ):
            return
        time.sleep(0.05)
    raise AssertionError(server.output)


def check_uuids(url: str) -> None:
    """What came under a uuid to one worker is what it stands for to all of them."""
    first, second = (data_url(make_jpeg() + bytes([number])) for number in range(2))

    def render(part: dict[str, Any]) -> httpx.Response:  # by whichever worker
        return httpx.post(f"{url}/v1/chat/completions/render", json=request(part), timeout=WAIT_S)

    known = render(image(first, uuid="mine")).json()["features"]
    for _ in range(12):
        refused = render(image(second, uuid="mine"))
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "uuid"
    answers = [render(image(None, uuid="mine")) for _ in range(12)]
    for answer in answers:
        if answer.status_code == 200:
            assert answer.json()["features"] == known
        else:  # the other worker never had the picture, and says so
            assert "send the data again" in answer.json()["error"]["message"]
    assert {answer.status_code for answer in answers} <= {200, 400}
    assert all(render(image(first, uuid="mine")).status_code == 200 for _ in range(12))


@pytest.mark.slow
def test_workers_share_a_port_and_an_engine_and_are_replaced(
    tiny_model: Callable[..., Path],
) -> None:
    model = str(tiny_model("qwen2_5_vl"))
    body = request(image(data_url(make_jpeg())), text("x"), max_tokens=2, temperature=0)
    flags = *TWO, "--uuid-conflict", "error"
    with lazydecode("serve", model, *flags) as server:
        url = server.read_until(r"serving .* at (http://\S+)")
        wait_healthy(url, 3, server)
        first = children(server)
        assert set(first) == {"lazydecode-0", "lazydecode-1", "lazydecode-eng"}
        answers: set[str] = set()
        count = 0

        def ask(number: int) -> None:
            nonlocal count
            for _ in range(number):  # each over a connection of its own
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S)
                assert answer.status_code == 200, answer.text
                answers.add(answer.json()["choices"][0]["message"]["content"])
                count += 1

        def requests_answered(client: httpx.Client | None = None) -> float:
            return metric(url, "requests_total", '{route="chat",status="200"}', client)

        def misses() -> float:
            return metric(url, "items_total", '{modality="image",outcome="miss"}')

        ask(16)
        # Each worker met the item once, whichever of them is asked.
        assert misses() == metric(url, "cache_entries", '{cache="sender"}') == 2
        assert requests_answered() == count

        assert httpx.post(f"{url}/reset_mm_cache", timeout=WAIT_S).status_code == 200
        deadline = time.monotonic() + WAIT_S
        while metric(url, "cache_entries", '{cache="sender"}') and time.monotonic() < deadline:
            time.sleep(0.02)
        assert metric(url, "cache_entries", '{cache="sender"}') == 0

        check_uuids(url)

        ask(8)
        workers = [first["lazydecode-0"], first["lazydecode-1"]]
        with httpx.Client() as client:
            killed = answering(client, url, workers)
            assert requests_answered(client) == count
            # Nobody asked for its metrics since: it told them when it asked for the other's.
            killed.kill()
        psutil.wait_procs([killed], timeout=30)
        wait_healthy(url, 3, server)
        second = children(server)
        kept = {process.pid for process in first.values()} - {killed.pid}
        assert kept < {process.pid for process in second.values()}
        ask(8)
        assert requests_answered() == count  # what the dead one had counted is in it

        second["lazydecode-eng"].kill()
        ask(8)  # a delay, and nothing else
        wait_healthy(url, 3, server)
        third = children(server)
        assert third["lazydecode-eng"].pid != first["lazydecode-eng"].pid
        assert metric(url, "engine_up") == 1
        assert len(answers) == 1
        assert server.end(signal.SIGTERM) == 0
        assert not any(child.is_running() for child in third.values())
        assert "Traceback" not in server.output
        for worker in ("worker-0", "worker-1"):
            assert re.search(rf"{worker}\[\d+\] .*request .* chat 200", server.output)


@pytest.mark.slow
def test_workers_that_cannot_start_say_why_once(tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("qwen2_5_vl", weights=False))
    with lazydecode("serve", model, *TWO) as server:
        server.read_until("Error: ")
        assert server.end() == 1
        assert len(re.findall(r"^Error: the engine cannot start", server.output, re.MULTILINE)) == 1
        assert "Traceback" not in server.output
