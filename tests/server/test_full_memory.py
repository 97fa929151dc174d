"""The system gives no more memory to share: the same answers, and a warning once.

The kernel itself refuses: a limit on the size of files holds for memory files too, and can be set
for a process that runs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.builders import make_jpeg
from tests.server.command import lazydecode
from tests.server.harness import data_url, image, request, text

WAIT_S = 240.0
FLAGS = (
    *("--port", "0", "--media-processes", "2", "--no-raw-pixels", "--no-warmup"),
    *("--worker-niceness", "0"),  # or what loads waits for the tests of another worker
)
LIMIT = 64 * 1024
"""Less than any tensor that goes through shared memory."""


def answers(url: str, number: int) -> tuple[Any, Any, Any]:
    """Tensors, text and probabilities for a picture that always looks the same."""
    part = image(data_url(make_jpeg((640, 480), comment=f"number {number}")))
    rendered = httpx.post(
        f"{url}/v1/chat/completions/render", json=request(part, text()), timeout=WAIT_S
    )
    assert rendered.status_code == 200, rendered.text
    body = request(part, text(), max_tokens=3, temperature=0, logprobs=True)
    written = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert written.status_code == 200, written.text
    choice = written.json()["choices"][0]
    return (
        rendered.json()["features"]["kwargs_data"],
        choice["message"]["content"],
        [token["logprob"] for token in choice["logprobs"]["content"]],
    )


def named_memory(*processes: psutil.Process) -> set[str]:
    """Files of shared memory that processes have open or mapped."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {mapping.path for mapping in process.memory_maps()}
            found |= {file.path for file in process.open_files()}
    return {path for path in found if path.startswith("/dev/shm/")}


def wait_for_workers(url: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while "lazydecode_media_processes 2.0" not in httpx.get(f"{url}/metrics", timeout=WAIT_S).text:
        assert time.monotonic() < deadline
        time.sleep(0.5)  # what loads needs the core


@pytest.mark.slow
def test_a_server_without_memory_to_share_gives_the_same_answers(
    tiny_model: Callable[..., Path],
) -> None:
    with lazydecode("serve", str(tiny_model("qwen2_5_vl")), *FLAGS) as server:
        url = server.read_until(r"serving .* at (http://\S+)")
        wait_for_workers(url)
        parent = psutil.Process(server.process.pid)
        below = parent.children(recursive=True)
        expected = answers(url, 0)
        for process in (parent, *below):
            process.rlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
        for number in range(1, 4):
            assert answers(url, number) == expected
        below[-1].kill()  # its successor is offered nothing either
        for number in range(4, 7):
            assert answers(url, number) == expected
        server.read_until("no shared memory for the workers")
        shared = named_memory(parent, *server.below())
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        assert psutil.wait_procs(below, timeout=120)[1] == []
    warnings = [line for line in server.output.splitlines() if "WARNING" in line]
    assert all("File too large" in line and "said once" in line for line in warnings), warnings
    assert len([line for line in warnings if "share with the engine" in line]) == 1
    assert len([line for line in warnings if "no shared memory for the workers" in line]) == 1
    # Each worker says it of its own results.
    assert len([line for line in warnings if "share with the server" in line]) <= 2
    # Not what else is there: tests beside this one have some of theirs.
    assert [path for path in shared if os.path.exists(path)] == []
