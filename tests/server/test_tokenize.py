"""The token routes through the server: what they answer, and what they leave as it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import make_jpeg, make_wav
from tests.builders_video import make_mp4
from tests.origin import Origin
from tests.server.harness import Server, data_url, image, request, text, video


def picture(size: tuple[int, int] = (64, 48)) -> str:
    return data_url(make_jpeg(size=size) + os.urandom(8))


def clip() -> str:
    return data_url(make_mp4(frames=8, fps=4, size=(64, 64)) + os.urandom(8), "video/mp4")


def ok(server: Server, path: str, body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def traces(server: Server) -> Any:
    """Everything that a request can leave in the caches of processed items."""
    server.wait_idle()
    renderer = server.context.renderer
    caches = [
        cache for cache in (renderer.render_cache, renderer.sender_cache) if cache is not None
    ]
    processor = server.context.frontend.mm_processor
    assert processor is not None
    return (
        [(cache.snapshot(), cache.used_bytes, cache.make_stats()) for cache in caches],
        renderer.identities.bindings.snapshot(),
        len(processor.warm_outputs),
    )


def test_a_text_comes_back_from_its_tokens(render_server: Server) -> None:
    answer = ok(render_server, "/tokenize", {"prompt": "Grüße, 世界! <|im_end|>", "model": "m"})
    frontend = render_server.context.frontend
    assert answer["tokens"] == frontend.encode("Grüße, 世界! <|im_end|>")
    assert answer["count"] == len(answer["tokens"])
    assert answer["token_strs"] is None
    back = ok(render_server, "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "Grüße, 世界! <|im_end|>"}
    assert ok(render_server, "/tokenize", {"prompt": ""})["count"] == 0
    assert ok(render_server, "/detokenize", {"tokens": []}) == {"prompt": ""}


def test_tokens_are_shown_as_the_vocabulary_spells_them(render_server: Server) -> None:
    answer = ok(render_server, "/tokenize", {"prompt": "a b<|im_end|>", "return_token_strs": True})
    tokenizer = render_server.context.frontend.tokenizer
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
    assert answer["token_strs"][-1] == "<|im_end|>"


def test_special_tokens_go_around_a_text_unless_they_are_not_wanted(
    text_render_server: Server,
) -> None:
    frontend = text_render_server.context.frontend
    for wanted in (True, False):
        body = {"prompt": "hello", "add_special_tokens": wanted}
        expected = frontend.tokenizer.encode("hello", add_special_tokens=wanted)
        assert ok(text_render_server, "/tokenize", body)["tokens"] == expected


@pytest.mark.parametrize("generation", [True, False])
def test_messages_have_the_tokens_of_the_chat_route(
    render_server: Server, generation: bool
) -> None:
    body = request(image(picture()), text("and <|image_pad|>"), video(clip()), text())
    body |= {"add_generation_prompt": generation}
    answer = ok(render_server, "/tokenize", body)
    rendered = render_server.render(body).json()
    assert answer["tokens"] == rendered["token_ids"]
    counted = ok(render_server, "/v1/chat/completions/count", body)
    places = rendered["features"]["mm_placeholders"]
    assert counted["count"] == len(rendered["token_ids"])
    assert counted["items"] == [
        {"modality": m, "index": 0, "tokens": places[m][0]["length"], "embeddings": n}
        for m in ("image", "video")
        for n in [places[m][0]["length"]]
    ]


def test_nothing_is_decoded_and_no_cache_is_disturbed(
    chat_server: Server, shared_origin: Origin
) -> None:
    shared_origin.serve("/tokenize-me", make_jpeg() + os.urandom(8))
    known = [image(picture(), uuid=os.urandom(8).hex()) for _ in range(3)]
    for part in known:
        chat = request(part, max_tokens=1)
        ok(chat_server, "/v1/chat/completions", chat)
        ok(chat_server, "/v1/chat/completions/render", chat | {"mm_payload": "tensors"})
    before, decodes = traces(chat_server), chat_server.decodes()
    named = {**known[0], "image_url": None}
    parts = (
        known[0],
        named,
        image(picture(), uuid=os.urandom(8).hex()),
        image(shared_origin.url("/tokenize-me"), uuid=known[1]["uuid"]),
        image(shared_origin.url("/tokenize-me")),
    )
    for path in ("/tokenize", "/v1/chat/completions/count"):
        for body in (request(*parts, text()), request(known[0], named, text())):
            assert ok(chat_server, path, body)["count"] > 0
    assert traces(chat_server) == before
    assert chat_server.decodes() == decodes
    assert shared_origin.hits("/tokenize-me") == 2
    refused = chat_server.post("/tokenize", request(image(None, uuid="never sent")))
    assert refused.status_code == 400 and refused.json()["error"]["index"] == 0
    assert traces(chat_server) == before


def test_a_count_that_depends_on_content_decodes_and_still_leaves_no_trace(
    tiny_model: Callable[..., Path],
) -> None:
    with Server(tiny_model("video_llama_3", weights=False), engine="none") as server:
        first, second = video(clip(), uuid="a"), video(clip())
        rendered = server.render(request(first, text())).json()
        before = traces(server)
        body = request({**first, "video_url": None}, second, text())
        counted = ok(server, "/v1/chat/completions/count", body)
        assert [item["index"] for item in counted["items"]] == [0, 1]
        assert (
            counted["items"][0]["tokens"]
            == (rendered["features"]["mm_placeholders"]["video"][0]["length"])
        )
        assert ok(server, "/tokenize", body)["count"] == counted["count"]
        # The work is not lost: it waits beside the caches for the request that is to follow.
        assert traces(server)[:2] == before[:2]
        assert server.decodes("video") == 2
        assert server.metric("fallbacks_total") == 1  # afterwards all was known


def test_audio_is_counted_by_its_length(audio_render_server: Server) -> None:
    sound = data_url(make_wav() + os.urandom(8), "audio/wav")
    body = request({"type": "audio_url", "audio_url": {"url": sound}}, text())
    before = audio_render_server.decodes("audio")
    counted = ok(audio_render_server, "/v1/chat/completions/count", body)
    assert audio_render_server.decodes("audio") == before
    places = audio_render_server.render(body).json()["features"]["mm_placeholders"]["audio"]
    assert [(i["modality"], i["tokens"]) for i in counted["items"]] == [
        ("audio", places[0]["length"])
    ]


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "a", "cache_salt": "x"}, "cache_salt"),
        ("/tokenize", {"prompt": "a", "max_tokens": 2}, "max_tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {**request(text()), "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {**request(text()), "cache_salt": ""}, "cache_salt"),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ("/detokenize", {"tokens": [1, 10**7]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
def test_a_bad_field_is_named(
    render_server: Server, path: str, body: Any, parameter: str | None
) -> None:
    response = render_server.post(path, body)
    assert response.status_code == (404 if parameter == "model" else 400), response.text
    assert response.json()["error"]["param"] == parameter


def test_characters_with_a_meaning_inside_forge_no_token(render_server: Server) -> None:
    marked = "\U000f0000{}\U000f0001"
    prompts = [marked.format(number) for number in (0, 7, 999_999)] + ["\U000f0001\U000f0000"]
    added = render_server.context.frontend.prompt_tokenizer.added_ids
    for prompt in prompts:
        assert not added & set(ok(render_server, "/tokenize", {"prompt": prompt})["tokens"])


def test_text_beyond_the_limit_is_refused_before_it_is_written_or_tokenized(
    render_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_server.context.renderer.prompts, "_max_chars", 2000)
    words, ids = "a" * 2001, [5] * 2001
    chat = request(text(words))
    tools = [{"type": "function", "function": {"name": words}}]
    empty = [{"role": "user", "content": ""}] * 20
    for path, body, name in (
        ("/tokenize", {"prompt": words}, "prompt"),
        ("/detokenize", {"tokens": ids}, "tokens"),
        ("/tokenize", {"messages": chat["messages"]}, "messages"),
        ("/v1/chat/completions/count", chat, "messages"),
        ("/v1/chat/completions/render", chat, "messages"),
        ("/v1/chat/completions/render", request(text(words), image(picture())), "messages"),
        ("/v1/chat/completions/render", {"messages": empty}, "messages"),
        ("/v1/chat/completions/render", request(text("x")) | {"tools": tools}, "tools"),
        (
            "/v1/chat/completions/render",
            request(text("x")) | {"chat_template_kwargs": {"x": {"y": words}}},
            "chat_template_kwargs",
        ),
        (
            "/v1/chat/completions/render",
            {"messages": [], "prompt_token_ids": ids},
            "prompt_token_ids",
        ),
    ):
        response = render_server.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name), response.text
        assert "more than the 2000" in error["message"]
    for path, body in (
        ("/tokenize", {"prompt": "a" * 2000}),
        ("/detokenize", {"tokens": [5] * 2000}),
        ("/v1/chat/completions/render", request(text("a" * 1000), image(picture()))),
    ):
        ok(render_server, path, body)
