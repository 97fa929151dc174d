"""A speech model with a chat template: its own request form, and the same recording in a chat."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import transformers

from lazydecode.media.audio import AudioMediaIO
from tests.builders import make_wav
from tests.server.harness import Server

RATE = 16000
MOST = 12
"""Tokens of an answer: random weights would go on to the end."""


@pytest.fixture(scope="module")
def asr(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    with Server(
        tiny_model("qwen3_asr"),
        served_model_name=("tiny-asr",),
        transcription_chunk=3.0,
        transcription_cut_search=1.0,
        dtype="float32",
    ) as server:
        yield server


def wav(seconds: float, seed: int) -> bytes:
    samples = np.random.default_rng(seed).uniform(-0.5, 0.5, (int(seconds * RATE), 1))
    return make_wav(samples, rate=RATE)


def create(server: Server, data: bytes, **options: Any) -> Any:
    return server.openai().audio.transcriptions.create(
        model="tiny-asr",
        file=("a.wav", data),
        extra_body={"max_completion_tokens": MOST},
        **options,
    )


def post(server: Server, data: bytes, path: str = "transcriptions", **form: str) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/audio/{path}", files={"file": ("a.wav", data)}, data=form, timeout=180
    )


@pytest.mark.parametrize(
    ("language", "prompt"), [(None, None), ("en", None), ("German", "hot <|audio_pad|> words")]
)
def test_the_answer_is_that_of_the_class_own_request(
    asr: Server, language: str | None, prompt: str | None
) -> None:
    data = wav(1.2, seed=1)
    folder = asr.context.frontend.model_id
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.Qwen3ASRForConditionalGeneration.from_pretrained(folder)
    samples, rate = AudioMediaIO().load_bytes(data)
    assert rate == RATE
    # What the prompt spells stays text with us; the class would take it for a place of sound.
    spelled = None if prompt is None else prompt.replace("<|audio_pad|>", "sound")
    inputs = processor.apply_transcription_request(samples, language=language, prompt=spelled)
    ids = model.generate(
        **inputs, generation_config=transformers.GenerationConfig(max_new_tokens=MOST)
    )[0, inputs["input_ids"].shape[1] :]
    expected = processor.extract_transcription(
        processor.tokenizer.decode(ids, skip_special_tokens=True)
    )
    options = {"language": language, "prompt": spelled}
    given = {name: value for name, value in options.items() if value is not None}
    assert create(asr, data, **given).text == expected.strip()
    if prompt is not None:
        assert isinstance(create(asr, data, prompt=prompt).text, str)


def test_the_same_recording_in_a_chat_is_a_hit(asr: Server) -> None:
    data = wav(1.5, seed=2)
    decodes = asr.decodes("audio")
    create(asr, data)
    assert asr.decodes("audio") - decodes == 1
    sound = {"data": base64.b64encode(data).decode(), "format": "wav"}
    answer = asr.openai().chat.completions.create(
        model="tiny-asr",
        max_tokens=MOST,
        messages=[
            {"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]},  # type: ignore[list-item, misc]
        ],
    )
    assert answer.choices[0].message.content is not None
    assert asr.decodes("audio") - decodes == 1


def test_the_pieces_of_a_long_recording_are_hits_the_second_time(asr: Server) -> None:
    data = wav(8.0, seed=3)
    decodes = asr.decodes("audio")
    first = create(asr, data)
    events = list(create(asr, data, stream=True))
    assert asr.decodes("audio") - decodes == 1
    assert events[-1].text == first.text
    assert "".join(event.delta for event in events[:-1]).strip() == first.text
    assert len(events) <= 4  # one per piece, since the class takes each answer apart as a whole


@pytest.mark.parametrize(
    ("form", "parameter", "says"),
    [
        ({"response_format": "srt"}, "response_format", "needs times"),
        ({"response_format": "verbose_json"}, "response_format", "needs times"),
        ({"language": "tlh"}, "language", "does not know the language 'tlh'"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(
    asr: Server, form: dict[str, str], parameter: str, says: str
) -> None:
    response = post(asr, wav(0.5, seed=4), **form)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == parameter
    assert says in response.json()["error"]["message"]


def test_it_does_not_translate(asr: Server) -> None:
    response = post(asr, wav(0.5, seed=4), "translations")
    assert response.status_code == 400
    assert "does not translate" in response.json()["error"]["message"]
