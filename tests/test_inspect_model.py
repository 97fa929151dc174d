"""What `lazydecode inspect MODEL` says of each modality, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazydecode.cli.inspect_model import inspect_model
from lazydecode.config import Settings

META = "yes: the class on tensors of the item's size without content"
CONTENT = "no: what stands in the prompt depends on the content, so that items are decoded"


@pytest.mark.parametrize(
    ("family", "modality", "expected"),
    [
        (
            "qwen2_vl",
            "image",
            {"max_items": "any", "cached": "yes", "header_only": META, "reentrant": "yes"},
        ),
        (
            "hyperclovax_vision_v2",
            "video",
            {
                "max_items": "any",
                "cached": "yes",
                "header_only": META,
                "reentrant": "no, one thread at a time: writes durations outside the placeholder, "
                "and keeps those of pending videos on itself between two of its methods",
            },
        ),
        (
            "video_llama_3",
            "video",
            {"max_items": "any", "cached": "yes", "header_only": CONTENT, "reentrant": "yes"},
        ),
        (
            "whisper",
            "audio",
            {
                "max_items": 1,
                "cached": "yes",
                "header_only": "nothing of it stands in the prompt",
                "reentrant": "yes",
            },
        ),
    ],
)
def test_each_modality_has_its_reasons(
    tiny_model: Callable[..., Path], family: str, modality: str, expected: dict[str, Any]
) -> None:
    report = inspect_model(str(tiny_model(family, weights=False)), Settings())
    assert report["media"][modality] == expected
    assert report["generates"]


def test_a_model_that_embeds_says_so(tiny_model: Callable[..., Path]) -> None:
    report = inspect_model(str(tiny_model("siglip", weights=False)), Settings())
    assert not report["generates"]
    assert report["media"]["image"]["max_items"] == 1
    assert report["proof"]["mode"] == "either_or"
