"""Marking: what a conversation spells stays text, through any template."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.models.marks import MARK_END, MARK_START, TextMarker, has_marks

TOKENS = ("<|im_end|>", "<|image_pad|>", "<|image_pad|>x", "<think>", "</think>")


@pytest.fixture
def marker() -> TextMarker:
    return TextMarker(TOKENS)


def test_plain_text_is_left_as_it_is(marker: TextMarker) -> None:
    assert marker.seal(marker.mark("no tokens here")) == "no tokens here"


def test_a_sealed_text_spells_no_control_token(marker: TextMarker) -> None:
    sealed = marker.protect("a <|im_end|> b <|image_pad|>x <think>")
    assert not any(token in sealed for token in TOKENS)
    assert has_marks(sealed)
    assert marker.unseal(sealed) == "a <|im_end|> b <|image_pad|>x <think>"


def test_the_longest_spelling_counts(marker: TextMarker) -> None:
    sealed = marker.protect("<|image_pad|>x")
    assert sealed == f"{MARK_START}2{MARK_END}"


def test_words_that_templates_look_for_are_not_marked() -> None:
    marker = TextMarker(["<image>", "eol"])
    message = {
        "role": "tool",
        "content": [{"type": "image"}, {"type": "text", "text": "a <image>"}],
    }
    marked = marker.mark(message)
    assert marked["role"] == "tool"
    assert [part["type"] for part in marked["content"]] == ["image", "text"]
    assert marked["content"][1]["text"] == f"a {MARK_START}<image>{MARK_END}"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"<|im_end|>": {"type": "string"}}},
        {"properties": {"a": {"type": "<|im_end|>"}}},
        {"properties": {"type": {"type": "string", "description": "<|im_end|>"}}},
        {"properties": {"role": ["<|im_end|>"]}, "type": ["<|im_end|>", "null"]},
    ],
)
def test_no_place_of_a_schema_can_spell_a_token(
    marker: TextMarker, schema: dict[str, object]
) -> None:
    written = json.dumps(marker.mark(schema), ensure_ascii=False)
    assert "<|im_end|>" not in marker.seal(written)
    assert marker.unseal(marker.seal(written)) == json.dumps(schema)


def test_marks_in_a_conversation_are_dropped(marker: TextMarker) -> None:
    forged = f"{MARK_START}0{MARK_END}<|im_end|>{MARK_END}"
    assert marker.unseal(marker.protect(forged)) == "0<|im_end|>"


def test_what_a_template_writes_itself_is_not_sealed(marker: TextMarker) -> None:
    user = marker.mark("<|im_end|>")
    assert marker.seal(f"{user}<|im_end|>") == f"{MARK_START}0{MARK_END}<|im_end|>"


def test_a_template_may_cut_a_message_at_a_token(marker: TextMarker) -> None:
    """As Qwen3's does: the reasoning is taken out of the assistant's message and written anew."""
    content = marker.mark("thinking</think>answer")
    before, after = content.split("</think>")
    sealed = marker.seal(f"<think>{before}\n</think>\n{after}<|im_end|>")
    assert marker.unseal(sealed) == "<think>thinking\n</think>\nanswer<|im_end|>"
    assert "<think>" in sealed and "</think>" in sealed


def test_a_cut_keeps_its_sides_apart(marker: TextMarker) -> None:
    """What is left and right of a removed token must not spell another one."""
    content = marker.mark("<|im_</think>end|>")
    sealed = marker.seal(content.replace("</think>", ""))
    assert "<|im_end|>" not in sealed
    assert marker.unseal(sealed) == "<|im_end|>"


def test_two_parts_do_not_spell_a_token_together(marker: TextMarker) -> None:
    parts = [marker.mark("<|image"), marker.mark("_pad|>")]
    assert "<|image_pad|>" not in marker.seal("".join(parts))


@given(st.lists(st.sampled_from([*TOKENS, "<|im_", "end|>", " a", MARK_START, MARK_END, "7"])))
def test_sealing_never_leaves_a_spelling_and_loses_no_text(pieces: list[str]) -> None:
    marker = TextMarker(TOKENS)
    text = "".join(pieces)
    sealed = marker.protect(text)
    assert not any(token in sealed for token in TOKENS)
    assert marker.unseal(sealed) == text.replace(MARK_START, "").replace(MARK_END, "")
