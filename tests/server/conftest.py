from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.origin import Origin
from tests.server import cases, stub_connector  # noqa: F401  # registers the connector
from tests.server.harness import Server

SECOND_NETWORK = "127.0.0.3/32"
"""Allowed to render-only servers beside the origin, under whatever name."""


@pytest.fixture(scope="session", autouse=True)
def _engines(forked_engines: None) -> None:
    """Engines of these tests are forked, whoever starts them."""


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
        enable_mm_embeds=True,
        image_fetch_timeout=3.0,
        media_fetch_max_retries=2,
    ) as server:
        yield server


def _render_only(family: str, **settings: Any) -> Any:
    """A fixture: a render-only server of a family, allowed to fetch from the shared origin."""

    @pytest.fixture(scope="session")
    def server(tiny_model: Callable[..., Path], shared_origin: Origin) -> Iterator[Server]:
        with Server(
            tiny_model(family, weights=False),
            engine="none",
            served_model_name=("m",),
            allowed_private_networks=(shared_origin.netloc, SECOND_NETWORK),
            **settings,
        ) as started:
            yield started

    return server


# Patient, as tests hold answers back until dozens of clients wait for them.
render_server = _render_only("qwen2_5_vl", image_fetch_timeout=60.0, media_idle_timeout=60.0)
audio_render_server = _render_only("qwen2_audio")
text_render_server = _render_only("qwen2")
files_server = _render_only("qwen2_5_vl", allowed_local_media_path=cases.TREE / "allowed")
media_folder_server = _render_only("qwen2_5_vl", allowed_local_media_path=cases.MEDIA)
small_download_server = _render_only(
    "qwen2_5_vl", max_media_download_mb=1.0, image_fetch_timeout=3.0
)
named_hosts_server = _render_only(
    "qwen2_5_vl", media_connector="stub-resolver", allowed_media_domains=("example.com",)
)
stub_resolver_server = _render_only("qwen2_5_vl", media_connector="stub-resolver")
two_images_server = _render_only("qwen2_5_vl", limit_mm_per_prompt={"image": 2})
small_memory_server = _render_only("qwen2_5_vl", max_encoded_mb=2.0, max_budget_wait=60.0)
deadline_server = _render_only("qwen2_5_vl", max_render_time=1.0, image_fetch_timeout=30.0)


@pytest.fixture(scope="session")
def audio_server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    """An audio-language model with its engine in a process of its own."""
    with Server(
        tiny_model("qwen2_audio"), served_model_name=("tiny-audio",), enable_mm_embeds=True
    ) as server:
        yield server
