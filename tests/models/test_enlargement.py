"""Strips that a processor would enlarge beyond all bounds: by an edge, or to a square."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from lazydecode.errors import InvalidRequestError
from lazydecode.models.enlargement import check_enlargement
from lazydecode.models.memo import Memo
from tests.models.conftest import LoadFrontend

CLIP = SimpleNamespace(size={"shortest_edge": 336})


@pytest.mark.parametrize(
    ("modality", "shape", "part", "options", "passes"),
    [
        ("image", (1, 5000), CLIP, {}, False),
        ("image", (5000, 1), CLIP, {}, False),
        ("image", (50, 1500), CLIP, {}, True),
        ("image", (8000, 8000), CLIP, {}, True),
        # The longer edge is bounded as well, or both edges are set.
        (
            "image",
            (1, 5000),
            SimpleNamespace(size={"shortest_edge": 9, "longest_edge": 9}),
            {},
            True,
        ),
        ("image", (1, 5000), SimpleNamespace(size={"height": 336, "width": 336}), {}, True),
        # A request's own size.
        ("image", (1, 100), CLIP, {"size": {"shortest_edge": 1000}}, False),
        ("image", (1, 100), CLIP, {"images_kwargs": {"size": {"shortest_edge": 1000}}}, False),
        ("image", (1, 5000), CLIP, {"size": {"height": 9, "width": 9}}, True),
        # All frames of a video together; those of usual shape always.
        ("video", (32, 10, 100, ()), CLIP, {}, True),
        ("video", (32, 10, 300, ()), CLIP, {}, False),
        ("video", (1000, 64, 64, ()), CLIP, {}, True),
        ("audio", (16000,), CLIP, {}, True),
    ],
)
def test_only_what_becomes_too_large_is_refused(
    modality: str, shape: tuple[Any, ...], part: Any, options: dict[str, Any], passes: bool
) -> None:
    if passes:
        check_enlargement(modality, shape, part, options)
        return
    with pytest.raises(InvalidRequestError, match="too narrow") as caught:
        check_enlargement(modality, shape, part, options)
    assert caught.value.modality == modality


def test_a_strip_is_refused_before_the_processor_sees_it(frontend: LoadFrontend) -> None:
    model = frontend("llava")
    assert model.mm_processor is not None
    family = model.mm_processor.family
    says = "1 x 5000 pixels are too narrow: the model's processor makes the shorter edge 336 pixels"
    with pytest.raises(InvalidRequestError, match=says):
        family.process("image", Image.new("RGB", (1, 5000)))
    with pytest.raises(InvalidRequestError, match=says):
        family.sketch("image", (5000, 1))


def test_a_strip_that_would_be_padded_to_a_large_square_is_refused(frontend: LoadFrontend) -> None:
    model = frontend("step3p7")
    assert model.mm_processor is not None
    family = model.mm_processor.family
    says = "100000 x 1 pixels are too narrow: the model's processor makes 28610 MiB of them"
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=says) as caught:
            family.process("image", Image.new("RGB", (100_000, 1)))
        assert caught.value.modality == "image"
    with pytest.raises(InvalidRequestError, match="1 x 12000 pixels are too narrow"):
        family.sketch("image", (12_000, 1))
    for size in ((3000, 10), (2000, 40)):  # strips as well, of which little is made
        assert family.process("image", Image.new("RGB", size)).text.replacement is not None


def test_a_class_that_cannot_run_without_content_is_left_alone(
    frontend: LoadFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = frontend("qwen2_vl")
    assert model.mm_processor is not None
    family = model.mm_processor.family
    strip = Image.new("RGB", (900, 30))
    usual = family.process("image", strip)

    def refuse(*args: Any, **options: Any) -> Any:
        raise InvalidRequestError("it looks at values")

    monkeypatch.setattr(family, "_too_large", Memo())
    monkeypatch.setattr(family.items, "sketch", refuse)
    assert family.process("image", strip).text == usual.text
