"""Raw pixels finish to the floats of the model's own processor, bit by bit."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from lazydecode.inputs import BatchedField, FlatField, MultiModalFieldElem, MultiModalKwargsItem
from lazydecode.models.pixels import (
    ChannelPlan,
    PixelPlan,
    finish_pixels,
    merge_plans,
    raw_options,
)
from tests.models.conftest import LoadFrontend
from tests.models.reference import Reference, clip, picture

LAYOUTS = ("qwen2_5_vl", "llava", "molmo2", "gemma3n", "cosmos3_edge")
"""Patches by channel; planes; channel last; rescale alone; channel last in patches."""


@pytest.mark.parametrize("family", LAYOUTS)
def test_finished_pixels_are_the_processors_floats(frontend: LoadFrontend, family: str) -> None:
    model = frontend(family)
    assert model.mm_processor is not None
    reference = Reference(model.model_id)
    text = model.mm_processor.family.facts.modalities["image"].text
    for size in ((333, 251), (40, 400)):
        image = picture(*size, seed=3)
        raw = model.mm_processor.family.process("image", image).kwargs
        assert any(
            isinstance(e.data, torch.Tensor) and e.data.dtype == torch.uint8 for e in raw.values()
        )
        finished = finish_pixels(raw, pickle.loads(pickle.dumps(model.pixel_plan)))
        theirs = reference.tensors(reference(text, {"image": [image]}))
        for name, elem in finished.items():
            ours = elem.data
            assert isinstance(ours, torch.Tensor)
            if isinstance(elem.field, BatchedField):
                ours = ours.unsqueeze(0)
            assert torch.equal(ours, theirs[name]), name


def test_finished_frames_are_the_processors_floats(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_5_vl")
    assert model.mm_processor is not None
    video = clip(5, 168, 112)
    raw = model.mm_processor.family.process("video", video).kwargs
    assert raw["pixel_values_videos"].data.dtype == torch.uint8  # type: ignore[union-attr]
    reference = Reference(model.model_id)
    text = model.mm_processor.family.facts.modalities["video"].text
    theirs = reference.tensors(reference(text, {"video": [video]}))
    finished = finish_pixels(raw, model.pixel_plan)["pixel_values_videos"].data
    assert torch.equal(finished, theirs["pixel_values_videos"])  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["idefics3", "llava_next"])
def test_padded_pixels_are_not_left_raw(frontend: LoadFrontend, family: str) -> None:
    """Zeros that come after normalize would not be zeros after it."""
    model = frontend(family)
    assert model.mm_processor is not None
    assert "image" not in model.mm_processor.family.raw_modalities
    item = model.mm_processor.family.process("image", picture(120, 80)).kwargs
    assert item["pixel_values"].data.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [{"do_normalize": False}, {"images_kwargs": {"image_mean": [0.5] * 3}}, {"do_rescale": True}],
)
def test_a_request_that_sets_the_arithmetic_gets_floats(
    frontend: LoadFrontend, options: dict[str, Any]
) -> None:
    model = frontend("qwen2_5_vl")
    assert model.mm_processor is not None
    item = model.mm_processor.family.process("image", picture(120, 80), options).kwargs
    assert item["pixel_values"].data.dtype != torch.uint8 or options == {"do_normalize": False}  # type: ignore[union-attr]
    assert item["pixel_values"].data.is_floating_point()  # type: ignore[union-attr]


def test_raw_options_keep_the_others() -> None:
    merged = raw_options("image", {"size": 3, "images_kwargs": {"patch_size": 14}})
    assert merged == {
        "size": 3,
        "images_kwargs": {"patch_size": 14, "do_rescale": False, "do_normalize": False},
    }
    assert raw_options("image", {"rescale_factor": 2.0}) is None


def test_what_is_no_raw_pixel_stays_the_same_object() -> None:
    item = MultiModalKwargsItem(
        {"pixel_values": MultiModalFieldElem(torch.zeros(2, 3), FlatField())}
    )
    channel = ChannelPlan(1, 1, 1, "rescale", 0.5, (0.0,) * 3, (1.0,) * 3)
    assert finish_pixels(item, PixelPlan({"pixel_values": channel})) is item


def test_the_channel_of_a_batched_field_is_one_dimension_lower() -> None:
    pixels = torch.tensor(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    item = MultiModalKwargsItem({"p": MultiModalFieldElem(pixels, BatchedField())})
    plan = PixelPlan({"p": ChannelPlan(1, 1, 1, "separate", 1.0, (0.0, 1.0, 2.0), (1.0,) * 3)})
    finished = finish_pixels(item, plan)["p"].data
    expected = pixels.float() - torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)
    assert torch.equal(finished, expected)  # type: ignore[arg-type]
    assert item["p"].data is pixels


def test_plans_that_disagree_on_a_field_leave_it_out() -> None:
    a = PixelPlan({"p": ChannelPlan(1, 1, 1, "rescale", 0.5, (0.0,) * 3, (1.0,) * 3)})
    b = PixelPlan({"p": ChannelPlan(2, 1, 1, "rescale", 0.5, (0.0,) * 3, (1.0,) * 3)})
    merged, disputed = merge_plans([a, b])
    assert not merged
    assert disputed == {"p"}
    assert merge_plans([a, a]) == (a, frozenset())
