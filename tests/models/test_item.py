"""One item through the processor: forms of pictures and sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lazydecode.models.field_inference import FieldInferenceError
from lazydecode.models.item import planes_of, shape_of, token_difference
from tests.models.conftest import LoadFrontend
from tests.models.reference import clip, picture, sound
from tests.models.test_generic import inputs, processor, user


def test_planes_are_the_pictures_channels() -> None:
    image = picture(31, 17, seed=4)
    planes = planes_of(image)
    assert planes.dtype == torch.uint8
    assert planes.is_contiguous()
    assert np.array_equal(planes.numpy(), np.asarray(image).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("item", "shape"),
    [
        (Image.new("RGB", (30, 20)), (20, 30)),
        (np.zeros((20, 30, 3), np.uint8), (20, 30)),
        (torch.zeros(3, 20, 30), (20, 30)),
        (np.zeros((3, 20, 4), np.uint8), (3, 20)),
    ],
)
def test_a_pictures_shape_is_rows_and_columns(item: Any, shape: tuple[int, int]) -> None:
    assert shape_of("image", item) == shape


def test_a_videos_shape_holds_what_its_text_depends_on() -> None:
    frames, height, width, facts = shape_of("video", clip(4, 60, 40))
    assert (frames, height, width) == (4, 40, 60)
    assert dict(facts)["frames_indices"] == (0, 6, 12, 18)
    assert dict(facts)["fps"] == 12.0
    assert shape_of("video", torch.zeros(4, 3, 40, 60))[:3] == (4, 40, 60)


def test_a_sounds_shape_is_its_samples() -> None:
    assert shape_of("audio", sound(0.5, 16000)) == (8000,)


def test_the_token_difference_is_what_replaced_the_placeholder(frontend: LoadFrontend) -> None:
    model = frontend("qwen2_vl")
    pad = model.prompt_tokenizer.token_id("<|image_pad|>")
    assert pad is not None
    head = model.encode("see ", add_special_tokens=False)
    tail = model.encode("!", add_special_tokens=False)
    found = token_difference(
        model.prompt_tokenizer,
        "see <|image_pad|>!",
        "<|image_pad|>",
        [*head, pad, pad, *tail],
        False,
    )
    assert found == [pad, pad]
    with pytest.raises(FieldInferenceError, match="around the item"):
        token_difference(
            model.prompt_tokenizer, "see <|image_pad|>!", "<|image_pad|>", [pad, *tail], False
        )


@pytest.mark.parametrize("family", ["qwen2_vl", "molmo2"])
def test_bits_do_not_depend_on_how_many_threads_torch_has(
    frontend: LoadFrontend, family: str
) -> None:
    model = frontend(family)
    prompt = model.render_chat(user({"type": "image"}))
    seen: list[int] = []

    def tensors() -> Any:
        items = processor(model).apply(inputs(model, prompt, {"image": [picture(150, 100)]}))
        seen.append(torch.get_num_threads())
        return items["mm_kwargs"]["image"][0]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = tensors()
        torch.set_num_threads(4)
        four = tensors()
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(tensors).result()
    finally:
        torch.set_num_threads(before)
    # The main thread's setting is the caller's; a worker's is one from its first call on.
    assert seen == [1, 4, 1]
    for name, element in one.items():
        assert torch.equal(element.data, four[name].data), name
        assert torch.equal(element.data, beside[name].data), name
