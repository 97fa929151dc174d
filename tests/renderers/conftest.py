from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lazydecode.config import Settings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.renderers.base import BaseRenderer
from lazydecode.server.loading import build_context

OpenRenderer = Callable[..., AbstractAsyncContextManager[BaseRenderer]]


@pytest.fixture(scope="session", autouse=True)
def _engines(forked_engines: None) -> None:
    """Engines of these tests are forked, whoever starts them."""


@pytest.fixture(scope="session")
def load_frontend(tiny_model: Callable[..., Path]) -> Callable[..., ModelFrontend]:
    """Return `load(**settings) -> ModelFrontend` of the tiny vision-language model.

    Each call gives a front end of its own: a renderer binds its processor to its threads.
    """

    def load(**settings: Any) -> ModelFrontend:
        model = tiny_model("qwen2_5_vl", weights=False)
        return load_model_frontend(str(model), Settings(**{"engine": "none", **settings}))

    return load


@pytest.fixture
def open_renderer(load_frontend: Callable[..., ModelFrontend]) -> OpenRenderer:
    """Return `async with open_renderer(**settings) as renderer`, without a server around it."""

    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[BaseRenderer]:
        given = Settings(**{"engine": "none", **settings})
        renderer = build_context(load_frontend(**settings), given).renderer
        try:
            yield renderer
        finally:
            await renderer.close()

    return opened
