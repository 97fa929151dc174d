"""What a user of OpenAI's client sees."""

from __future__ import annotations

import base64
import uuid

import openai
import pytest

from tests.builders import make_jpeg, make_png, make_wav
from tests.builders_video import make_mp4
from tests.origin import Origin
from tests.server.cases import as_data_url
from tests.server.harness import Server, data_url, image, request, text, video


def unique_jpeg() -> bytes:
    """A picture that no cache holds: what follows the end of a JPEG is part of its identity."""
    return make_jpeg() + uuid.uuid4().bytes


def test_an_image_by_url_is_answered_and_decoded_once(
    chat_server: Server, shared_origin: Origin
) -> None:
    url = shared_origin.serve("/photo.jpg", unique_jpeg())
    client = chat_server.openai()
    before = chat_server.decodes()
    answers = [
        client.chat.completions.create(
            model="tiny",
            messages=request(text("What?"), image(url))["messages"],
            max_tokens=5,
            temperature=0,
        )
        for _ in range(2)
    ]
    assert chat_server.decodes() == before + 1
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].choices[0].finish_reason == "length"
    usage = answers[0].usage
    assert usage is not None
    assert usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + 5


def test_a_video_by_data_url_is_answered(chat_server: Server) -> None:
    answer = chat_server.openai().chat.completions.create(
        model="tiny",
        messages=request(text("What?"), video(data_url(make_mp4(frames=8), "video/mp4")))[
            "messages"
        ],
        max_tokens=3,
    )
    assert answer.choices[0].message.content is not None


def test_input_audio_is_answered(audio_server: Server) -> None:
    audio = {"data": base64.b64encode(make_wav()).decode(), "format": "wav"}
    client = audio_server.openai()
    before = audio_server.decodes("audio")
    for _ in range(2):
        answer = client.chat.completions.create(
            model="tiny-audio",
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": audio}, text("What?")],
                }
            ],
            max_tokens=3,
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
    assert audio_server.decodes("audio") == before + 1


def test_a_sound_of_one_sample_is_refused_with_a_reason(audio_server: Server) -> None:
    part = {"type": "audio_url", "audio_url": {"url": as_data_url("k2_one_sample.wav")}}
    with pytest.raises(openai.BadRequestError, match="too short"):
        audio_server.openai().chat.completions.create(
            model="tiny-audio", messages=request(part, text())["messages"]
        )


def test_a_stream_joins_to_the_whole_answer(chat_server: Server) -> None:
    client = chat_server.openai()
    messages = request(image(data_url(make_png(), "image/png")), text("What?"))["messages"]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage


def test_log_probabilities_are_of_the_tokens_of_the_answer(chat_server: Server) -> None:
    answer = chat_server.openai().chat.completions.create(
        model="tiny",
        messages=request(text("Hello"))["messages"],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert token.logprob <= 0
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        # Greedy: the chosen token is the most likely one.
        assert token.token == token.top_logprobs[0].token


def test_a_stop_string_ends_the_answer_before_it(chat_server: Server) -> None:
    client = chat_server.openai()
    messages = request(text("Hello"))["messages"]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0
    )
    content = whole.choices[0].message.content
    assert content is not None
    stop = content[3:5]
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, stop=stop, stream=stream
        )
        if stream:
            chunks = list(answer)
            found = "".join(c.choices[0].delta.content or "" for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            found, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert found == content[: content.index(stop)]
        assert reason == "stop"


def test_a_truncated_image_is_a_422_that_names_its_index(chat_server: Server) -> None:
    good, cut = unique_jpeg(), make_jpeg(size=(200, 200))[:700]
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        chat_server.openai().chat.completions.create(
            model="tiny",
            messages=request(image(data_url(good)), image(data_url(cut)), text())["messages"],
        )
    error = caught.value.body
    assert isinstance(error, dict)
    assert error["index"] == 1
    assert error["modality"] == "image"
    assert "index 1" in error["message"]


def test_the_work_on_the_good_item_beside_a_bad_one_is_kept(chat_server: Server) -> None:
    good, cut = unique_jpeg(), make_jpeg(size=(200, 200))[:701]
    mixed = request(image(data_url(good)), image(data_url(cut)), text())
    assert chat_server.post("/v1/chat/completions", mixed).status_code == 422
    before = chat_server.decodes()
    alone = request(image(data_url(good)), text(), max_tokens=1)
    assert chat_server.post("/v1/chat/completions", alone).status_code == 200
    assert chat_server.decodes() == before


def test_a_blocked_url_is_a_400(chat_server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat_server.openai().chat.completions.create(
            model="tiny",
            messages=request(image("http://169.254.169.254/latest/meta-data"), text())["messages"],
        )
    error = caught.value.body
    assert isinstance(error, dict)
    assert (error["modality"], error["index"]) == ("image", 0)


def test_an_unknown_model_is_a_404(chat_server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        chat_server.openai().chat.completions.create(
            model="gpt-9", messages=[{"role": "user", "content": "x"}]
        )


def test_the_models_are_listed(chat_server: Server) -> None:
    client = chat_server.openai()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
