"""`lazydecode serve` as a process: it starts, answers, stops, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.builders import make_jpeg
from tests.origin import Gate, Origin
from tests.server.harness import data_url, image, request, text

START_S = 180.0


class Process:
    """A `lazydecode` process and what it wrote."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lazydecode", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.output = ""

    def read_until(self, pattern: str) -> str:
        """Return the first match in the output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_S
        while (found := re.search(pattern, self.output)) is None:
            ready, _, _ = select.select([self.process.stdout], [], [], 1.0)
            # Not readline: lines that its buffer holds would never make the descriptor ready.
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            self.output += chunk.decode(errors="replace")
            ended = ready and not chunk
            assert not ended and time.monotonic() < deadline, self.output
        return found[1] if found.groups() else found[0]

    def end(self, number: signal.Signals | None = None) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        if number is not None:
            self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=90)
        self.output += rest
        return self.process.returncode


@contextmanager
def lazydecode(*arguments: str) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()


@pytest.mark.slow
def test_it_serves_and_stops_on_sigint_leaving_no_process(tiny_model: Callable[..., Path]) -> None:
    with lazydecode("serve", str(tiny_model("qwen2_5_vl")), "--port", "0") as server:
        url = server.read_until(r"serving .* at (http://\S+)")
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 1
        body = request(image(data_url(make_jpeg())), text("x"), max_tokens=2)
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        assert server.end(signal.SIGINT) == 0
        assert "Traceback" not in server.output
        assert "stopped" in server.output
        psutil.wait_procs(children, timeout=10)
        assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_sigterm_lets_a_running_request_finish(
    tiny_model: Callable[..., Path], shared_origin: Origin
) -> None:
    model = tiny_model("qwen2_5_vl", weights=False)
    gate = Gate()
    media = shared_origin.serve("/late.jpg", make_jpeg(), gate=gate)
    arguments = ("--engine", "none", "--port", "0", "--image-fetch-timeout", "60")
    networks = ("--allowed-private-networks", shared_origin.netloc)
    with lazydecode("serve", str(model), *arguments, *networks) as server:
        url = server.read_until(r"serving .* at (http://\S+)")
        statuses: list[int] = []

        def send() -> None:
            body = request(image(media), text("x"))
            render = f"{url}/v1/chat/completions/render"
            statuses.append(httpx.post(render, json=body, timeout=60).status_code)

        thread = threading.Thread(target=send)
        thread.start()
        gate.wait_arrived()
        server.process.send_signal(signal.SIGTERM)
        server.read_until("running requests may finish")
        gate.open()
        thread.join(60)
        assert statuses == [200]
        assert server.end() == 0
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_it_can_be_stopped_while_it_loads(tiny_model: Callable[..., Path]) -> None:
    with lazydecode("serve", str(tiny_model("qwen2_5_vl")), "--port", "0") as server:
        server.read_until("loading")
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_what_cannot_start_says_why_without_a_traceback(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    (tmp_path / "empty").mkdir()
    with lazydecode("serve", str(tmp_path / "empty"), "--port", "0") as server:
        assert server.end() == 1
        assert "config.json" in server.output
        assert "Traceback" not in server.output
    # A model without weights: the engine is what cannot start.
    model = tiny_model("qwen2_5_vl", weights=False)
    with lazydecode("serve", str(model), "--port", "0") as server:
        assert server.end() == 1
        assert "Error: " in server.output
        assert "Traceback" not in server.output
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with lazydecode("serve", str(model), "--engine", "none", "--port", port) as server:
            assert server.end() == 1
            assert f"cannot listen on 127.0.0.1:{port}" in server.output
