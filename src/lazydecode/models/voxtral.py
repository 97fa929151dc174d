"""Voxtral: Mistral's own library writes the prompt, with a run of tokens per started 30 seconds.

There is no template and no text to put items into: the library makes token ids of a
conversation at once. It is asked for them with one token in the place of each recording's run,
and the run is put in as in any prompt that comes as token ids. What a conversation spells is
text for this library, whatever it spells.
"""

from __future__ import annotations

import base64
import copy
import importlib.metadata
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from lazydecode.errors import InvalidRequestError, LazyDecodeError, ValidationError
from lazydecode.media.faults import describe
from lazydecode.models.expansion import ItemText
from lazydecode.models.header_only import Way
from lazydecode.models.processor_call import Media, ProcessorCall, ProcessorOutput
from lazydecode.models.proof import TextRule
from lazydecode.models.proving import Prover, Trial
from lazydecode.models.speech import LanguageProbe, SpeechRequest
from lazydecode.models.template import Message, RenderedPrompt
from lazydecode.models.torch_threads import one_torch_thread

PROCESSOR_CLASS: Final = "VoxtralProcessor"
_NO_SOUND: Final = "AAAA"
"""In the place of a recording, for a library that is never made to read it."""
_MAX_SHOWN: Final = 40


class VoxtralChat:
    """Mistral's library as the way to write prompts. Threads share it.

    Args:
        processor: The model's processor.
    """

    def __init__(self, processor: Any) -> None:
        self._library = _without_recordings(processor.tokenizer.tokenizer)
        self._audio_token = str(processor.audio_token)
        version = importlib.metadata.version("mistral-common")
        kind = type(self._library.instruct_tokenizer).__name__
        self.template = f"mistral-common {version} {kind}"
        """What the prompts depend on."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedPrompt:
        """Return the prompt of a conversation as token ids; an answer is always asked for.

        Raises:
            InvalidRequestError: If the library refuses the conversation.
        """
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        try:
            request = ChatCompletionRequest.from_openai(
                messages=[_as_library(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                continue_final_message=continue_final_message,
            )
            ids = list(self._library.encode_chat_completion(request).tokens)
        except (MistralCommonException, ValueError, TypeError, KeyError, AssertionError) as exc:
            raise InvalidRequestError(
                f"the model's tokenizer refuses the messages: {describe(exc)}"
            ) from exc
        text = self._library.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)
        return RenderedPrompt(text, ids)

    def render_items(self, modalities: Sequence[str]) -> str:
        """Return what stands for recordings, without any turn around them."""
        return self._audio_token * len(modalities)

    def transcription(self, language: str | None) -> list[int]:
        """Return the prompt that asks for what one recording says.

        Raises:
            ValidationError: If the language is none.
        """
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.transcription.request import TranscriptionRequest

        try:
            request = TranscriptionRequest.model_validate(
                {"audio": _NO_SOUND, "language": language and language.strip().lower()}
            )
        except ValueError as exc:
            assert language is not None
            raise ValidationError(
                f"the model does not know the language {language[:_MAX_SHOWN]!r}; it takes the "
                "two letters of ISO 639-1",
                parameter="language",
                value=language[:_MAX_SHOWN],
            ) from exc
        try:
            return list(self._library.encode_transcription(request).tokens)
        except MistralCommonException as exc:
            raise InvalidRequestError(f"the model does not transcribe: {describe(exc)}") from exc


class VoxtralCall(ProcessorCall):
    """Makes of recordings what the class makes of them when it has read them itself."""

    def __call__(
        self,
        text: str,
        media: Media,
        options: Mapping[str, Any] | None = None,
        *,
        substitutes: Mapping[str, Any] | None = None,
    ) -> ProcessorOutput:
        """Return the spectrograms of recordings, and the ids that stand for each.

        Args:
            text: Passed on; nothing of it is read.
            media: Recordings at the processor's own rate.
            options: Options of this call, over those of every call.
            substitutes: Not None: only the ids are wanted, which follow from the lengths.

        Raises:
            Exception: Whatever the class or the library raises.
        """
        merged = self.processor._merge_kwargs(**{**self.options, **(options or {})})
        arguments = dict(merged["audio_kwargs"])
        encoder = self.processor.tokenizer.tokenizer.instruct_tokenizer.audio_encoder
        token, token_id = str(self.processor.audio_token), int(self.processor.audio_token_id)
        ids: list[int] = []
        offsets: list[dict[str, Any]] = []
        tensors: dict[str, Any] = {}
        padded: list[Any] = []
        for samples in media.audios:
            if substitutes is None:
                encoded = encoder.encode_audio(_sound(samples, self.sampling_rate))
                count = encoded.tokens.count(token_id)
                padded.append(encoded.audio.audio_array)
            else:
                count = _num_tokens(len(samples), encoder)
            ids += [token_id] * count
            offsets.append({"type": "audio", "text": token, "replacement": token * count})
        if padded:
            rows = arguments.pop("max_source_positions")
            with self.lock, one_torch_thread():
                tensors["input_features"] = self.processor._retrieve_input_features(
                    padded, rows, **arguments
                )
        return ProcessorOutput(ids, tensors, {}, offsets, text, False)

    def theirs(self, messages: Sequence[Message], items: Sequence[Any]) -> dict[str, Any]:
        """Return what the class makes of a conversation whose recordings it reads itself."""
        sounds = iter(items)
        with self.lock, one_torch_thread():
            output = self.processor.apply_chat_template(
                [
                    {**message, "content": [self._as_class(p, sounds) for p in message["content"]]}
                    for message in messages
                ]
            )
        return dict(output)

    def _as_class(self, part: Mapping[str, Any], sounds: Any) -> dict[str, Any]:
        if part["type"] != "audio":
            return dict(part)
        import soundfile

        buffer = io.BytesIO()
        soundfile.write(buffer, next(sounds), self.sampling_rate, format="WAV", subtype="FLOAT")
        return {"type": "audio", "base64": base64.b64encode(buffer.getvalue()).decode()}


class VoxtralProver(Prover):
    """Compares conversations with what the class makes of them by its own method."""

    def _trial(self, numbers: Mapping[str, Sequence[int]]) -> Trial | None:
        items = [self.probes.item("audio", n) for n in numbers["audio"]]
        texts = {"audio": [self._text("audio", n) for n in numbers["audio"]]}
        messages = _conversation(len(items))
        assert isinstance(self.call, VoxtralCall)
        theirs = self.call.theirs(messages, items)
        ids = [int(i) for i in theirs["input_ids"][0]]
        rendered = self.probes.template.render(messages)
        assert rendered.token_ids is not None
        try:
            ours = self.expander.expand_tokens(rendered.token_ids, texts).token_ids
        except LazyDecodeError as exc:
            return Trial(rendered.text, texts, ids, None, str(exc))
        alone = [self.probes.output("audio", n).tensors["input_features"] for n in numbers["audio"]]
        if not torch.equal(torch.cat(alone), theirs["input_features"]):
            return Trial(rendered.text, texts, ids, None, "the spectrograms differ")
        return Trial(rendered.text, texts, ids, ours)

    def _edit(self, trials: Sequence[Trial]) -> None:
        """None: prompts come as ids, around which nothing is put."""

    def _whole_failure(self, trial: Trial, headers: Mapping[str, Way]) -> str:
        return "there is no other way to write this model's prompts"

    def _text_rule(self, edit: Any) -> TextRule | None:
        """None: the library writes prompts without recordings too."""
        return None

    def _header_way(self, modality: str) -> Way:
        real: list[ItemText] = [self._text(modality, n) for n in (0, 1)]
        by_length = all(self._stands_in(modality, text, "meta") for text in real)
        return "meta" if by_length else "silence"


class VoxtralSpeech:
    """How Voxtral is asked for what a recording says; the answer is the transcript.

    Args:
        chat: The model's way to write prompts.
    """

    window_s: float | None = None
    timestamps = None
    answers_plainly = True

    def __init__(self, chat: VoxtralChat) -> None:
        self._chat = chat
        chat.transcription(None)

    def check(self, request: SpeechRequest) -> None:
        """Check the task, the language and the prompt."""
        if request.task != "transcribe":
            raise InvalidRequestError("the model transcribes; it does not translate")
        if request.prompt:
            raise ValidationError("the model takes no prompt", parameter="prompt")
        self._chat.transcription(request.language)

    def language_probe(self, request: SpeechRequest) -> LanguageProbe | None:
        """None: the model finds out the language on the way."""
        return None

    def prompt(self, request: SpeechRequest, language: str | None) -> str | list[int]:
        """Return token ids with one token for the recording."""
        return self._chat.transcription(request.language)

    def read(self, text: str) -> tuple[str | None, str]:
        """Return the answer: all of it is the transcript."""
        return None, text.strip()

    def language_name(self, code: str | None) -> str | None:
        """None: the model says no language."""
        return None


def _conversation(num_items: int) -> list[dict[str, Any]]:
    """Return turns with a recording each, and text on all sides of them."""
    turns: list[dict[str, Any]] = []
    for number in range(num_items):
        if number:
            answer = [{"type": "text", "text": f"It is [AUDIO] {number}.\n"}]
            turns.append({"role": "assistant", "content": answer})
        before = {"type": "text", "text": f"part {number}\n"}
        after = {"type": "text", "text": " What is it?"}
        turns.append({"role": "user", "content": [before, {"type": "audio"}, after]})
    return turns


def _as_library(message: Message) -> dict[str, Any]:
    """Return a message as the library takes it: recordings with something in them."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return {"type": "text", "text": str(part)}
    if part.get("type") != "audio":
        return dict(part)
    return {"type": "input_audio", "input_audio": {"data": _NO_SOUND, "format": "wav"}}


