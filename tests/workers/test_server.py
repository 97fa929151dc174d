"""A server with worker processes: the same answers, and a worker's death is one item's matter."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.builders import make_jpeg, make_wav
from tests.builders_video import make_video
from tests.server.command import Process, lazydecode, runs
from tests.server.harness import Server, data_url, image, request, text, video

NUM_WORKERS = 2
TIME_LIMIT_S = 8
"""Long for what is done here, also on a busy machine."""
WAIT_S = 240.0
FLAGS = (
    *("--engine", "none", "--port", "0"),
    *("--media-processes", str(NUM_WORKERS), "--media-decode-timeout", str(TIME_LIMIT_S)),
    # Loading that steps back behind all others may never end beside another worker's tests.
    *("--worker-niceness", "0"),
)
ANNOUNCED = r"serving .* at (http://\S+)"


@dataclass
class Served:
    """A server with workers, from outside."""

    process: Process
    url: str

    def render(self, body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions/render", json=body, timeout=WAIT_S)

    def metric(self, name: str, labels: str = "") -> float:
        written = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text
        found = re.search(rf"^lazydecode_{name}{re.escape(labels)} (\S+)$", written, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def decodes(self) -> int:
        """Decoder runs for images so far, of requests that have ended."""
        wait_until(lambda: self.metric("requests_inside") == 0)
        return int(self.metric("decodes_total", '{modality="image"}'))

    def wait_for_workers(self) -> None:
        # Not in haste: what loads needs the core.
        wait_until(lambda: self.metric("media_processes") == NUM_WORKERS, every_s=0.5)

    def below(self) -> list[psutil.Process]:
        return self.process.below()

    def workers(self) -> list[psutil.Process]:
        """The processes of the last generation: those without children."""
        (nursery,) = psutil.Process(self.process.process.pid).children()
        return [worker for worker in nursery.children() if runs(worker)]


@pytest.fixture(scope="module")
def served(short_sounds_model: Path) -> Iterator[Served]:
    """Killed at the end: what it leaves then ends by itself."""
    with lazydecode("serve", str(short_sounds_model), *FLAGS) as process:
        served = Served(process, process.read_until(ANNOUNCED))
        served.wait_for_workers()
        yield served
        below = served.below()
        assert len(below) == 1 + NUM_WORKERS
        process.process.kill()
        process.end()
        _, alive = psutil.wait_procs(below, timeout=120)
        assert alive == []


def picture(seed: int, size: tuple[int, int] = (96, 64)) -> bytes:
    """A JPEG that no other seed gives."""
    return make_jpeg(size, comment=f"number {seed}")


def stated(answer: httpx.Response) -> dict[str, Any]:
    """An answer without what tells one request from another."""
    said: dict[str, Any] = answer.json()
    for part in (said, said.get("error", {})):
        for name in ("request_id", "created"):
            part.pop(name, None)
    return said


def one(seed: int) -> dict[str, Any]:
    return request(image(data_url(picture(seed))), text())


def sound(seconds: float) -> dict[str, Any]:
    encoded = base64.b64encode(make_wav(rate=22050, seconds=seconds)).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def bodies() -> list[dict[str, Any]]:
    clip = make_video(12, 10, audio=True)
    large = picture(1, (1400, 900))  # its tensors go through shared memory
    frames = ",".join(base64.b64encode(picture(n)).decode() for n in (2, 3))
    return [
        request(image(data_url(large)), image(data_url(picture(4))), text()),
        request(sound(0.7), text()),
        request(video(data_url(clip, "video/mp4")), text()),
        request(video(f"data:video/jpeg;base64,{frames}"), text()),
        request(
            video(data_url(clip, "video/mp4")),
            text(),
            mm_processor_kwargs={"use_audio_in_video": True},
            media_io_kwargs={"video": {"num_frames": 4}},
        ),
        request(image(data_url(b"\xff\xd8\xff\xe0 no picture")), text()),
        request(image(data_url(picture(5))), image(data_url(b"GIF89a")), text()),
        request(sound(0.0), text()),
    ]


@pytest.mark.slow
def test_answers_are_those_of_a_server_with_threads(
    served: Served, short_sounds_model: Path
) -> None:
    before = served.decodes()
    times = '{modality="image",stage="process"}'
    processed = served.metric("item_stage_seconds_count", times)
    with Server(short_sounds_model, engine="none") as threads:
        for body in bodies():
            ours, theirs = served.render(body), threads.render(body)
            assert ours.status_code == theirs.status_code
            assert stated(ours) == stated(theirs)
        assert threads.decodes() in (4, 5)
    # The pictures of requests that were answered, the two that are broken, and the one beside a
    # broken one if its decode had begun.
    assert served.decodes() - before in (4, 5)
    assert served.metric("item_stage_seconds_count", times) - processed in (2, 3)


@pytest.mark.slow
def test_a_storm_for_one_item_decodes_once(served: Served) -> None:
    before = served.decodes()
    body = one(10)
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(served.render, [body] * 32))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["features"]["kwargs_data"]["image"][0] for answer in answers}) == 1
    assert served.decodes() - before == 1


@pytest.mark.slow
def test_an_item_survives_the_death_of_its_worker(served: Served) -> None:
    served.wait_for_workers()
    workers = served.workers()
    for worker in workers:
        worker.suspend()  # whoever gets the item is slow with it
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(served.render, one(20))
        wait_until(lambda: served.metric("requests_inside") == 1 or answer.done())
        assert not answer.done(), answer.result().text
        for worker in workers:
            worker.kill()
        assert answer.result().status_code == 200
    assert served.render(one(21)).status_code == 200
    # The other one, which died idle, is replaced as well.
    wait_until(lambda: len(served.workers()) == NUM_WORKERS)
    assert {w.pid for w in served.workers()}.isdisjoint(w.pid for w in workers)


@pytest.mark.slow
def test_an_item_that_takes_too_long_is_named_and_its_worker_replaced(served: Served) -> None:
    served.wait_for_workers()
    assert served.render(one(30)).status_code == 200
    num_descriptors = psutil.Process(served.process.process.pid).num_fds()
    workers = served.workers()
    for worker in workers:
        worker.suspend()
    body = request(image(data_url(picture(30))), image(data_url(picture(31))), text())
    started = time.monotonic()
    answer = served.render(body)
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["modality"], error["index"]) == ("image", 1)
    assert f"longer than the {TIME_LIMIT_S} s" in error["message"]
    assert TIME_LIMIT_S <= time.monotonic() - started < TIME_LIMIT_S + 60
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()
    assert served.render(body).status_code == 200
    served.wait_for_workers()
    wait_until(lambda: len(served.workers()) == NUM_WORKERS)  # the killed one may take its time
    assert {w.pid for w in served.workers()} != {w.pid for w in workers}
    server = psutil.Process(served.process.process.pid)
    # Connections of clients come and go.
    wait_until(lambda: abs(server.num_fds() - num_descriptors) <= 4)


@pytest.mark.slow
def test_a_client_that_goes_away_leaves_nothing_behind(served: Served) -> None:
    served.wait_for_workers()
    workers = served.workers()
    for worker in workers:
        worker.suspend()
    address = httpx.URL(served.url)
    leaving = http.client.HTTPConnection(address.host, address.port)
    leaving.request("POST", "/v1/chat/completions/render", json.dumps(one(40)))
    wait_until(lambda: served.metric("budget_held_bytes", '{kind="decoded"}') > 0)
    leaving.close()
    for worker in workers:
        worker.resume()
    wait_until(lambda: served.metric("requests_inside") == 0)
    for kind in ("decoded", "encoded"):
        labels = f'{{kind="{kind}"}}'
        wait_until(lambda labels=labels: served.metric("budget_held_bytes", labels) == 0)  # type: ignore[misc]
    assert served.render(one(40)).status_code == 200


def wait_until(is_so: Callable[[], bool], *, every_s: float = 0.01) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(every_s)


@pytest.mark.slow
def test_workers_come_back_and_a_server_that_stops_takes_them_along(
    tiny_model: Callable[..., Path],
) -> None:
    """The process that they are forked from is killed; threads take over until there is another."""
    model = str(tiny_model("qwen2_audio", weights=False))
    with lazydecode("serve", model, *FLAGS) as process:
        served = Served(process, process.read_until(ANNOUNCED))
        served.wait_for_workers()
        clip = request(sound(0.5), text())
        first = served.render(clip)
        assert first.status_code == 200
        below = served.below()
        (nursery,) = psutil.Process(process.process.pid).children()
        nursery.kill()
        psutil.wait_procs(below, timeout=120)
        # Threads take over, also what a worker had begun.
        answers = [served.render(request(sound(0.5 + n / 10), text())) for n in range(1, 5)]
        assert {answer.status_code for answer in answers} == {200}
        served.wait_for_workers()
        assert {child.pid for child in below}.isdisjoint(w.pid for w in served.workers())
        decodes = served.metric("item_stage_seconds_count", '{modality="audio",stage="process"}')
        assert stated(served.render(request(sound(1.5), text())))["features"]
        now = served.metric("item_stage_seconds_count", '{modality="audio",stage="process"}')
        assert now - decodes == 1
        below += served.below()
        assert process.end(signal.SIGTERM) == 0
    assert "processed by threads until there are workers" in process.output
    assert "Traceback" not in process.output
    _, alive = psutil.wait_procs(below, timeout=120)
    assert alive == []
