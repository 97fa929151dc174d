"""How models with a chat template are asked to write down speech."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lazydecode.config import Settings
from lazydecode.errors import InvalidRequestError, ValidationError
from lazydecode.models.frontend import ModelFrontend
from lazydecode.models.loading import load_model_frontend
from lazydecode.models.speech import SpeechModel, SpeechRequest


@pytest.fixture(scope="module")
def load(tiny_model: Callable[..., Path]) -> Callable[[str], ModelFrontend]:
    return lambda family: load_model_frontend(str(tiny_model(family, weights=False)), Settings())


def speech_of(frontend: ModelFrontend) -> SpeechModel:
    assert frontend.speech is not None
    assert frontend.speech.language_probe(SpeechRequest()) is None
    assert (frontend.speech.timestamps, frontend.speech.window_s) == (None, None)
    return frontend.speech


def test_the_class_writes_the_request_and_takes_the_answer_apart(
    load: Callable[[str], ModelFrontend],
) -> None:
    frontend = load("qwen3_asr")
    speech = speech_of(frontend)
    asked = SpeechRequest(language="german", prompt="words with <|audio_pad|>")
    prompt = speech.prompt(asked, None)
    assert isinstance(prompt, str)
    # One place for the sound; the other is text.
    assert prompt.count("<|audio_pad|>") == 1
    assert prompt.endswith("language German<asr_text>")
    assert "words with <|audio_pad|>" in frontend.prompt_tokenizer.marker.unseal(prompt)
    assert not speech.answers_plainly
    assert speech.read("language French<asr_text>Bonjour.") == ("fr", "Bonjour.")
    assert speech.read("Bonjour.") == (None, "Bonjour.")
    assert speech.language_name("fr") == "french"
    with pytest.raises(ValidationError, match="does not know the language 'tlh'"):
        speech.check(SpeechRequest(language="tlh"))
    with pytest.raises(InvalidRequestError, match="does not translate"):
        speech.check(SpeechRequest("translate"))


def test_a_class_without_languages_finds_them_out_itself(
    load: Callable[[str], ModelFrontend],
) -> None:
    speech = speech_of(load("glmasr"))
    prompt = speech.prompt(SpeechRequest(), None)
    assert isinstance(prompt, str)
    assert "<|begin_of_audio|><|pad|><|end_of_audio|>" in prompt
    assert speech.answers_plainly
    with pytest.raises(ValidationError, match="leave language out"):
        speech.check(SpeechRequest(language="en"))


def test_a_model_is_told_in_the_words_that_it_was_taught(
    load: Callable[[str], ModelFrontend],
) -> None:
    pytest.importorskip("torchaudio")
    speech = speech_of(load("granite_speech"))
    written = speech.prompt(SpeechRequest(), None)
    translated = speech.prompt(SpeechRequest("translate"), None)
    assert isinstance(written, str) and isinstance(translated, str)
    assert "can you transcribe the speech into a written format?" in written
    assert "can you translate the speech into English?" in translated
    assert written.count("<|audio|>") == 1


def test_a_model_that_hears_but_was_not_taught_to_write_it_down_is_not_asked(
    load: Callable[[str], ModelFrontend],
) -> None:
    frontend = load("qwen2_audio")
    assert frontend.modalities == ("audio",)
    assert frontend.speech is None
