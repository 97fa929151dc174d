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

WAIT_S = 240.0
CHATS = "requests_total", '{route="chat",status="200"}'
TWO = ("--port", "0", "--workers", "2", "--media-processes", "0")


def children(server: Process) -> dict[str, psutil.Process]:
    """The server's processes below the first one, by name."""
    return {process.name(): process for process in server.below()}


def sample(written: str, name: str, labels: str = "") -> float:
    """One of the metrics; 0 if there is none."""
    found = re.search(rf"^lazydecode_{name}{re.escape(labels)} (\S+)$", written, re.MULTILINE)
    return float(found[1]) if found else 0.0


def metric(url: str, name: str, labels: str = "") -> float:
    """A sample over all workers."""
    return sample(httpx.get(f"{url}/metrics", timeout=WAIT_S).text, name, labels)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return when it is; a worker that is slow to tell its metrics counts with older ones."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answering(
    client: httpx.Client, url: str, workers: list[psutil.Process]
) -> tuple[psutil.Process, float]:
    """Which worker wrote the metrics, and how many chat requests they count."""
    port = httpx.URL(url).port
    with client.stream("GET", f"{url}/metrics", timeout=WAIT_S) as answer:
        own = answer.extensions["network_stream"].get_extra_info("client_addr")
        written = answer.read().decode()
        for worker in workers:
            for connection in worker.net_connections("tcp"):
                if connection.laddr.port == port and connection.raddr and connection.raddr == own:
                    return worker, sample(written, *CHATS)
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
    flags = *TWO, "--uuid-conflict", "error", "--worker-timeout", "15"
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

        def misses() -> float:
            return metric(url, "items_total", '{modality="image",outcome="miss"}')

        def num_kept() -> float:
            return metric(url, "cache_entries", '{cache="sender"}')

        ask(16)
        while misses() < 2 and count < 200:  # the system may give one worker all connections
            ask(1)
        # Each worker met the item once, whichever of them is asked.
        wait_until(lambda: misses() == num_kept() == 2)
        wait_until(lambda: metric(url, *CHATS) == count)

        assert httpx.post(f"{url}/reset_mm_cache", timeout=WAIT_S).status_code == 200
        wait_until(lambda: num_kept() == 0)

        check_uuids(url)

        ask(8)
        workers = [first["lazydecode-0"], first["lazydecode-1"]]
        with httpx.Client() as client:
            deadline = time.monotonic() + WAIT_S
            while (asked := answering(client, url, workers))[1] != count:
                assert time.monotonic() < deadline, (asked, count)
            killed, _ = asked
            # Nobody asked for its metrics since: it told them when it asked for the other's.
            killed.kill()
        psutil.wait_procs([killed], timeout=120)
        wait_healthy(url, 3, server)
        second = children(server)
        kept = {process.pid for process in first.values()} - {killed.pid}
        assert kept < {process.pid for process in second.values()}
        ask(8)
        # What the dead one had counted is in it.
        wait_until(lambda: metric(url, *CHATS) == count)

        second["lazydecode-eng"].kill()
        ask(8)  # a delay, and nothing else
        wait_healthy(url, 3, server)
        third = children(server)
        assert third["lazydecode-eng"].pid != first["lazydecode-eng"].pid
        wait_until(lambda: metric(url, "engine_up") == 1)
        assert len(answers) == 1

        # One that stands still: what came to it is lost, and all after that is answered.
        hung = third["lazydecode-0"]
        hung.suspend()
        psutil.wait_procs([hung], timeout=120)
        wait_healthy(url, 3, server)
        third = children(server)
        assert hung.pid not in {process.pid for process in third.values()}
        ask(8)
        wait_until(lambda: metric(url, *CHATS) == count)
        assert server.end(signal.SIGTERM) == 0
        assert psutil.wait_procs(third.values(), timeout=60)[1] == []
        assert "Traceback" not in server.output
        assert server.output.count("its event loop stands still") == 1
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
