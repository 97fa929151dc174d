"""Prompt updates applied, and the ranges of the items they brought in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.errors import PlaceholderMismatchError
from lazydecode.inputs import PlaceholderRange
from lazydecode.processing.placement import (
    apply_updates_to_ids,
    apply_updates_to_text,
    find_placeholders,
)
from lazydecode.processing.prompt_updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdateDetails,
    find_ids,
    resolve_updates,
)


class LetterTokenizer:
    """A token per letter; its id is the letter's code."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [ord(letter) for letter in text]
        return [1, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], /) -> str:
        return "".join(chr(token) for token in token_ids)


def test_each_item_replaces_one_target_in_order() -> None:
    update = PromptReplacement("image", [9], lambda index: [100 + index] * (index + 1))
    ids, ranges = apply_updates_to_ids(
        [1, 9, 2, 9, 3], resolve_updates([update], {"image": 2}), None
    )
    assert ids == [1, 100, 2, 101, 101, 3]
    assert ranges == {"image": [PlaceholderRange(1, 1), PlaceholderRange(3, 2)]}


def test_modalities_are_placed_where_their_targets_stand() -> None:
    updates = resolve_updates(
        [PromptReplacement("image", [8], [80, 80]), PromptReplacement("audio", [7, 7], [70])],
        {"image": 2, "audio": 2},
    )
    ids, ranges = apply_updates_to_ids([7, 7, 8, 0, 7, 7, 7, 8], updates, None)
    assert ids == [70, 80, 80, 0, 70, 7, 80, 80]
    assert [place.offset for place in ranges["image"]] == [1, 6]
    assert [place.offset for place in ranges["audio"]] == [0, 4]


def test_missing_target_names_the_item() -> None:
    updates = resolve_updates([PromptReplacement("image", [8], [80])], {"image": 3})
    with pytest.raises(PlaceholderMismatchError, match="image at index 2") as caught:
        apply_updates_to_ids([8, 8], updates, None)
    assert (caught.value.modality, caught.value.index) == ("image", 2)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)


def test_more_targets_than_items_leaves_the_rest() -> None:
    updates = resolve_updates([PromptReplacement("image", [8], [80])], {"image": 1})
    assert apply_updates_to_ids([8, 8], updates, None)[0] == [80, 8]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (PromptIndexTargets.start(), [50, 51, 1, 2, 1, 3]),
        (PromptIndexTargets.end(), [1, 2, 1, 3, 50, 51]),
        (PromptIndexTargets.prefix([1, 2]), [1, 2, 50, 51, 1, 3]),
        ([1], [1, 50, 51, 2, 1, 3]),
        ([2, 1], [1, 2, 1, 50, 51, 3]),
    ],
)
def test_all_insertions_stand_behind_one_target_in_order(target, expected) -> None:
    update = PromptInsertion("image", target, lambda index: [50 + index])
    ids, ranges = apply_updates_to_ids([1, 2, 1, 3], resolve_updates([update], {"image": 2}), None)
    assert ids == expected
    assert [ids[place.offset] for place in ranges["image"]] == [50, 51]


def test_absent_prefix_is_a_mismatch() -> None:
    update = PromptInsertion("image", PromptIndexTargets.prefix([5]), [0])
    with pytest.raises(PlaceholderMismatchError):
        apply_updates_to_ids([1, 5], resolve_updates([update], {"image": 1}), None)


def test_insertion_before_a_replacement_at_the_same_place() -> None:
    updates = resolve_updates(
        [
            PromptReplacement("image", [8], [80]),
            PromptInsertion("audio", PromptIndexTargets.start(), [70]),
        ],
        {"image": 1, "audio": 1},
    )
    assert apply_updates_to_ids([8, 1], updates, None)[0] == [70, 80, 1]


def test_insertion_does_not_stand_behind_a_replaced_target() -> None:
    updates = resolve_updates(
        [PromptReplacement("image", [8], [80]), PromptInsertion("audio", [8, 1], [70])],
        {"image": 1, "audio": 1},
    )
    assert apply_updates_to_ids([8, 1, 8, 1], updates, None)[0] == [80, 1, 8, 1, 70]


def test_the_first_alternative_that_matches_is_taken() -> None:
    updates = resolve_updates(
        [PromptReplacement("image", [5, 6], [80]), PromptReplacement("image", [6], [81])],
        {"image": 2},
    )
    assert apply_updates_to_ids([6, 5, 6], updates, None)[0] == [81, 80]


