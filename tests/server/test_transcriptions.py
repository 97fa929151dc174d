"""Transcriptions and translations through HTTP, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from numpy.typing import NDArray

from lazydecode.media.audio import AudioMediaIO, resample
from lazydecode.media.silence import CutRule, find_cuts
from tests.builders import make_wav
from tests.server.harness import Server

RATE = 8000
CONTEXT = 32
"""Tokens of prompt and answer per piece: random weights would go on to the end."""
RULE = CutRule(4.0, 2.0)


@pytest.fixture(scope="module")
def whisper(tiny_model: Callable[..., Path]) -> Iterator[Server]:
    with Server(
        tiny_model("whisper"),
        served_model_name=("tiny-whisper",),
        max_model_len=CONTEXT,
        transcription_chunk=RULE.longest_s,
        transcription_cut_search=RULE.search_s,
        max_transcription_duration=30.0,
        max_audio_clip_filesize_mb=1.0,
        dtype="float32",
    ) as server:
        yield server


def speech(seconds: float, seed: int = 0) -> NDArray[np.float64]:
    """Noise that comes and goes, with pauses at 3.6 s and 7 s. Shape (samples, 1)."""
    samples = np.random.default_rng(seed).uniform(-0.5, 0.5, (int(seconds * RATE), 1))
    for pause in (3.6, 7.0):
        samples[int(pause * RATE) : int((pause + 0.2) * RATE)] = 0
    return samples


def wav(seconds: float, seed: int = 0) -> bytes:
    return make_wav(speech(seconds, seed), rate=RATE)


def create(server: Server, data: bytes, **options: Any) -> Any:
    client = server.openai()
    return client.audio.transcriptions.create(model="tiny-whisper", file=("a.wav", data), **options)


def post(server: Server, data: bytes | None, path: str = "transcriptions", **form: Any) -> Any:
    files = None if data is None else {"file": ("a.wav", data)}
    if files is None:
        # httpx sends a form without files in another encoding.
        files = {"model": (None, "tiny-whisper")}
    return httpx.post(f"{server.url}/v1/audio/{path}", files=files, data=form, timeout=180)


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


# -- what is answered


def expected_ids(
    server: Server, pieces: list[NDArray[np.float32]], prompt: list[int], *, times: bool = False
) -> list[list[int]]:
    """What Transformers' own greedy generation writes to each piece."""
    folder = server.context.frontend.model_id
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    extract = transformers.AutoProcessor.from_pretrained(folder).feature_extractor
    config = model.generation_config
    processors = transformers.LogitsProcessorList()
    if times:
        rule = transformers.generation.logits_process.WhisperTimeStampLogitsProcessor
        processors.append(rule(config, begin_index=len(prompt)))
    found = []
    for samples in pieces:
        sound = resample(samples, RATE, target_rate=16000)
        features = extract(sound, sampling_rate=16000, return_tensors="pt")["input_features"]
        ids = transformers.GenerationMixin.generate(
            model,
            input_features=features,
            decoder_input_ids=torch.tensor([prompt]),
            generation_config=transformers.GenerationConfig(max_new_tokens=CONTEXT - len(prompt)),
            logits_processor=processors,
        )[0].tolist()[len(prompt) :]
        found.append([i for i in ids if i != config.eos_token_id])
    return found


def prompt_ids(server: Server, *tokens: str) -> list[int]:
    known = server.context.frontend.prompt_tokenizer.token_id
    return [known(token) or -1 for token in tokens]


def cut(data: bytes) -> list[NDArray[np.float32]]:
    samples, rate = AudioMediaIO().load_bytes(data)
    assert rate == RATE
    return np.split(samples, find_cuts(samples, rate, RULE))


START = "<|startoftranscript|>"


@pytest.mark.slow
def test_short_and_long_recordings_give_what_the_model_writes(whisper: Server) -> None:
    prompt = prompt_ids(whisper, START, "<|de|>", "<|transcribe|>", "<|notimestamps|>")
    for seconds, count in ((1.5, 1), (10.0, 3)):
        data = wav(seconds)
        pieces = cut(data)
        assert len(pieces) == count
        texts = [
            whisper.context.frontend.decode(ids) for ids in expected_ids(whisper, pieces, prompt)
        ]
        answer = create(whisper, data, language="de")
        plain = re.sub(r"\s+", "", answer.text)
        assert plain == re.sub(r"\s+", "", "".join(texts))
        assert answer.usage.type == "duration"
        assert answer.usage.seconds == np.ceil(seconds)


