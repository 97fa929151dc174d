"""A model whose prompts Mistral's own library writes: chat, headers alone, and transcription."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import transformers

from tests.server.harness import Server, request, text

RATE = 16000
MOST = 8
"""Tokens of an answer: random weights would go on to the end."""


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    with Server(
        tiny_model("voxtral"),
        served_model_name=("tiny-voxtral",),
        transcription_chunk=31.0,
        transcription_cut_search=1.0,
        dtype="float32",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def processor(tiny_model: Callable[..., Path]) -> Any:
    return transformers.AutoProcessor.from_pretrained(tiny_model("voxtral"))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Any:
    return transformers.VoxtralForConditionalGeneration.from_pretrained(tiny_model("voxtral"))


def wav(seconds: float, seed: int) -> bytes:
    samples = np.random.default_rng(seed).uniform(-0.5, 0.5, int(seconds * RATE))
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.astype(np.float32), RATE, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def sound(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def as_class(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages as the class takes them."""
    return [
        {
            "role": message["role"],
            "content": [
                {"type": "audio", "base64": part["input_audio"]["data"]}
                if part["type"] == "input_audio"
                else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def generate(model: Any, inputs: Any) -> list[int]:
    config = transformers.GenerationConfig(max_new_tokens=MOST)
    ids = model.generate(**inputs, generation_config=config)
    return [int(i) for i in ids[0, inputs["input_ids"].shape[1] :]]


def turns(*data: bytes) -> list[dict[str, Any]]:
    """Two turns; what the texts spell is text."""
    return [
        {"role": "user", "content": [text("so [AUDIO]"), sound(data[0]), text("said")]},
        {"role": "assistant", "content": [text("[INST] yes")]},
        {"role": "user", "content": [sound(data[1]), text("and this?"), text(" [/INST]")]},
    ]


def test_a_chat_has_the_class_own_ids_and_spectrograms(server: Server, processor: Any) -> None:
    messages = turns(wav(1.2, seed=1), wav(30.5, seed=2))
    theirs = processor.apply_chat_template(as_class(messages))
    ids = theirs["input_ids"][0].tolist()
    body = {"messages": messages}
    decodes = server.decodes("audio")
    counted = server.post("/v1/chat/completions/count", body).json()
    sketched = server.render({**body, "mm_payload": "none"}).json()
    assert server.decodes("audio") == decodes
    full = server.render(body).json()
    assert server.decodes("audio") - decodes == 2
    again = server.render(body).json()
    assert server.decodes("audio") - decodes == 2
    assert sketched["token_ids"] == full["token_ids"] == again["token_ids"] == ids
    places = full["features"]["mm_placeholders"]["audio"]
    assert [place["length"] for place in places] == [375, 750]
    assert sketched["features"]["mm_placeholders"]["audio"] == places
    assert counted["count"] == len(ids)


def test_the_answer_is_the_librarys(server: Server, processor: Any, model: Any) -> None:
    messages = turns(wav(1.2, seed=1), wav(0.7, seed=3))
    expected = generate(model, processor.apply_chat_template(as_class(messages)))
    answer = server.openai().chat.completions.create(
        model="tiny-voxtral",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=MOST,
        temperature=0.0,
    )
    assert answer.choices[0].message.content == processor.tokenizer.decode(
        expected, skip_special_tokens=True
    )


@pytest.mark.parametrize("language", [None, "en"])
def test_a_transcript_is_that_of_the_class_own_request(
    server: Server, processor: Any, model: Any, language: str | None, tmp_path: Path
) -> None:
    data = wav(1.5, seed=4)
    path = tmp_path / "a.wav"
    path.write_bytes(data)
    inputs = processor.apply_transcription_request(str(path), model_id="m", language=language)
    expected = processor.tokenizer.decode(generate(model, inputs), skip_special_tokens=True)
    given = {} if language is None else {"language": language}
    made = server.openai().audio.transcriptions.create(
        model="tiny-voxtral",
        file=("a.wav", data),
        extra_body={"max_completion_tokens": MOST},
        **given,
    )
    assert made.text == expected.strip()


@pytest.mark.parametrize(
    ("form", "parameter", "says"),
    [
        ({"prompt": "words"}, "prompt", "takes no prompt"),
        ({"language": "Klingon"}, "language", "does not know the language 'Klingon'"),
    ],
)
def test_what_a_transcription_cannot_have_is_refused_by_name(
    server: Server, form: dict[str, str], parameter: str, says: str
) -> None:
    response = httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        files={"file": ("a.wav", wav(0.5, seed=5))},
        data=form,
        timeout=180,
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == parameter
    assert says in response.json()["error"]["message"]


def test_a_conversation_that_the_library_refuses_is_the_clients_error(server: Server) -> None:
    messages = [{"role": "system", "content": "be brief"}, *turns(wav(0.5, 5), wav(0.5, 6))]
    response = server.render({"messages": messages})
    assert response.status_code == 400
    assert "system messages" in response.json()["error"]["message"]
    cut = request(text("listen"), sound(wav(1.0, 7)[:200]), sound(b"no sound"))
    response = server.render(cut)
    assert response.status_code == 422
    assert response.json()["error"]["modality"] == "audio"