def test_masks_say_which_tokens_take_an_embedding() -> None:
    details = PromptUpdateDetails.select_token_id([1, 5, 5, 2], 5)
    text = PromptUpdateDetails.select_text("<ab|ab>", "ab")
    plain = PromptUpdateDetails.from_seq([3, 3])
    contents = [details, text, plain]
    updates = resolve_updates([PromptReplacement("image", [9], contents.__getitem__)], {"image": 3})
    _, ranges = apply_updates_to_ids([9, 9, 9], updates, LetterTokenizer())
    masks = [place.is_embed for place in ranges["image"]]
    assert masks[0] is not None and masks[0].tolist() == [False, True, True, False]
    assert masks[1] is not None
    assert masks[1].tolist() == [False, True, True, False, True, True, False]
    assert masks[2] is None
    assert [place.num_embeds for place in ranges["image"]] == [2, 4, 2]


def test_text_updates_on_a_text_prompt() -> None:
    updates = resolve_updates([PromptReplacement("image", "<i>", "[pp]")], {"image": 2})
    text = apply_updates_to_text("a<i>b<i>", updates, LetterTokenizer())
    assert text == "a[pp]b[pp]"
    ids = LetterTokenizer().encode(text)
    ranges = find_placeholders(ids, updates, LetterTokenizer())
    assert [(place.offset, place.length) for place in ranges["image"]] == [(2, 4), (7, 4)]


def test_found_placeholders_of_two_modalities_do_not_overlap() -> None:
    updates = resolve_updates(
        [PromptReplacement("image", [8], [5, 5]), PromptReplacement("video", [7], [5])],
        {"image": 1, "video": 1},
    )
    ranges = find_placeholders([5, 5, 5], updates, None)
    assert ranges == {"image": [PlaceholderRange(0, 2)], "video": [PlaceholderRange(2, 1)]}
    with pytest.raises(PlaceholderMismatchError, match="video at index 0"):
        find_placeholders([5, 5], updates, None)


def test_updates_survive_another_position() -> None:
    (update,) = resolve_updates([PromptReplacement("image", [9], [1])], {"image": 1})["image"][0]
    moved = update.with_item_index(4)
    assert moved.item_index == 4
    assert moved.content_ids(None) is update.content_ids(None)


def test_text_needs_a_tokenizer() -> None:
    updates = resolve_updates([PromptReplacement("image", "<i>", [1])], {"image": 1})
    with pytest.raises(ValueError, match="needs a tokenizer"):
        apply_updates_to_ids([1], updates, None)


def test_mask_of_the_wrong_length_is_refused() -> None:
    details = PromptUpdateDetails([1, 2], lambda tokenizer, full: np.ones(3, np.bool_))
    updates = resolve_updates([PromptReplacement("image", [9], details)], {"image": 1})
    with pytest.raises(ValueError, match="mask"):
        apply_updates_to_ids([9], updates, None)


@given(
    st.lists(st.integers(0, 4), max_size=30),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_find_ids_is_the_first_match(ids: list[int], wanted: list[int]) -> None:
    expected = next((at for at in range(len(ids)) if ids[at : at + len(wanted)] == wanted), -1)
    assert find_ids(ids, wanted) == expected


@given(st.lists(st.sampled_from([1, 2, 8, 7]), max_size=30), st.data())
def test_replacement_equals_the_naive_way(prompt: list[int], data: st.DataObject) -> None:
    counts = {
        "image": data.draw(st.integers(0, prompt.count(8))),
        "audio": data.draw(st.integers(0, prompt.count(7))),
    }
    updates = resolve_updates(
        [
            PromptReplacement("image", [8], lambda index: [100, *[200 + index] * index]),
            PromptReplacement("audio", [7], lambda index: [300 + index]),
        ],
        counts,
    )
    expected: list[int] = []
    places: dict[str, list[PlaceholderRange]] = {"image": [], "audio": []}
    for token in prompt:
        modality = {8: "image", 7: "audio"}.get(token)
        if modality is None or len(places[modality]) == counts[modality]:
            expected.append(token)
            continue
        index = len(places[modality])
        content = [100, *[200 + index] * index] if token == 8 else [300 + index]
        places[modality].append(PlaceholderRange(len(expected), len(content)))
        expected += content
    assert apply_updates_to_ids(prompt, updates, None) == (expected, places)
