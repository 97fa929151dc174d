"""An engine process with a scripted model, shared by the tests of one module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from lazydecode.engine.client import EngineClient
from lazydecode.engine.process import EngineConfig


def scripted_config(**options: Any) -> EngineConfig:
    """Return the configuration of an engine process that runs `scripted`."""
    cache_bytes = options.pop("cache_bytes", 100_000)
    max_batch_size = options.pop("max_batch_size", 8)
    shared_bytes = options.pop("shared_bytes", 0)
    return EngineConfig(
        "tests.engine.scripted:load",
        options,
        cache_bytes=cache_bytes,
        max_batch_size=max_batch_size,
        log_level="warning",
        shared_bytes=shared_bytes,
    )


@pytest.fixture(scope="session", autouse=True)
def _engines(forked_engines: None) -> None:
    """Engines of these tests are forked, whoever starts them."""


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    """A running engine; a test that kills it leaves a restarted one."""
    client = EngineClient(scripted_config())
    asyncio.run(client.start())
    yield client
    asyncio.run(client.close())