@pytest.mark.slow
def test_times_are_counted_from_the_beginning_of_the_recording(whisper: Server) -> None:
    data = wav(10.0)
    pieces = cut(data)
    prompt = prompt_ids(whisper, START, "<|fr|>", "<|transcribe|>")
    expected = expected_ids(whisper, pieces, prompt, times=True)
    answer = create(whisper, data, language="french", response_format="verbose_json")
    assert (answer.task, answer.language, answer.duration) == ("transcribe", "french", 10.0)
    first = (prompt_ids(whisper, "<|notimestamps|>")[0]) + 1
    words = [[i for i in ids if i < first] for ids in expected]
    assert [i for s in answer.segments for i in s.tokens] == [i for ids in words for i in ids]
    edges = [0.0, *(np.cumsum([len(piece) for piece in pieces]) / RATE)]
    for segment in answer.segments:
        inside = next(n for n in range(3) if edges[n] - 0.01 <= segment.start < edges[n + 1] + 0.01)
        assert segment.start <= segment.end <= edges[inside + 1] + 0.01
        assert segment.avg_logprob < 0
    assert answer.segments[0].start == round((expected[0][0] - first) * 0.02, 2)
    starts = [segment.start for segment in answer.segments]
    assert starts == sorted(starts)


def test_subtitles_have_the_times_of_the_segments(whisper: Server) -> None:
    data = wav(10.0)
    options = {"language": "en", "response_format": "verbose_json"}
    segments = create(whisper, data, **options).segments
    srt = create(whisper, data, **{**options, "response_format": "srt"})
    vtt = create(whisper, data, **{**options, "response_format": "vtt"})
    blocks = srt.strip().split("\n\n")
    assert [block.split("\n")[0] for block in blocks] == [
        str(number + 1) for number in range(len(segments))
    ]
    minutes, seconds = divmod(segments[-1].start, 60)
    assert f"00:{int(minutes):02d}:{seconds:06.3f}".replace(".", ",") in blocks[-1]
    assert vtt.startswith("WEBVTT\n\n00:00:")
    assert vtt.count(" --> ") == srt.count(" --> ") == len(segments)


def test_text_is_the_transcript_alone(whisper: Server) -> None:
    data = wav(1.5, seed=2)
    text = create(whisper, data, language="en", response_format="text")
    assert text == create(whisper, data, language="en").text + "\n"


def test_translation_has_its_own_task(whisper: Server) -> None:
    data = wav(1.5)
    client = whisper.openai()
    with pytest.warns(DeprecationWarning):  # OpenAI's own service leaves translations behind
        answer = client.audio.translations.create(
            model="tiny-whisper", file=("a.wav", data), response_format="verbose_json"
        )
    assert (answer.task, answer.duration) == ("translate", 1.5)
    assert answer.language in ("english", "german", "french", "japanese")
    refused = error(post(whisper, data, "translations", language="de"), 400)
    assert (refused["param"], refused["message"]) == (
        "language",
        "language is not supported by this server",
    )


def test_the_stream_brings_the_same_words_in_order(whisper: Server) -> None:
    data = wav(10.0)
    whole = create(whisper, data, language="de").text
    events = list(create(whisper, data, language="de", stream=True))
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == whole
    assert "".join(event.delta for event in events[:-1]).strip() == whole
    assert events[-1].usage.seconds == 10


def test_a_language_that_nobody_names_is_heard(whisper: Server) -> None:
    found = create(whisper, wav(1.5, seed=4), response_format="verbose_json").language
    assert found in ("english", "german", "french", "japanese")


def test_what_was_said_before_changes_the_answer(whisper: Server) -> None:
    data = wav(1.5)
    plain = create(whisper, data, language="en")
    primed = create(whisper, data, language="en", prompt="images video audio")
    assert plain.text != primed.text


# -- pieces and the cache


