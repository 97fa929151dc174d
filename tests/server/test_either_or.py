"""Models that take one text or one picture, through the server."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoProcessor

from lazydecode.config import Settings
from lazydecode.models.registry import ModelLoadError
from lazydecode.server.loading import load_context
from tests.builders import make_jpeg, make_png, make_wav, tone
from tests.server.harness import Server, data_url, image, request, text


@pytest.fixture(scope="module", params=["clip", "colqwen2"])
def embedder(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path]
) -> Iterator[tuple[Server, Any]]:
    """A render-only server, and the model's own processor."""
    folder = tiny_model(request.param, weights=False)
    with Server(folder, engine="none", served_model_name=("m",)) as server:
        yield server, AutoProcessor.from_pretrained(folder)


def picture(size: tuple[int, int] = (96, 64)) -> dict[str, Any]:
    return image(data_url(make_png(size), "image/png"))


def test_a_picture_is_what_the_class_makes_of_it_and_then_a_hit(
    embedder: tuple[Server, Any],
) -> None:
    server, processor = embedder
    data = make_jpeg((300, 200))
    part = image(data_url(data))
    before = server.decodes()
    sketched = server.render(request(part, mm_payload="none")).json()
    assert server.decodes() == before
    first = server.render(request(part)).json()
    second = server.render(request(part)).json()
    assert server.decodes() == before + 1
    theirs = processor(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
    ids = theirs["input_ids"][0].tolist() if "input_ids" in theirs else []
    for answer in (sketched, first, second):
        assert answer["token_ids"] == ids
        (place,) = answer["features"]["mm_placeholders"]["image"]
        assert ids[place["offset"]] == processor.image_token_id if ids else place["length"] == 0
    for name in ("mm_hashes", "mm_placeholders"):
        assert sketched["features"][name] == first["features"][name] == second["features"][name]
    payload = first["features"]["kwargs_data"]["image"][0]
    assert payload == second["features"]["kwargs_data"]["image"][0]
    # uint8 patches, or floats: never less than a byte per value.
    assert len(base64.b64decode(payload)) > theirs["pixel_values"].numel()


def test_a_text_gets_the_ids_of_the_class(embedder: tuple[Server, Any]) -> None:
    server, processor = embedder
    for content in ("a cat in\n\na hat", [text("a cat in\n\na hat")]):
        answer = server.render({"messages": [{"role": "user", "content": content}]}).json()
        theirs = processor(text=["a cat in\n\na hat"], return_tensors="pt")
        assert answer["token_ids"] == theirs["input_ids"][0].tolist()
        assert answer["features"] is None


@pytest.mark.parametrize("payload", ["tensors", "none"])
def test_both_in_one_request_are_refused(embedder: tuple[Server, Any], payload: str) -> None:
    server, _ = embedder
    answer = server.render(request(picture(), text("a cat"), mm_payload=payload))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "one text or one image, not both" in error["message"]
    assert error["param"] == "messages"


def test_two_pictures_are_refused(embedder: tuple[Server, Any]) -> None:
    answer = embedder[0].render(request(picture(), picture((32, 32))))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "at most 1" in error["message"]
    assert (error["modality"], error["index"]) == ("image", 1)


def test_a_conversation_is_refused(embedder: tuple[Server, Any]) -> None:
    turns = [
        {"role": "user", "content": "a cat"},
        {"role": "assistant", "content": "a hat"},
        {"role": "user", "content": "where?"},
    ]
    answer = embedder[0].render({"messages": turns})
    assert answer.status_code == 400
    assert "holds no conversation" in answer.json()["error"]["message"]


def test_token_ids_beside_a_picture_are_refused(embedder: tuple[Server, Any]) -> None:
    body = request(picture(), prompt_token_ids=[1, 2, 3])
    answer = embedder[0].render(body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_token_ids"


def test_other_media_are_refused(embedder: tuple[Server, Any]) -> None:
    part = {"type": "audio_url", "audio_url": {"url": data_url(b"x", "audio/wav")}}
    answer = embedder[0].render(request(part))
    assert answer.status_code == 400
    assert "takes no audio items; it takes image" in answer.json()["error"]["message"]


def test_tokens_are_counted(embedder: tuple[Server, Any]) -> None:
    server, processor = embedder
    answer = server.post("/v1/chat/completions/count", request(picture()))
    assert answer.status_code == 200, answer.text
    theirs = processor(images=[Image.new("RGB", (96, 64))], return_tensors="pt")
    expected = theirs["input_ids"].shape[1] if "input_ids" in theirs else 0
    assert expected in answer.json().values()


def test_no_answer_is_generated(embedder: tuple[Server, Any]) -> None:
    answer = embedder[0].post("/v1/chat/completions", request(text("a cat")))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == "this model embeds and does not generate; use /v1/chat/completions/render"


def test_an_engine_for_it_is_refused_when_it_is_loaded(tiny_model: Callable[..., Path]) -> None:
    folder = str(tiny_model("clip", weights=False))
    with pytest.raises(ModelLoadError, match=r"embeds and does not generate.*--engine none"):
        load_context(folder, Settings(engine="transformers"))


def test_sounds_with_chance_in_them_are_never_answered_from_the_cache(
    tiny_model: Callable[..., Path],
) -> None:
    url = data_url(make_wav(tone(rate=48000, seconds=0.4), rate=48000), "audio/wav")
    part = {"type": "audio_url", "audio_url": {"url": url}, "uuid": "a sound"}
    folder = tiny_model("clap", weights=False)
    with Server(folder, engine="none", served_model_name=("m",)) as server:
        answers = [
            server.render(request(part, mm_payload=payload)).json()["features"]
            for payload in ("tensors", "tensors", "none")
        ]
        assert server.decodes("audio") == 2
        assert len({answer["mm_hashes"]["audio"][0] for answer in answers}) == 3
        alone = {**part, "audio_url": None}
        assert "processor cache" in server.render(request(alone)).json()["error"]["message"]
