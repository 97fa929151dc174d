"""Every family against its own Hugging Face processor, with a few sizes and mixes of hits.

`-k gemma3` picks one; with `LAZYDECODE_TEST_FAMILIES=thorough` all sizes and mixes are tried.
`python -m tests.models.matrix` does that too, in worker processes, lets the engine generate with
each family, and writes the page about models.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazydecode.tiny_models import FAMILIES
from tests.models.coverage import check_family
from tests.models.coverage_generation import SAME, check_generation
from tests.models.matrix_page import NOT_SERVED, is_good, is_served

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the library's own
THOROUGH = os.environ.get("LAZYDECODE_TEST_FAMILIES") == "thorough"

GENERATING = (
    "llava_onevision",  # images padded to the largest, videos
    "granite_speech",  # sound
    "phi4_multimodal",  # images and sound in one prompt
)
"""Families whose answers are compared in every run, beside those of the engine's own tests."""


def parameters(families: Any) -> Any:
    return pytest.mark.parametrize("family", [pytest.param(f, id=f) for f in families])


@pytest.mark.slow
@parameters(sorted(set(FAMILIES) - set(NOT_SERVED)))
def test_the_family_equals_its_own_processor(family: str, tiny_model: Callable[..., Path]) -> None:
    folder = str(tiny_model(family, weights=False))
    report = check_family(family, folder, thorough=THOROUGH)
    assert report.problems == []
    assert is_good(report.as_json())
    for modality, line in report.modalities.items():
        assert line.tensors_equal, modality
        assert line.headers_exact == line.headers_tried, modality


@parameters(sorted(NOT_SERVED))
def test_a_family_that_is_not_served_says_so(family: str, tiny_model: Callable[..., Path]) -> None:
    report = check_family(family, str(tiny_model(family, weights=False)))
    assert not is_served(report.as_json())
    assert report.problems


@pytest.mark.slow
@parameters(GENERATING)
def test_the_engine_gives_the_librarys_tokens(family: str, tiny_model: Callable[..., Path]) -> None:
    found = check_generation(tiny_model(family))
    assert found == dict.fromkeys(FAMILIES[family].modalities, SAME)