def test_the_second_time_every_piece_is_a_hit_and_nothing_is_decoded(whisper: Server) -> None:
    data = wav(10.0, seed=5)
    asked = {"x-lazydecode-timeline": "1"}
    decodes = whisper.decodes("audio")
    first = create(whisper, data, extra_headers=asked)
    assert whisper.decodes("audio") - decodes == 1
    again = create(whisper, data, extra_headers=asked)
    assert whisper.decodes("audio") - decodes == 1
    assert again.text == first.text
    assert [item["hit"] for item in first.timeline["items"]] == [False] * 3
    assert [item["hit"] for item in again.timeline["items"]] == [True] * 3
    assert all("cut_ms" in item for item in first.timeline["items"])
    assert not any("cut_ms" in item for item in again.timeline["items"])
    held = whisper.call(
        lambda: (
            whisper.context.renderer.recordings.num_open,
            whisper.context.renderer.decoded_budget.held_bytes,
            whisper.context.renderer.encoded_budget.held_bytes,
        )
    )
    assert held == (0, 0, 0)


def test_a_short_recording_is_decoded_once_and_not_for_its_length(whisper: Server) -> None:
    data = wav(2.0, seed=6)
    decodes = whisper.decodes("audio")
    for _ in range(2):
        create(whisper, data)
        assert whisper.decodes("audio") - decodes == 1


def test_another_salt_is_another_tenant(whisper: Server) -> None:
    data = wav(2.0, seed=7)
    decodes = whisper.decodes("audio")
    for salt in ("a", "b", "a"):
        create(whisper, data, language="en", extra_body={"cache_salt": salt})
    assert whisper.decodes("audio") - decodes == 2


def test_progress_is_logged_and_counted(whisper: Server, caplog: pytest.LogCaptureFixture) -> None:
    before = whisper.metric("transcribed_seconds_total")
    with caplog.at_level(logging.INFO, "lazydecode.server.transcription"):
        create(whisper, wav(10.0), language="en")
    assert whisper.metric("transcribed_seconds_total") - before == pytest.approx(10.0)
    assert {line.split(": ")[1][:12] for line in caplog.messages if "piece" in line} == {
        f"piece {number} of 3" for number in (1, 2, 3)
    }


def test_a_client_that_leaves_ends_its_pieces(whisper: Server) -> None:
    form = {"stream": "true", "language": "en"}
    with httpx.stream(
        "POST",
        f"{whisper.url}/v1/audio/transcriptions",
        files={"file": ("a.wav", wav(25.0, seed=8))},
        data=form,
        timeout=180,
    ) as response:
        next(response.iter_bytes())
    whisper.wait_idle()
    assert whisper.call(lambda: whisper.context.renderer.recordings.num_open) == 0
    assert whisper.call(lambda: whisper.context.renderer.decoded_budget.held_bytes) == 0
    assert create(whisper, wav(1.5), language="en").text is not None


@pytest.mark.stress
async def test_a_storm_leaves_nothing(whisper: Server) -> None:
    """Known, new and damaged recordings at once; a fifth of the clients leave at some moment."""
    rng = random.Random(1)
    good = [wav(seconds, seed=40 + n) for n, seconds in enumerate((1.0, 4.5, 9.0, 2.0))]
    outcomes: Counter[int | str] = Counter()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        data = good[0][:30] if number % 9 == 0 else rng.choice(good)
        form = {"language": "en", "stream": rng.choice(["true", "false"])}
        patience = rng.random() * 0.4 if rng.random() < 0.2 else 150
        try:
            async with asyncio.timeout(patience):
                response = await client.post(
                    "/v1/audio/transcriptions", files={"file": ("a.wav", data)}, data=form
                )
            outcomes[response.status_code] += 1
        except TimeoutError:
            outcomes["left"] += 1

    async with httpx.AsyncClient(base_url=whisper.url, timeout=180) as client:
        for batch in range(4):
            await asyncio.gather(*(ask(client, 15 * batch + n) for n in range(15)))
    await asyncio.to_thread(whisper.wait_idle)
    assert outcomes.total() == 60
    assert set(outcomes) == {200, 422, "left"}, outcomes
    renderer = whisper.context.renderer
    held = await asyncio.to_thread(
        whisper.call,
        lambda: (
            renderer.recordings.num_open,
            len(renderer._flights),
            renderer.decoded_budget.held_bytes,
            renderer.encoded_budget.held_bytes,
            renderer.decoded_budget.num_waiting,
        ),
    )
    assert held == (0, 0, 0, 0, 0)


# -- what is refused


