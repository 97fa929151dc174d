"""One item through the processor: forms of pictures and sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lazydecode.models.field_inference import FieldInferenceError
from lazydecode.models.item import shape_of, token_difference
from lazydecode.models.pixels import raw_options
from lazydecode.models.planes import planes_of
from lazydecode.models.processor_call import TokenizerProxy
from tests.models.conftest import LoadFrontend
from tests.models.reference import clip, picture, sound
from tests.models.test_generic import inputs, processor, user


def test_planes_are_the_pictures_channels() -> None:
    image = picture(31, 17, seed=4)
    planes = planes_of(image)
    assert planes.dtype == torch.uint8
    assert planes.is_contiguous()
    assert np.array_equal(planes.numpy(), np.asarray(image).transpose(2, 0, 1))


def test_planes_of_a_picture_in_several_blocks_of_memory() -> None:
    # Pillow keeps up to 16 MB in one block, which it hands out; this one has two.
    row = np.arange(4100 * 3, dtype=np.uint32).astype(np.uint8).reshape(1, 4100, 3)
    array = np.ascontiguousarray(np.broadcast_to(row, (1100, 4100, 3)))
    array[1000:, :, 1] = 7
    image = Image.fromarray(array)
    with pytest.raises(ValueError, match=r"contiguous|multiple"):
        image.__arrow_c_array__()
    assert np.array_equal(planes_of(image).numpy(), array.transpose(2, 0, 1))


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


@pytest.mark.parametrize(
    ("family", "modality", "item"),
    [
        ("qwen2_vl", "image", picture(150, 100)),
        ("qwen2_vl", "video", clip(4, 112, 84)),
        ("qwen2_audio", "audio", sound(0.5, 16000)),
    ],
)
def test_an_item_is_processed_without_the_text_around_it(
    frontend: LoadFrontend,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    modality: str,
    item: Any,
) -> None:
    loaded = processor(frontend(family)).family
    options = {} if modality == "audio" else (raw_options(modality, loaded.options.defaults) or {})
    whole = loaded.items.result(modality, item, loaded.items.run(modality, item, options))

    def tokenize(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(TokenizerProxy, "__call__", tokenize)
    alone = loaded.process(modality, item)
    assert alone.text == whole.text
    assert alone.kwargs.keys() == whole.kwargs.keys()
    for name, element in whole.kwargs.items():
        assert torch.equal(element.data, alone.kwargs[name].data), name
        assert element.field == alone.kwargs[name].field


def test_a_class_with_a_call_of_its_own_is_called_as_a_whole(frontend: LoadFrontend) -> None:
    loaded = processor(frontend("gemma3")).family
    assert not loaded.facts.modalities["image"].can_skip_text
    assert loaded.process("image", picture(150, 100)).kwargs


def test_options_of_a_request_reach_the_class(frontend: LoadFrontend) -> None:
    loaded = processor(frontend("qwen2_vl")).family
    picture_a, options = picture(300, 200), {"max_pixels": 28 * 28 * 16}
    few = loaded.process("image", picture_a, options)
    many = loaded.process("image", picture_a)
    assert loaded.process("image", picture_a, options).text == few.text != many.text
    few_grid, many_grid = (part.kwargs["image_grid_thw"].data for part in (few, many))
    assert int(few_grid.prod()) < int(many_grid.prod())  # type: ignore[union-attr]


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


@pytest.mark.parametrize("height", [1, 3])
def test_the_height_of_a_low_video_is_not_taken_for_its_channels(
    frontend: LoadFrontend, height: int
) -> None:
    """transformers guesses where the channels are, and looks at the rows first."""
    mm_processor = frontend("qwen2_vl").mm_processor
    assert mm_processor is not None
    for item in (clip(2, 150, height), clip(2, height, 150)):
        processed = mm_processor.family.process("video", item)
        sketch = mm_processor.family.sketch("video", shape_of("video", item))
        assert sketch is not None
        grid = processed.kwargs["video_grid_thw"].data
        assert torch.equal(grid, sketch.metadata["video_grid_thw"].data)
        assert (grid[1] < grid[2]) == (item[0].shape[1] < item[0].shape[2])
