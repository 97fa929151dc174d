from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest

from lazydecode.errors import InvalidRequestError, TooManyItemsError
from lazydecode.renderers.chat import Conversation, check_item_counts, parse_messages
from lazydecode.renderers.messages import ChatMessage, read_media_text


def parse(*messages: dict[str, Any]) -> Conversation:
    body = json.dumps(list(messages)).encode()
    return parse_messages(msgspec.json.decode(body, type=list[ChatMessage]))


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_parts_keep_their_order_and_media_their_index_within_the_modality() -> None:
    conversation = parse(
        {"role": "system", "content": "a plain string"},
        user(
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "http://h/1.png", "detail": "high"}},
            {"type": "audio_url", "audio_url": {"url": "http://h/1.wav"}},
        ),
        {"role": "assistant", "content": "b"},
        user(
            {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "MP3"}},
            {"type": "video_url", "video_url": "http://h/1.mp4"},
            {"type": "image_url", "image_url": "http://h/2.png", "uuid": "u"},
        ),
    )
    assert [(m.modality, m.index, m.source, m.uuid) for m in conversation.media] == [
        ("image", 0, "http://h/1.png", None),
        ("audio", 0, "http://h/1.wav", None),
        ("audio", 1, "QUJD", None),
        ("video", 0, "http://h/1.mp4", None),
        ("image", 1, "http://h/2.png", "u"),
    ]
    assert conversation.media[2].media_type == "audio/mp3"
    assert conversation.media[4].where == "messages[3].content[2]"
    assert conversation.counts() == {"image": 2, "audio": 2, "video": 1}
    assert conversation.messages[0] == {"role": "system", "content": "a plain string"}
    assert conversation.messages[1]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "audio"},
    ]


def test_a_url_may_be_null_beside_a_uuid() -> None:
    conversation = parse(
        user(
            {"type": "image_url", "image_url": None, "uuid": "a"},
            {"type": "image_url", "image_url": {"url": None}, "uuid": "b"},
            {"type": "video_url", "uuid": "c"},
        )
    )
    assert [(m.source, m.uuid) for m in conversation.media] == [
        (None, "a"),
        (None, "b"),
        (None, "c"),
    ]


def test_tool_conversation_reaches_the_template_as_objects() -> None:
    conversation = parse(
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    )
    assert conversation.messages == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "f", "arguments": {"x": 1}},
                    "id": "c1",
                }
            ],
        },
        {"role": "tool", "content": [{"type": "text", "text": "sunny"}], "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("part", "parameter"),
    [
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": ["a", "b"]}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": 7}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": None}}, "image_url.url"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, "image_url.detail"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
        (
            {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "../x"}},
            "input_audio.format",
        ),
        *(
            ({"type": "image_url", "image_url": {"url": "x"}, "uuid": uuid}, "uuid")
            for uuid in ("u" * 1025, "u" * 10_000, "", "a\nb", "\x00", "a\x85", 7, ["u"], {}, True)
        ),
        ({"type": "image_url", "image_url": {"uuid": ""}}, "image_url.uuid"),
    ],
)
def test_a_bad_media_part_is_named_with_its_index(part: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(
            user({"type": part["type"], part["type"]: {"url": "http://h/", "data": "QQ=="}}, part)
        )
    assert caught.value.parameter == f"messages[0].content[1].{parameter}"
    assert caught.value.index == 1


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"text": "a"}), "messages[0].content[0].type"),
        (user({"type": "image_pil"}), "messages[0].content[0].type"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
    ],
)
def test_a_malformed_message_is_named(message: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(message)
    assert caught.value.parameter == parameter
    assert caught.value.status == 400


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        parse()


def test_counts_are_checked_against_the_model_and_the_server() -> None:
    check_item_counts({"image": 2}, modalities=("image",), max_items={"image": 2})
    check_item_counts({"image": 9}, modalities=("image",), max_items={"image": None})
    check_item_counts({}, modalities=(), max_items={})
    with pytest.raises(TooManyItemsError, match="3 image items; at most 2"):
        check_item_counts({"image": 3}, modalities=("image",), max_items={"image": 2})
    with pytest.raises(InvalidRequestError, match="text-only"):
        check_item_counts({"image": 1}, modalities=(), max_items={})
    with pytest.raises(InvalidRequestError, match="cannot use the model's media, as its log says"):
        check_item_counts({"image": 1}, modalities=(), max_items={}, are_off=True)
    with pytest.raises(InvalidRequestError, match="takes no audio items; it takes image, video"):
        check_item_counts({"audio": 1}, modalities=("image", "video"), max_items={})


def test_a_long_data_url_is_a_view_of_the_body() -> None:
    payload = base64.b64encode(bytes(range(256)) * 40).decode()
    body = json.dumps(
        [user({"type": "image_url", "image_url": {"url": "DATA:image/png;base64," + payload}})]
    ).encode()
    conversation = parse_messages(msgspec.json.decode(body, type=list[ChatMessage]))
    source = conversation.media[0].source
    assert isinstance(source, memoryview)
    assert bytes(source) == b"DATA:image/png;base64," + payload.encode()


def test_a_long_web_url_is_text() -> None:
    conversation = parse(
        user({"type": "image_url", "image_url": {"url": "http://h/?" + "x" * 9000}})
    )
    assert conversation.media[0].source == "http://h/?" + "x" * 9000


@pytest.mark.parametrize("at", [0, 70_000, 299_998])
def test_escapes_in_a_data_url_take_the_text_path(at: int) -> None:
    text = "a" * at + "\\/" + "b" * (300_000 - at)
    value = read_media_text(msgspec.Raw(b'"' + text.encode() + b'"'), where="url")
    assert value == text.replace("\\/", "/")


def call_with(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        ],
    }


def test_arguments_of_a_call_are_nested_only_so_deep() -> None:
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"a": deep}
    # As text it stays what it is; as an object the template would have to walk it.
    as_text = parse(call_with(json.dumps(deep))).messages[0]["tool_calls"][0]
    assert as_text["function"]["arguments"] == json.dumps(deep)
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tool_calls\[0\].* is nested"):
        parse(call_with(deep))


@pytest.mark.parametrize(
    ("messages", "is_short"),
    [
        ([{"role": "user", "content": "hello"}], True),
        ([{"role": "user", "content": "x" * 600}], False),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * 300}] * 2}], False),
        ([{"role": "user", "content": "hello", "name": "x" * 5000}], False),
        ([{"role": "assistant", "content": "a", "reasoning_content": "x" * 5000}], False),
        ([{"role": "user", "content": "hello"}] * 9, False),
        (
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": {"name": "f"}}],
                }
            ],
            False,
        ),
    ],
)
def test_only_what_is_short_in_all_its_texts_is_short(
    messages: list[dict[str, Any]], is_short: bool
) -> None:
    assert parse(*messages).is_short is is_short
