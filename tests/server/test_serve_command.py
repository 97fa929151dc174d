"""`lazydecode serve` as a process: it starts, answers, stops, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
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
from tests.server.command import START_S, Process, lazydecode
from tests.server.harness import data_url, image, request, text


@contextmanager
def running_stream(url: str, *, max_tokens: int) -> Iterator[Iterator[str]]:
    """The events of a generation that has begun, without their `data: `."""
    body = request(image(data_url(make_jpeg())), text("x"), max_tokens=max_tokens)
    body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": False}}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=180) as answer:
        assert answer.status_code == 200
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        first = next(events)
        assert "error" not in json.loads(first)
        yield events


@contextmanager
def generating_server(model: Path, *flags: str) -> Iterator[tuple[Process, str]]:
    """A server with its engine, and its URL; its processes are gone afterwards."""
    with lazydecode("serve", str(model), "--port", "0", *flags) as server:
        url = server.read_until(r"serving .* at (http://\S+)")
        children = psutil.Process(server.process.pid).children(recursive=True)
        yield server, url
        psutil.wait_procs(children, timeout=120)
        assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_it_serves_and_stops_on_sigint_leaving_no_process(tiny_model: Callable[..., Path]) -> None:
    arguments = ("--port", "0", "--log-level", "debug", "--media-processes", "1")
    with lazydecode("serve", str(tiny_model("qwen2_5_vl")), *arguments) as server:
        url = server.read_until(r"serving .* at (http://\S+)")
        parent = psutil.Process(server.process.pid)
        names = {child.name() for child in parent.children(recursive=True)}
        assert names == {"lazydecode-eng", "lazydecode-item"}
        assert "proven in another process" in server.output
        # Transformers would import it, for training alone; a second of the start.
        assert not any("scipy/optimize" in library.path for library in parent.memory_maps())
        body = request(image(data_url(make_jpeg())), text("x"), max_tokens=2)
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180).status_code == 200
        children = parent.children(recursive=True)
        with running_stream(url, max_tokens=100) as events:
            assert server.end(signal.SIGINT) == 0
            *pieces, last = list(events)
        assert last == "[DONE]"
        assert json.loads(pieces[-1])["choices"][0]["finish_reason"] == "length"
        assert "Traceback" not in server.output
        assert "stopped" in server.output
        psutil.wait_procs(children, timeout=120)
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
            statuses.append(httpx.post(render, json=body, timeout=180).status_code)

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


@contextmanager
def render_server(model: Path, *flags: str) -> Iterator[tuple[Process, str]]:
    """A server without engine, and its URL."""
    with lazydecode("serve", str(model), "--engine", "none", "--port", "0", *flags) as server:
        yield server, server.read_until(r"serving .* at (http://\S+)")


def post_in_background(url: str, body: object, answers: list[httpx.Response]) -> threading.Thread:
    """Send a request; its answer, if one comes, is added to `answers`."""

    def send() -> None:
        with contextlib.suppress(httpx.HTTPError):
            render = f"{url}/v1/chat/completions/render"
            answers.append(httpx.post(render, json=body, timeout=180))

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def begin_body(url: str) -> socket.socket:
    """Send the head of a request and the first byte of its body."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    head = "POST /v1/chat/completions/render HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
    connection.sendall(head.encode())
    return connection


@pytest.mark.slow
def test_after_the_grace_what_runs_is_cancelled(
    tiny_model: Callable[..., Path], shared_origin: Origin
) -> None:
    model, gate = tiny_model("qwen2_5_vl", weights=False), Gate()
    media = shared_origin.serve("/never.jpg", make_jpeg(), gate=gate)
    networks = ("--allowed-private-networks", shared_origin.netloc)
    waits = ("--image-fetch-timeout", "60", "--max-request-body-stall", "60")
    with render_server(model, *networks, *waits, "--shutdown-grace", "0.5") as (server, url):
        answers: list[httpx.Response] = []
        thread = post_in_background(url, request(image(media), text("x")), answers)
        gate.wait_arrived()
        with begin_body(url):
            begin = time.monotonic()
            assert server.end(signal.SIGTERM) == 0
            # Below the 60 s that each would have waited.
            assert time.monotonic() - begin < 45
        thread.join(60)
        gate.open()
        assert [answer.status_code for answer in answers] == [503]
        assert "is being stopped" in answers[0].text
        assert "Traceback" not in server.output
        assert "stopped" in server.output


