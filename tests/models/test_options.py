"""Processor options: merging, checking, old names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lazydecode.errors import InvalidRequestError
from lazydecode.models.options import ProcessorOptions
from tests.models.conftest import LoadFrontend
from tests.models.reference import picture


def make(defaults: dict[str, Any] | None = None) -> ProcessorOptions:
    return ProcessorOptions(SimpleNamespace(), defaults)


def test_no_options_are_the_defaults() -> None:
    assert make({"fps": 2}).merge(None) == {"fps": 2}


def test_a_request_wins_name_by_name_whatever_the_scope() -> None:
    options = make({"images_kwargs": {"size": 1, "crop": 2}, "fps": 1})
    assert options.merge({"images_kwargs": {"size": 5}}) == {
        "images_kwargs": {"size": 5, "crop": 2},
        "fps": 1,
    }
    assert options.merge({"size": 7}) == {"images_kwargs": {"crop": 2}, "fps": 1, "size": 7}
    assert options.merge({"videos_kwargs": {"fps": 3}})["videos_kwargs"] == {"fps": 3}
    assert "fps" not in options.merge({"videos_kwargs": {"fps": 3}})


@pytest.mark.parametrize("name", ["return_tensors", "padding", "images", "device", "text_kwargs"])
def test_what_belongs_to_the_call_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        make().merge({name: 1})
    assert caught.value.parameter == "mm_processor_kwargs"


def test_a_scope_must_be_a_mapping() -> None:
    with pytest.raises(InvalidRequestError, match="images_kwargs"):
        make().merge({"images_kwargs": 3})


@pytest.mark.parametrize(
    "options",
    [
        {"min_pixels": 10**9},
        {"images_kwargs": {"min_pixels": 10**9}},
        {"size": {"shortest_edge": 10**9, "longest_edge": 10**10}},
        {"size": {"height": 10**6, "width": 10**6}},
        {"size": 10**6},
        {"temporal_patch_size": 10**6},
        {"patch_size": [10**6, 1]},
        {"videos_kwargs": {"num_frames": 10**30}},
        {"crop_size": float("inf")},
        {"rescale_factor": float("nan")},
    ],
)
def test_no_request_makes_a_processor_allocate_without_bound(
    frontend: LoadFrontend, options: dict[str, Any]
) -> None:
    model = frontend("qwen2_vl")
    assert model.mm_processor is not None
    known = model.mm_processor.family.options
    with pytest.raises(InvalidRequestError, match="may be at most") as caught:
        known.merge(options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_an_upper_bound_and_the_models_own_values_are_taken(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_vl")
    assert model.mm_processor is not None
    options = model.mm_processor.family.options
    options.merge({"max_pixels": 10**12})
    options.merge({"size": {"shortest_edge": 3136, "longest_edge": 10**12}})
    options.merge({"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "fps": 30})
    own = ProcessorOptions(SimpleNamespace(image_processor=SimpleNamespace(tile_size=9000)))
    own.merge({"tile_size": 9000})


def test_an_unknown_option_is_refused_by_name(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_vl")
    assert model.mm_processor is not None
    with pytest.raises(InvalidRequestError, match="'max_pixles'"):
        model.mm_processor.family.process("image", picture(60, 60), {"max_pixles": 3})


def test_pixel_bounds_become_the_size_that_they_mean(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_vl")
    assert model.mm_processor is not None
    options = model.mm_processor.family.options
    low = model.processor.image_processor.size.shortest_edge
    assert options.merge({"max_pixels": 100352})["images_kwargs"] == {
        "size": {"shortest_edge": low, "longest_edge": 100352}
    }
    scoped = options.merge({"images_kwargs": {"min_pixels": 7}})
    assert scoped["images_kwargs"]["size"]["shortest_edge"] == 7
    assert "videos_kwargs" not in scoped


def test_a_value_of_a_wrong_type_is_a_client_error(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_vl")
    assert model.mm_processor is not None
    with pytest.raises(InvalidRequestError):
        model.mm_processor.family.process("image", picture(60, 60), {"patch_size": "big"})
