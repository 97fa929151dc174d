"""Whisper without a chat template: prompts by its own tokens, sound for the encoder alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from lazydecode.cache import MultiModalProcessorOnlyCache
from lazydecode.config import Settings
from lazydecode.errors import InvalidRequestError, ValidationError
from lazydecode.inputs import PlaceholderRange
from lazydecode.media.audio import AudioMediaIO, resample
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.speech import SpeechRequest
from lazydecode.processing.inputs import ProcessorInputs
from tests.builders import make_wav


@pytest.fixture(scope="module")
def whisper(tiny_model: Callable[..., Path]) -> ModelFrontend:
    return load_model_frontend(str(tiny_model("whisper", weights=False)), Settings())


def ids_of(frontend: ModelFrontend, *tokens: str) -> list[int]:
    return [frontend.prompt_tokenizer.token_id(token) or -1 for token in tokens]


def test_it_takes_one_recording_and_no_chat(whisper: ModelFrontend) -> None:
    assert (whisper.modalities, whisper.max_items) == (("audio",), {"audio": 1})
    assert whisper.random() == {}
    with pytest.raises(InvalidRequestError, match="no chat template; use /v1/audio"):
        whisper.render_chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("asked", "found", "tokens"),
    [
        (
            SpeechRequest(language="de"),
            None,
            ("<|startoftranscript|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"),
        ),
        (
            SpeechRequest(language="French", timestamps=True),
            None,
            ("<|startoftranscript|>", "<|fr|>", "<|transcribe|>"),
        ),
        (
            SpeechRequest("translate"),
            "ja",
            ("<|startoftranscript|>", "<|ja|>", "<|translate|>", "<|notimestamps|>"),
        ),
    ],
)
def test_the_prompt_names_language_and_task(
    whisper: ModelFrontend, asked: SpeechRequest, found: str | None, tokens: tuple[str, ...]
) -> None:
    assert whisper.speech is not None
    assert whisper.speech.prompt(asked, found) == ids_of(whisper, *tokens)


def test_words_come_before_and_what_they_spell_is_text(whisper: ModelFrontend) -> None:
    assert whisper.speech is not None
    asked = SpeechRequest(language="en", prompt="<|de|> and <|1.00|> " + "word " * 500)
    prompt = whisper.speech.prompt(asked, None)
    assert isinstance(prompt, list)
    start = ids_of(whisper, "<|startoftranscript|>")[0]
    before = prompt[: prompt.index(start)]
    assert before[0] == ids_of(whisper, "<|startofprev|>")[0]
    assert len(before) == 448 // 2  # the last words only
    short = whisper.speech.prompt(SpeechRequest(language="en", prompt="<|de|> <|1.00|>"), None)
    assert isinstance(short, list)
    words = short[1 : short.index(start)]
    assert whisper.decode(words, skip_special_tokens=False) == " <|de|> <|1.00|>"
    assert not set(words) & set(ids_of(whisper, "<|de|>", "<|1.00|>"))


def test_the_language_is_asked_for_only_if_nobody_said_it(whisper: ModelFrontend) -> None:
    assert whisper.speech is not None
    assert whisper.speech.language_probe(SpeechRequest(language="en")) is None
    probe = whisper.speech.language_probe(SpeechRequest())
    assert probe is not None
    assert probe.token_ids == ids_of(whisper, "<|startoftranscript|>")
    codes = ("en", "de", "fr", "ja")
    tokens = ids_of(whisper, *(f"<|{code}|>" for code in codes))
    assert probe.languages == dict(zip(tokens, codes, strict=True))
    assert whisper.speech.language_name("de") == "german"


def test_an_unknown_language_names_those_it_knows(whisper: ModelFrontend) -> None:
    assert whisper.speech is not None
    with pytest.raises(ValidationError, match="'klingon'; it knows de, en, fr, ja") as caught:
        whisper.speech.check(SpeechRequest(language="klingon"))
    assert caught.value.parameter == "language"


def test_a_model_for_english_alone_has_a_short_prompt(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "english"
    shutil.copytree(tiny_model("whisper", weights=False), folder)
    path = folder / "generation_config.json"
    settings = {**json.loads(path.read_text()), "is_multilingual": False}
    path.write_text(json.dumps(settings))
    english = load_model_frontend(str(folder), Settings())
    assert english.speech is not None
    assert english.speech.language_probe(SpeechRequest()) is None
    expected = ids_of(english, "<|startoftranscript|>", "<|notimestamps|>")
    assert english.speech.prompt(SpeechRequest(language="en"), None) == expected
    with pytest.raises(InvalidRequestError, match="does not translate"):
        english.speech.check(SpeechRequest("translate"))
    with pytest.raises(ValidationError, match="it knows en"):
        english.speech.check(SpeechRequest(language="de"))


def test_a_hit_decodes_nothing_and_gives_what_a_miss_gave(whisper: ModelFrontend) -> None:
    processor = whisper.encoder_processor
    assert processor is not None
    data = make_wav(rate=8000, seconds=1.5)
    cache = MultiModalProcessorOnlyCache(capacity_bytes=1 << 24)
    given = []
    for _ in range(2):
        ref = AudioMediaIO().load_bytes_ref(data)
        items = processor.info.parse_mm_data({"audio": [ref]})
        made = processor.apply(ProcessorInputs([5, 6], items, cache=cache))
        assert made["prompt_token_ids"] == [5, 6]
        assert made["mm_placeholders"] == {"audio": [PlaceholderRange(0, 0)]}
        given.append((made["mm_hashes"], made["mm_kwargs"]["audio"][0], ref.is_decoded))
    (hashes, first, decoded), (hashes_again, second, decoded_again) = given
    assert (hashes, decoded, decoded_again) == (hashes_again, True, False)
    assert first is not None
    assert second is not None
    features = first["input_features"].data
    assert torch.equal(features, second["input_features"].data)
    samples, rate = AudioMediaIO().load_bytes(data)
    assert rate == 8000
    theirs = AutoProcessor.from_pretrained(whisper.model_id)(
        resample(samples, rate, target_rate=16000), sampling_rate=16000, return_tensors="np"
    )
    np.testing.assert_array_equal(features.numpy(), theirs["input_features"][0])
