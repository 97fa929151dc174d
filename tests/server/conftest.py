from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.origin import Origin
from tests.server.harness import Server


@pytest.fixture(scope="session")
def shared_origin() -> Iterator[Origin]:
    """One media origin for all servers of the run; tests use paths of their own."""
    with Origin() as origin:
        yield origin


@pytest.fixture(scope="session")
def chat_server(tiny_model: Callable[..., Path], shared_origin: Origin) -> Iterator[Server]:
    """A vision-language model with its engine in a process of its own."""
    with Server(
        tiny_model("qwen2_5_vl"),
        served_model_name=("tiny",),
        allowed_private_networks=(shared_origin.netloc,),
        max_model_len=4096,
        image_fetch_timeout=3.0,
        media_fetch_max_retries=2,
    ) as server:
        yield server


@pytest.fixture(scope="session")
def audio_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """An audio-language model with its engine in a process of its own."""
    with Server(tiny_model("qwen2_audio"), served_model_name=("tiny-audio",)) as server:
        yield server
