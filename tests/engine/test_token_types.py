"""Which positions are marked: the processor's lists, and the ranges where those do not tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from lazydecode.engine.generation import Generation, PlacedItem
from lazydecode.engine.protocol import EngineInfo, EngineRequest
from lazydecode.engine.token_types import TokenTypes
from lazydecode.inputs import MultiModalKwargsItem, PlaceholderRange

IMAGE, ROW_END, VIDEO, START = 50, 51, 60, 70


def numbers(
    types: TokenTypes,
    prompt: list[int],
    *places: tuple[str, PlaceholderRange],
    name: str = "mm_token_type_ids",
    model_type: str = "m",
    resumed: int = 0,
) -> list[int]:
    items = [PlacedItem(m, MultiModalKwargsItem(), place) for m, place in places]
    request = EngineRequest("r", prompt, num_resumed_tokens=resumed)
    generation = Generation(request, items, EngineInfo(model="m"))
    return types.number(name, model_type, generation).tolist()


def processor(**ids: Any) -> SimpleNamespace:
    return SimpleNamespace(**ids)


def test_the_processors_ids_count_wherever_they_stand() -> None:
    types = TokenTypes.of_processor(
        processor(image_token_ids=[IMAGE, ROW_END], video_token_ids=[VIDEO], audio_token_ids=[None])
    )
    prompt = [1, IMAGE, IMAGE, ROW_END, 2, VIDEO, ROW_END]
    places = (("image", PlaceholderRange(1, 2)), ("video", PlaceholderRange(5, 1)))
    assert numbers(types, prompt, *places) == [0, 1, 1, 1, 0, 2, 1]


def test_frames_made_of_the_images_token_are_video() -> None:
    types = TokenTypes.of_processor(processor(image_token_ids=[IMAGE], video_token_ids=[VIDEO]))
    mask = np.array([False, True, True, False])
    places = (("video", PlaceholderRange(1, 4, mask)), ("image", PlaceholderRange(6, 1)))
    assert numbers(types, [1, 9, IMAGE, IMAGE, 9, 3, IMAGE], *places) == [0, 0, 2, 2, 0, 0, 1]


def test_without_lists_the_ranges_count() -> None:
    plain = TokenTypes.of_processor(None)
    mask = np.array([True, False, True])
    places = (("audio", PlaceholderRange(0, 3, mask)), ("image", PlaceholderRange(3, 2)))
    assert numbers(plain, [5, 6, 7, 8, 9], *places) == [3, 0, 3, 1, 1]


def test_what_was_generated_is_text() -> None:
    types = TokenTypes.of_processor(processor(image_token_ids=[IMAGE]))
    place = ("image", PlaceholderRange(0, 1))
    assert numbers(types, [IMAGE, 1, IMAGE], place, resumed=1) == [1, 0, 0]


def test_models_that_tell_prompt_from_answer_get_zeros() -> None:
    types = TokenTypes.of_processor(processor(image_token_ids=[IMAGE]))
    place = ("image", PlaceholderRange(0, 1))
    for_prefix = numbers(types, [IMAGE, 1], place, name="token_type_ids", model_type="paligemma")
    assert for_prefix == [0, 0]
    assert numbers(types, [IMAGE, 1], place, name="token_type_ids") == [1, 0]


def test_borders_count_for_experts_alone() -> None:
    types = TokenTypes.of_processor(
        processor(
            image_token_ids=[IMAGE],
            create_moe_mm_token_type_ids=None,
            image_start_token_id=START,
            image_end_token_id=START + 1,
            video_start_token_id=START + 2,
            video_end_token_id=START + 3,
        )
    )
    prompt = [1, START, IMAGE, START + 1, START + 2]
    place = ("image", PlaceholderRange(2, 1))
    assert numbers(types, prompt, place) == [0, 0, 1, 0, 0]
    assert numbers(types, prompt, place, name="moe_mm_token_type_ids") == [0, 1, 1, 1, 2]