@pytest.mark.slow
def test_a_client_that_does_not_read_its_answer_holds_up_no_end(
    tiny_model: Callable[..., Path],
) -> None:
    picture = image(data_url(make_jpeg((2000, 2000))))  # more tensors than buffers of sockets hold
    body = json.dumps(request(picture, text("x"))).encode()
    head = b"POST /v1/chat/completions/render HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n"
    model = tiny_model("qwen2_5_vl", weights=False)
    with render_server(model, "--shutdown-grace", "0.5") as (server, url):
        host, port = url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                client = stack.enter_context(socket.create_connection((host, int(port))))
                client.sendall(head % len(body) + body)
                assert client.recv(15) == b"HTTP/1.1 200 OK"
            begin = time.monotonic()
            assert server.end(signal.SIGTERM) == 0
            assert time.monotonic() - begin < 15  # when the process would end itself, with 1
        assert "Traceback" not in server.output
        assert "does not end" not in server.output


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(
    tiny_model: Callable[..., Path], shared_origin: Origin
) -> None:
    model, gate = tiny_model("qwen2_5_vl", weights=False), Gate()
    media = shared_origin.serve("/never-too.jpg", make_jpeg(), gate=gate)
    networks = ("--allowed-private-networks", shared_origin.netloc)
    with render_server(model, *networks, "--image-fetch-timeout", "60") as (server, url):
        thread = post_in_background(url, request(image(media), text("x")), [])
        gate.wait_arrived()
        server.process.send_signal(signal.SIGINT)
        server.read_until("a second signal ends them")
        assert server.end(signal.SIGINT) == 128 + signal.SIGINT
        thread.join(60)
        gate.open()
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_a_stream_that_outlasts_the_grace_ends_with_an_error(
    tiny_model: Callable[..., Path],
) -> None:
    flags = ("--shutdown-grace", "0.5")
    with generating_server(tiny_model("qwen2_5_vl"), *flags) as (server, url):
        with running_stream(url, max_tokens=20_000) as events:
            assert server.end(signal.SIGTERM) == 0
            *pieces, last = list(events)
        assert "is being stopped" in json.loads(last)["error"]["message"]
        assert all(json.loads(p)["choices"][0]["finish_reason"] is None for p in pieces)
        assert "Traceback" not in server.output
        assert "stopped" in server.output


@pytest.mark.slow
def test_a_second_signal_ends_a_stream_and_the_engine_at_once(
    tiny_model: Callable[..., Path],
) -> None:
    with generating_server(tiny_model("qwen2_5_vl")) as (server, url):
        with running_stream(url, max_tokens=20_000) as events:
            server.process.send_signal(signal.SIGTERM)
            server.read_until("a second signal ends them")
            assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
            with pytest.raises(httpx.TransportError):
                list(events)
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_while_it_loads_it_says_so_and_a_killed_one_leaves_no_engine(
    tiny_model: Callable[..., Path],
) -> None:
    model = str(tiny_model("qwen2_5_vl"))
    with lazydecode("serve", model, "--port", "0") as server:
        deadline = time.monotonic() + START_S
        ports: list[int] = []
        while not ports and time.monotonic() < deadline:
            found = psutil.Process(server.process.pid).net_connections("tcp")
            ports = [known.laddr.port for known in found if known.status == psutil.CONN_LISTEN]
        statuses: list[int] = []
        while 200 not in statuses and time.monotonic() < deadline:
            answer = httpx.get(f"http://127.0.0.1:{ports[0]}/health", timeout=180)
            statuses.append(answer.status_code)
            assert answer.json()["status"] == ("ok" if statuses[-1] == 200 else "loading")
        assert set(statuses) == {503, 200}
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert "lazydecode-eng" in {child.name() for child in children}  # forked
        # The end of its output too: they hold it open for as long as they run.
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        psutil.wait_procs(children, timeout=120)
        assert not any(child.is_running() for child in children)


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
