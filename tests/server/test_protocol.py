from __future__ import annotations

import json
from typing import Any

import pytest

from lazydecode.errors import InvalidRequestError, ValidationError
from lazydecode.renderers.nesting import MAX_NESTING
from lazydecode.server.protocol import ChatCompletionRequest, decode_request

MESSAGES = [{"role": "user", "content": "x"}]


def decode(**fields: Any) -> ChatCompletionRequest:
    return decode_request(json.dumps({"messages": MESSAGES, **fields}).encode())


def test_every_supported_field_is_read() -> None:
    request = decode(
        model="m",
        max_tokens=5,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=10,
        min_p=0.1,
        seed=3,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        media_io_kwargs={"video": {"num_frames": 8}},
        mm_processor_kwargs={"max_pixels": 100},
        chat_template_kwargs={"enable_thinking": False},
        cache_salt="tenant",
        mm_payload="none",
        user="someone",
    )
    assert request.answer_tokens == 7
    assert request.stop_strings == ("a", "b")
    assert request.stream_options is not None
    assert request.stream_options.include_usage
    assert request.media_io_kwargs == {"video": {"num_frames": 8}}


def test_null_is_the_same_as_absent() -> None:
    request = decode(temperature=None, stop=None, n=None, tools=None, logit_bias=None)
    assert request.stop_strings == ()
    assert request.answer_tokens is None


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("name", "outer"),
    [
        ("tools", lambda value: [{"a": value}]),
        ("chat_template_kwargs", lambda value: {"a": {"b": value}}),
        ("mm_processor_kwargs", lambda value: {"a": {"b": value}}),
        ("media_io_kwargs", lambda value: {"image": {"a": value}}),
    ],
)
def test_free_form_values_are_nested_only_so_deep(name: str, outer: Any) -> None:
    decode(**{name: outer(nested(MAX_NESTING - 2))})
    for levels in (MAX_NESTING - 1, 400, 900):
        with pytest.raises(InvalidRequestError, match=f"{name} is nested more than") as caught:
            decode(**{name: outer(nested(levels))})
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 1), ("best_of", 1), ("response_format", {"type": "text"}), ("tool_choice", "auto")],
)
def test_a_neutral_value_of_an_unsupported_field_is_taken(name: str, value: Any) -> None:
    decode(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("logprobs_mode", "x"),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("frobnicate", 1),
        ("prediction", {}),
    ],
)
def test_an_unsupported_field_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"{name} is not supported") as caught:
        decode(**{name: value})
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("top_logprobs", 3),
        ("stop", ["x"] * 99),
        ("stop", [""]),
        ("cache_salt", ""),
        ("media_io_kwargs", {"smell": {}}),
        ("stream_options", {"include_usage": True}),
        ("seed", 2**70),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("max_tokens", "7"),
        ("mm_payload", "some"),
        ("stream", 1),
    ],
)
def test_a_value_out_of_range_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(**{name: value})
    assert caught.value.parameter == name
    assert name in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "expected object"),
        (b"{}", "missing field messages"),
        (b'{"messages":[{"content":"a"}]}', "missing field role"),
        (b'{"messages":[],"metadata":{"a":' + b"[" * 100_000, "nested too deeply"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "not valid JSON"),
        (b'{"messages":[], "temperature": NaN}', "not valid JSON"),
        (b'{"messages":[], "response_format": "\xff"}', "not valid JSON"),
        (b'{"messages":[], "prediction": {"content": "\\ud800"}}', "not valid JSON"),
    ],
)
def test_a_malformed_body_is_a_client_error(body: bytes, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        decode_request(body)


def test_the_path_of_a_wrong_type_is_the_clients() -> None:
    body = b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":[1]}]}]}'
    with pytest.raises(InvalidRequestError) as caught:
        decode_request(body)
    assert caught.value.parameter == "messages[0].content[0].image_url"


def test_what_is_not_used_is_not_built() -> None:
    many = b"[" + b"{}," * 10_000 + b"0]"
    body = b'{"messages":[{"role":"user","content":"x"}],"metadata":{"a":%s}}'
    request = decode_request((body % many)[:-1] + b',"n":1}')
    assert not request.metadata and not request.n  # or they would keep the body
    assert decode_request(body.replace(b'{"a":%s}', b"null")).messages
    for wrong in (b"[]", b'"x"', b"1", b"true"):
        with pytest.raises(InvalidRequestError, match="metadata: expected an object") as caught:
            decode_request(body.replace(b'{"a":%s}', wrong))
        assert caught.value.parameter == "metadata"
    with pytest.raises(InvalidRequestError, match="response_format is not supported") as caught:
        decode_request(body.replace(b'"metadata":{"a":%s}', b'"response_format":' + many))
    assert caught.value.parameter == "response_format"
