"""Loaded tiny models, shared by the tests of one worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from lazydecode.config import Settings
from lazydecode.models.loading import ModelFrontend, load_model_frontend

LoadFrontend = Callable[..., ModelFrontend]


@pytest.fixture(scope="session")
def frontend(tiny_model: Callable[..., Path]) -> LoadFrontend:
    """Return `frontend(family) -> ModelFrontend`, loaded once per worker."""

    @functools.cache
    def load(family: str) -> ModelFrontend:
        return load_model_frontend(str(tiny_model(family, weights=False)), Settings())

    return load
