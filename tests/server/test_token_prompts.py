"""Prompts that come as token ids, with their media, through the server."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.builders import make_jpeg, make_wav
from tests.builders_video import make_mp4
from tests.server.harness import Server, data_url, image, request, text, video


def picture(size: tuple[int, int] = (64, 48)) -> dict[str, Any]:
    return image(data_url(make_jpeg(size=size) + os.urandom(8)))


def clip() -> dict[str, Any]:
    data = make_mp4(frames=8, fps=4, size=(64, 64)) + os.urandom(8)
    return video(data_url(data, "video/mp4"))


def sound() -> dict[str, Any]:
    url = data_url(make_wav() + os.urandom(8), "audio/wav")
    return {"type": "audio_url", "audio_url": {"url": url}}


def template_ids(server: Server, *parts: dict[str, Any]) -> list[int]:
    """Token ids of the conversation, as a client writes them with the model's own tokenizer."""
    frontend = server.context.frontend
    content = [
        part if part["type"] == "text" else {"type": part["type"].removesuffix("_url")}
        for part in parts
    ]
    written = frontend.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = frontend.tokenizer.encode(written, add_special_tokens=False)
    return ids


def as_tokens(server: Server, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    media = [part for part in parts if part["type"] != "text"]
    return request(*media, prompt_token_ids=template_ids(server, *parts), **fields)


def answers(server: Server, path: str, *bodies: dict[str, Any]) -> list[Any]:
    found = []
    for body in bodies:
        response = server.post(path, body)
        assert response.status_code == 200, response.text
        found.append(response.json())
    return found


@pytest.mark.parametrize("is_hit", [False, True])
@pytest.mark.parametrize("payload", ["tensors", "none"])
def test_ids_ranges_and_tensors_are_those_of_the_chat_request(
    render_server: Server, is_hit: bool, payload: str
) -> None:
    parts = (text("Ä"), picture(), text("and"), clip(), picture((96, 64)), text("?"))
    fields = {"mm_payload": payload, "skip_mm_cache": not is_hit}
    chat, tokens = answers(
        render_server,
        "/v1/chat/completions/render",
        request(*parts, **fields),
        as_tokens(render_server, *parts, **fields),
    )
    assert tokens["token_ids"] == chat["token_ids"]
    assert tokens["features"] == chat["features"]


def test_sounds_go_the_same_way(audio_render_server: Server) -> None:
    parts = (sound(), text("and"), sound(), text("?"))
    chat, tokens = answers(
        audio_render_server,
        "/v1/chat/completions/render",
        request(*parts),
        as_tokens(audio_render_server, *parts),
    )
    assert (tokens["token_ids"], tokens["features"]) == (chat["token_ids"], chat["features"])


def test_the_answer_and_the_count_are_those_of_the_chat_request(chat_server: Server) -> None:
    parts = (picture(), text("what?"))
    fields = {"max_tokens": 4, "temperature": 0}
    bodies = request(*parts, **fields), as_tokens(chat_server, *parts, **fields)
    chat, tokens = answers(chat_server, "/v1/chat/completions", *bodies)
    assert tokens["choices"] == chat["choices"]
    assert tokens["usage"] == chat["usage"]
    chat, tokens = answers(chat_server, "/v1/chat/completions/count", *bodies)
    assert tokens == chat


def test_a_prompt_of_text_alone_is_taken_as_it_is(render_server: Server) -> None:
    ids = template_ids(render_server, text("hello"))
    (answer,) = answers(
        render_server,
        "/v1/chat/completions/render",
        {"messages": [], "prompt_token_ids": ids},
    )
    assert answer["token_ids"] == ids and answer["features"] is None


@pytest.mark.parametrize(
    ("in_prompt", "sent", "message", "index"),
    [
        (1, 2, "1 image placeholders for 2 image items", 1),
        (2, 1, "2 image placeholders for 1 image items", None),
        (1, 0, "1 image placeholders for 0 image items", None),
        (0, 1, "0 image placeholders for 1 image items", 0),
    ],
)
def test_counts_that_differ_are_both_named_before_anything_is_fetched(
    render_server: Server, in_prompt: int, sent: int, message: str, index: int | None
) -> None:
    ids = template_ids(render_server, *(picture() for _ in range(in_prompt)), text())
    unreachable = image("http://127.0.0.1:9/never-asked")
    response = render_server.render(
        request(*(unreachable for _ in range(sent)), prompt_token_ids=ids)
    )
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert message in error["message"]
    assert (error["param"], error["modality"]) == ("prompt_token_ids", "image")
    assert error.get("index") == index


def test_a_placeholder_of_another_modality_is_refused(render_server: Server) -> None:
    ids = template_ids(render_server, clip())
    error = render_server.render(request(picture(), prompt_token_ids=ids)).json()["error"]
    assert "0 image placeholders for 1 image items" in error["message"]


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [10**9]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**80]}, "prompt_token_ids"),
        ({"prompt_token_ids": ["1"]}, "prompt_token_ids[0]"),
        ({"prompt_token_ids": "1"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "tools": []}, "tools"),
        ({"prompt_token_ids": [1], "add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"prompt_token_ids": [1], "messages": [{"role": "user", "content": "a"}]},
            "messages[0].content",
        ),
        (
            {"prompt_token_ids": [1], **request(text("a"))},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_is_wrong_is_named(render_server: Server, fields: Any, parameter: str) -> None:
    response = render_server.render({"messages": [], **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == parameter