def _without_recordings(library: Any) -> Any:
    """Return a copy of the library's tokenizer that writes one token for a recording, unread."""
    bare = copy.copy(library)
    bare.instruct_tokenizer = copy.copy(library.instruct_tokenizer)
    bare.instruct_tokenizer.audio_encoder = _OneToken(library.instruct_tokenizer.audio_encoder)
    return bare


class _OneToken:
    """Stands in for the library's encoder of recordings; the rest of it is the real one's."""

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def __call__(self, chunk: Any) -> Any:
        from mistral_common.tokens.tokenizers.audio import AudioEncoding

        begin, audio = self._encoder.begin_audio_token, self._encoder.audio_token
        return AudioEncoding(tokens=[begin, audio], audio=None)


def _sound(samples: Any, rate: int | None) -> Any:
    from mistral_common.tokens.tokenizers.audio import Audio

    return Audio(np.asarray(samples, dtype=np.float32), int(rate or 16000), "wav")


def _num_tokens(num_samples: int, encoder: Any) -> int:
    """Return how many tokens stand for a recording; the proof compares it with the library."""
    config = encoder.audio_config
    if config.chunk_length_s:
        whole = math.ceil(num_samples / config.chunk_frames) * config.chunk_frames
    else:
        whole = max(num_samples, config.encoding_config.window_size)
    return int(config.num_audio_tokens(whole))