@pytest.mark.parametrize(
    ("form", "parameter", "says"),
    [
        ({"response_format": "xml"}, "response_format", "json, text, verbose_json, srt, vtt"),
        ({"temperature": "warm"}, "temperature", "number from 0 to 2"),
        ({"temperature": "3"}, "temperature", "number from 0 to 2"),
        ({"temperature": "\u0661"}, "temperature", "number from 0 to 2"),
        ({"temperature": "0_1"}, "temperature", "number from 0 to 2"),
        ({"temperature": "1e999"}, "temperature", "number from 0 to 2"),
        ({"language": "klingon"}, "language", "'klingon'; it knows de, en, fr, ja"),
        ({"stream": "perhaps"}, "stream", "true or false"),
        ({"stream": "true", "response_format": "srt"}, "stream", "json or text"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "not supported"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose_json"),
        ({"include[]": "logprobs"}, "include", "not supported"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy", "auto"),
        ({"max_completion_tokens": "-1"}, "max_completion_tokens", "above 0"),
        ({"max_completion_tokens": "10000000000"}, "max_completion_tokens", "above 0"),
        ({"max_completion_tokens": "00000000000"}, "max_completion_tokens", "above 0"),
        ({"max_completion_tokens": "\u0661"}, "max_completion_tokens", "above 0"),
        ({"beam_size": "5"}, "beam_size", "beam_size is not supported by this server"),
        ({"cache_salt": ""}, "cache_salt", "must not be empty"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    whisper: Server, form: dict[str, str], parameter: str, says: str
) -> None:
    refused = error(post(whisper, wav(0.5), **form), 400)
    assert refused["param"] == parameter
    assert says in refused["message"]


def test_another_model_is_not_found(whisper: Server) -> None:
    assert error(post(whisper, wav(0.5), model="gpt-4o-transcribe"), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (None, 400, "no field 'file'"),
        (b"", 400, "the file is empty"),
        (b"these are words and no sound" * 20, 422, "no format that can be read"),
        (wav(2.0)[:44], 422, "no samples"),
        (make_wav(np.zeros((30 * RATE + 8, 1)), rate=RATE), 422, "exceeds the limit of 30 s"),
        (b"\0" * (1 << 20) + b"\0", 400, "Maximum file size exceeded"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    whisper: Server, data: bytes | None, status: int, says: str
) -> None:
    response = post(whisper, data)
    refused = error(response, status)
    assert (refused["modality"], refused["index"]) == ("audio", 0)
    assert says in refused["message"]


def test_a_recording_that_breaks_in_the_middle_fails_as_a_whole(whisper: Server) -> None:
    """A FLAC states its length; what follows the damage cannot be decoded."""
    whole = make_wav(speech(10.0), rate=RATE, format="FLAC")
    broken = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
    refused = error(post(whisper, broken), 422)
    assert (refused["modality"], refused["index"]) == ("audio", 0)
    assert refused["message"].startswith("Failed to decode audio media at index 0: ")
    with pytest.raises(openai.UnprocessableEntityError):
        list(create(whisper, broken, stream=True))


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (b'{"file": "x"}', "application/json", "multipart/form-data"),
        (b"", "multipart/form-data", "names no boundary"),
        (b"--x\r\nfoo", "multipart/form-data; boundary=x", "cut off"),
        (b"nothing of the kind", "multipart/form-data; boundary=x", "malformed"),
        (
            b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--\r\n",
            "multipart/form-data; boundary=x",
            "has no name",
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n1\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n2\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
            "send one file",
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="prompt"; filename="a"\r\n\r\n1\r\n'
            b"--x--\r\n",
            "multipart/form-data; boundary=x",
            "not supported by this server as a file",
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"\r\n'
            b"Content-Transfer-Encoding: base64\r\n\r\nAAAA\r\n--x--\r\n",
            "multipart/form-data; boundary=x",
            "without transfer encoding",
        ),
    ],
)
def test_a_form_that_is_none_is_refused(
    whisper: Server, body: bytes, content_type: str, says: str
) -> None:
    response = whisper.post(
        "/v1/audio/transcriptions", body, headers={"content-type": content_type}
    )
    assert says in error(response, 400)["message"]


def test_a_chat_with_a_model_that_has_none_says_where_to_go(whisper: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    refused = error(whisper.post("/v1/chat/completions", body), 400)
    assert "use /v1/audio/transcriptions" in refused["message"]


def test_a_model_that_does_not_transcribe_says_so(text_render_server: Server) -> None:
    assert "renders only" in error(post(text_render_server, wav(0.5)), 400)["message"]
