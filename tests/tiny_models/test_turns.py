"""Chat templates: what they write for conversations of every shape."""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lazydecode.tiny_models.turns import (
    CHATML,
    GEMMA,
    GLM,
    QWEN,
    VICUNA,
    Slot,
    Turns,
    chat_template,
)


def render(turns: Turns, messages: list[dict[str, Any]], slots: dict[str, Slot], **options: Any):
    bos = options.pop("bos", None)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined
    )
    return environment.from_string(chat_template(turns, slots, bos=bos)).render(
        messages=messages, **options
    )


USER = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "it's\n{a}"}]}
IMAGE = {"image": Slot("<img>")}


def test_text_around_media_is_kept_as_written() -> None:
    assert render(CHATML, [USER], IMAGE) == "<|im_start|>user\n<img>it's\n{a}<|im_end|>\n"


def test_answer_is_opened_on_request() -> None:
    text = render(CHATML, [USER], IMAGE, add_generation_prompt=True)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_default_system_message_gives_way_to_the_conversations_own() -> None:
    assert "You are a helpful assistant." in render(QWEN, [USER], IMAGE)
    text = render(QWEN, [{"role": "system", "content": "Be brief."}, USER], IMAGE)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert "helpful" not in text


def test_roles_are_renamed() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert render(GEMMA, messages, {}, bos="<bos>") == (
        "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    )
    assert render(VICUNA, messages, {}) == "USER: a ASSISTANT: b "


def test_opening_follows_the_bos() -> None:
    text = render(GLM, [{"role": "user", "content": "a"}], {}, bos="<s>")
    assert text == "<s>[gMASK]<sop><|user|>\na"


def test_items_are_numbered_across_turns() -> None:
    slots = {"audio": Slot("<a>\n", "Audio {n}: ")}
    turn = {"role": "user", "content": [{"type": "audio"}, {"type": "input_audio"}]}
    text = render(CHATML, [turn, turn], slots)
    assert [line[:7] for line in text.splitlines() if line.startswith("Audio")] == [
        "Audio 1",
        "Audio 2",
        "Audio 3",
        "Audio 4",
    ]


def test_labels_can_depend_on_an_option() -> None:
    slots = {"image": Slot("<img>", "Picture {n}: ", "add_vision_id")}
    assert "Picture" not in render(CHATML, [USER], slots)
    assert "Picture 1: <img>" in render(CHATML, [USER], slots, add_vision_id=True)


def test_missing_content_is_an_empty_turn() -> None:
    text = render(CHATML, [{"role": "assistant", "content": None}], {})
    assert text == "<|im_start|>assistant\n<|im_end|>\n"
