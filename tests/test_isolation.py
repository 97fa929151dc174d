"""A run of the tests neither finds what another one left nor leaves anything for the next."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from huggingface_hub import constants
from transformers.utils import HF_MODULES_CACHE

from lazydecode.config import Settings


def test_no_folder_of_the_user_is_used() -> None:
    caches = Path(os.environ["XDG_CACHE_HOME"])
    assert caches.is_relative_to(tempfile.gettempdir())
    assert Path(constants.HF_HUB_CACHE).is_relative_to(caches)
    assert Path(HF_MODULES_CACHE).is_relative_to(caches)


def test_no_setting_comes_from_outside() -> None:
    settings = Settings()
    assert (settings.media_cache, settings.processor_store, settings.proof_cache) == (None,) * 3
    assert settings.model_dump() == Settings.model_construct().model_dump()
