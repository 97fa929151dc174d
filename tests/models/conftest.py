"""Loaded tiny models, shared by the tests of one worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lazydecode.config import Settings
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend

LoadFrontend = Callable[..., ModelFrontend]


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """The class's own run has one thread, as ours: bits of some depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def frontend(tiny_model: Callable[..., Path]) -> LoadFrontend:
    """Return `frontend(family) -> ModelFrontend`, loaded once per worker."""

    @functools.cache
    def load(family: str) -> ModelFrontend:
        return load_model_frontend(str(tiny_model(family, weights=False)), Settings())

    return load
