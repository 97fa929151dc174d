"""Families against their own Hugging Face processors.

A few stand for all mechanisms here. `LAZYDECODE_TEST_FAMILIES=gemma3,internvl` names others,
`all` is the whole table, with all sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.coverage import check_family

SAMPLE = (
    "qwen2_5_vl",  # patches, videos
    "qwen2_audio",  # audio
    "chameleon",  # learnt ids around the prompt
    "minicpmv4_6",  # numbers in the text: whole-request runs
    "molmo2",  # row numbers, BOS
    "gemma3n",  # newlines that merge, image and audio
    "cosmos3_edge",  # a class that searches for placeholders in its own way
    "idefics2",  # no offsets, blank stand-ins
)


def families() -> list[str]:
    named = os.environ.get("LAZYDECODE_TEST_FAMILIES", "")
    if named == "all":
        from lazydecode.tiny_models import FAMILIES

        return sorted(FAMILIES)
    return [name for name in named.split(",") if name] or list(SAMPLE)


OWN_CODE = {
    "clip", "siglip", "siglip2", "colpali", "colqwen2",  # text or media, never both
    "whisper",  # encoder and decoder
    "voxtral", "fuyu",  # write their prompts by means of their own
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_the_family_equals_its_own_processor(family: str, tiny_model: Callable[..., Path]) -> None:
    if family in OWN_CODE:
        pytest.skip("not served by the generic processor")
    thorough = "LAZYDECODE_TEST_FAMILIES" in os.environ
    folder = str(tiny_model(family, weights=False))
    report = check_family(family, folder, thorough=thorough)
    assert report.problems == []
    assert report.prompts_equal == report.prompts_tried > 0
    assert report.orders_equal == report.orders_tried > 0
    for modality, line in report.modalities.items():
        assert line.tensors_equal, modality
        assert line.headers_exact == line.headers_tried, modality
