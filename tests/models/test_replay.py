"""Pictures of a size that was met before: only the image processor runs, and gives the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import BatchFeature, Qwen2VLImageProcessor
from transformers.image_utils import SizeDict

from lazydecode.models.item import ItemProcessor
from lazydecode.models.pixels import raw_options
from lazydecode.models.replay import PartCall, WatchedPart
from tests.models.conftest import LoadFrontend
from tests.models.coverage_compare import equal
from tests.models.reference import picture
from tests.models.test_generic import processor

CLIP_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "molmo2"])
def test_a_second_picture_of_a_size_meets_the_image_processor_alone(
    frontend: LoadFrontend, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    loaded = processor(frontend(family)).family
    options = loaded.options.defaults
    if "image" in loaded.raw_modalities:
        options = raw_options("image", options) or options
    second = picture(231, 140, seed=2)
    given = loaded.items._in_order("image", second)
    whole = loaded.items.result("image", second, loaded.items.run("image", given, options))
    loaded.process("image", picture(231, 140, seed=1))

    def run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the class was called")

    monkeypatch.setattr(ItemProcessor, "_run_item", run)
    alone = loaded.process("image", second)
    assert alone.text == whole.text
    assert list(alone.kwargs) == list(whole.kwargs)
    for name, element in whole.kwargs.items():
        assert equal(alone.kwargs[name].data, element.data), name
        assert alone.kwargs[name].field == element.field
    with pytest.raises(AssertionError, match="the class was called"):
        loaded.process("image", picture(230, 140))
    with pytest.raises(AssertionError, match="the class was called"):
        loaded.process("image", second.convert("L"))


def test_pictures_of_one_size_differ_by_the_options(frontend: LoadFrontend) -> None:
    loaded = processor(frontend("qwen2_vl")).family
    options = {"max_pixels": 28 * 28 * 16}
    few, many, few_again, many_again = (
        loaded.process("image", picture(420, 310, seed=seed), given)
        for seed, given in ((1, options), (1, None), (1, options), (1, None))
    )
    assert few.text == few_again.text != many.text == many_again.text
    for first, again in ((few, few_again), (many, many_again)):
        for name, element in first.kwargs.items():
            assert equal(again.kwargs[name].data, element.data), name


Handles = Callable[[Any, Any], Any]
"""What a class does with its image processor and a picture."""


def watched_call(handle: Handles) -> PartCall | None:
    """What is found out about a class that does this."""
    part = Qwen2VLImageProcessor()
    watched = WatchedPart.of(part)
    assert watched is not None
    image = picture(112, 84)
    return watched.call_for(image, handle(watched.stand_in, image))


def test_what_a_class_hands_on_comes_from_the_image_processor_again() -> None:
    def handle(part: Any, image: Any) -> Any:
        results = part([[image]], size=CLIP_SIZE, return_tensors="pt")
        return {"pixel_values": results["pixel_values"]}

    call = watched_call(handle)
    assert call is not None
    assert (call.depth, call.names) == (2, ("pixel_values",))
    other = picture(112, 84, seed=5)
    expected = handle(Qwen2VLImageProcessor(), other)
    assert torch.equal(call.run(other)["pixel_values"], expected["pixel_values"])


def test_an_option_of_one_call_is_not_shared_with_the_next() -> None:
    call = watched_call(lambda part, image: part([image], size=CLIP_SIZE, return_tensors="pt"))
    assert call is not None
    assert call.fresh == ("size",)
    given: list[SizeDict] = []
    part = Qwen2VLImageProcessor()
    inner = part._preprocess

    def writes(images: Any, size: SizeDict, **rest: Any) -> Any:
        given.append(size)
        results = inner(images, size=size, **rest)
        size["longest_edge"] = 1
        return results

    part._preprocess = writes
    call = PartCall(part, call.method, call.depth, call.options, call.fresh, call.names)
    call.run(picture(112, 84))
    call.run(picture(112, 84))
    assert given[0] is not given[1]
    assert call.options["size"].longest_edge == CLIP_SIZE["longest_edge"]


def _replaces(part: Any, image: Any) -> Any:
    results = part([image], return_tensors="pt")
    results["pixel_values"] = results["pixel_values"] + 1
    return results


def _writes(part: Any, image: Any) -> Any:
    results = part([image], return_tensors="pt")
    results["pixel_values"] += 1
    return results


def _adds(part: Any, image: Any) -> Any:
    results: BatchFeature = part([image], return_tensors="pt")
    return {**results, "image_sizes": torch.tensor([image.size])}


def _turns(part: Any, image: Image.Image) -> Any:
    return part([image.transpose(Image.Transpose.ROTATE_180)], return_tensors="pt")


def _asks_twice(part: Any, image: Any) -> Any:
    part([image], return_tensors="pt")
    return part([image], return_tensors="pt")


def _asks_for_two(part: Any, image: Any) -> Any:
    return part([image, image], return_tensors="pt")


@pytest.mark.parametrize("handle", [_replaces, _writes, _adds, _turns, _asks_twice, _asks_for_two])
def test_a_class_that_does_more_is_called_as_a_whole(handle: Handles) -> None:
    assert watched_call(handle) is None


def test_an_image_processor_that_cannot_be_copied_is_left_alone() -> None:
    class Slotted:
        __slots__ = ("size",)

        def __call__(self, images: Any) -> Any:
            return images

    assert WatchedPart.of(Slotted()) is None
