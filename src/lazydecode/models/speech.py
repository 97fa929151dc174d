"""How models are asked to write down speech, each in its own form.

Three forms: Whisper's tokens (`models/whisper.py`), the transcription request that a processor's
class writes itself, and an instruction in a chat turn, for models that were taught one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from lazydecode.errors import InvalidRequestError, ValidationError
from lazydecode.media.faults import describe
from lazydecode.models.marks import TextMarker
from lazydecode.models.template import Chat

Task = Literal["transcribe", "translate"]
_MAX_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What a client wants of a recording."""

    task: Task = "transcribe"
    language: str | None = None
    """Language that is spoken, as the client names it; None: not known."""
    prompt: str = ""
    """Words to expect, or what was said before."""
    timestamps: bool = False
    """Whether the answer says when what was said."""


@dataclass(frozen=True, slots=True)
class LanguageProbe:
    """A prompt whose next token says which language is spoken."""

    token_ids: list[int]
    languages: Mapping[int, str]
    """Token id -> code of the language."""


@dataclass(frozen=True, slots=True)
class TimestampTokens:
    """Tokens that stand for times, counted from the beginning of a piece."""

    first: int
    """Id of the token of 0 s; those of later times follow it."""
    step_s: float
    max_initial: int | None
    """Largest step that the first time of a piece may have; None: any."""

    def seconds(self, token_id: int) -> float:
        """Return the time of one of these tokens."""
        return (token_id - self.first) * self.step_s


class SpeechModel(Protocol):
    """One model's way of writing down speech. Threads share it."""

    @property
    def window_s(self) -> float | None:
        """Longest recording that one prompt takes, in seconds; None: no window of its own."""
        ...

    @property
    def timestamps(self) -> TimestampTokens | None:
        """The model's tokens for times; None: it says no times."""
        ...

    @property
    def answers_plainly(self) -> bool:
        """Whether what the model writes is the transcript and nothing else."""
        ...

    def check(self, request: SpeechRequest) -> None:
        """Check that the model can do what is asked.

        Raises:
            ValidationError: If it cannot; `parameter` names the field.
        """
        ...

    def language_probe(self, request: SpeechRequest) -> LanguageProbe | None:
        """Return the prompt that finds out the language; None if the prompt needs none."""
        ...

    def prompt(self, request: SpeechRequest, language: str | None) -> str | list[int]:
        """Return the prompt for one piece of a recording.

        Args:
            request: What is asked.
            language: Code that the probe found out; None if there was no probe.
        """
        ...

    def read(self, text: str) -> tuple[str | None, str]:
        """Return (language or None, transcript) of what the model wrote."""
        ...

    def language_name(self, code: str | None) -> str | None:
        """Return a language's English name in lower case, as OpenAI writes it; None if unknown."""
        ...


def unsupported_language(language: str, known: list[str]) -> ValidationError:
    """Return the error for a language that the model was not taught."""
    return ValidationError(
        f"the model does not know the language {language[:_MAX_SHOWN]!r}; "
        f"it knows {', '.join(known)}",
        parameter="language",
        value=language[:_MAX_SHOWN],
    )


# -- the class's own request


class ProcessorSpeech:
    """A model whose processor writes the request itself (`apply_transcription_request`).

    Args:
        processor: The model's processor.
        marker: Keeps what the client's prompt spells from becoming control tokens.
    """

    window_s: float | None = None
    timestamps: TimestampTokens | None = None

    def __init__(self, processor: Any, marker: TextMarker) -> None:
        self._processor = processor
        self._marker = marker
        self._parameters = inspect.signature(processor.apply_transcription_request).parameters
        names = _language_names(processor)
        self._codes = {name.lower(): code for code, name in names.items()} | {
            code.lower(): code for code in names
        }
        self._names = {code: name.lower() for code, name in names.items()}

    @property
    def answers_plainly(self) -> bool:
        """False for a class that takes its answers apart."""
        return not hasattr(self._processor, "parse_output")

    def check(self, request: SpeechRequest) -> None:
        """Check the task, the language and the prompt against what the request form takes."""
        if request.task != "transcribe":
            raise InvalidRequestError("the model transcribes; it does not translate")
        if request.language is not None:
            if "language" not in self._parameters:
                raise ValidationError(
                    "the model finds out the language by itself; leave language out",
                    parameter="language",
                    value=request.language[:_MAX_SHOWN],
                )
            if self._codes and request.language.lower() not in self._codes:
                raise unsupported_language(request.language, sorted(self._names))
        if request.prompt and "prompt" not in self._parameters:
            raise ValidationError("the model takes no prompt", parameter="prompt")

    def language_probe(self, request: SpeechRequest) -> LanguageProbe | None:
        """None: such models say the language in their answer, if at all."""
        return None

    def prompt(self, request: SpeechRequest, language: str | None) -> str | list[int]:
        """Return the class's own prompt for one recording, unexpanded."""
        options: dict[str, Any] = {}
        if request.language is not None:
            options["language"] = self._codes.get(request.language.lower(), request.language)
        if request.prompt:
            options["prompt"] = self._marker.mark(request.prompt)
        try:
            # It is asked for text, so the name of the recording is never looked at.
            # On a copy: classes may keep something between calls, and threads share this one.
            prompts = copy.copy(self._processor).apply_transcription_request(
                "recording", tokenize=False, **options
            )
        except (ValueError, TypeError, KeyError) as exc:
            raise InvalidRequestError(f"the model's processor refuses it: {describe(exc)}") from exc
        text = prompts if isinstance(prompts, str) else prompts[0]
        return self._marker.seal(text)

    def read(self, text: str) -> tuple[str | None, str]:
        """Return the parts of an answer as the class tells them apart."""
        if self.answers_plainly:
            return None, text.strip()
        parsed = self._processor.parse_output(text)
        language = parsed.get("language")
        code = self._codes.get(str(language).lower()) if language else None
        return code, str(parsed.get("transcription", ""))

    def language_name(self, code: str | None) -> str | None:
        """Return the name of a code."""
        return None if code is None else self._names.get(self._codes.get(code.lower(), code))


def _language_names(processor: Any) -> dict[str, str]:
    """Return code -> name of the languages that the module of a class lists; empty if it does
    not."""
    names = getattr(inspect.getmodule(type(processor)), "LANGUAGE_CODE_TO_NAME", {})
    return dict(names) if isinstance(names, Mapping) else {}


# -- an instruction in a chat turn


@dataclass(frozen=True, slots=True)
class Instructions:
    """What a model was taught to be told, by task."""

    transcribe: str
    translate: str | None = None


INSTRUCTIONS: Final[Mapping[str, Instructions]] = {
    "GraniteSpeechProcessor": Instructions(
        "can you transcribe the speech into a written format?",
        "can you translate the speech into English?",
    ),
}
"""By the name of the processor's class; the sentences are those of the models' own pages."""


class InstructedSpeech:
    """A model that transcribes when a user message says so.

    Args:
        chat: The model's chat template.
        instructions: What it is told.
    """

    window_s: float | None = None
    timestamps: TimestampTokens | None = None
    answers_plainly = True

    def __init__(self, chat: Chat, instructions: Instructions) -> None:
        self._chat = chat
        self._instructions = instructions

    def check(self, request: SpeechRequest) -> None:
        """Check the task; a language cannot be told to the model."""
        if request.task == "translate" and self._instructions.translate is None:
            raise InvalidRequestError("the model transcribes; it does not translate")
        if request.language is not None:
            raise ValidationError(
                "the model finds out the language by itself; leave language out",
                parameter="language",
                value=request.language[:_MAX_SHOWN],
            )

    def language_probe(self, request: SpeechRequest) -> LanguageProbe | None:
        """None: the model is told nothing of the language."""
        return None

    def prompt(self, request: SpeechRequest, language: str | None) -> str | list[int]:
        """Return one user turn: the recording, then the instruction or the client's own."""
        default = getattr(self._instructions, request.task)
        content = [{"type": "audio"}, {"type": "text", "text": request.prompt or default}]
        return self._chat.render([{"role": "user", "content": content}]).text

    def read(self, text: str) -> tuple[str | None, str]:
        """Return the answer: all of it is the transcript."""
        return None, text.strip()

    def language_name(self, code: str | None) -> str | None:
        """None: the model says no language."""
        return None


def speech_model(processor: Any, chat: Chat, marker: TextMarker) -> SpeechModel | None:
    """Return how a model with a chat template is asked to transcribe; None if it is not."""
    instructions = INSTRUCTIONS.get(type(processor).__name__)
    if instructions is not None:
        return InstructedSpeech(chat, instructions)
    own = getattr(processor, "apply_transcription_request", None)
    if own is not None and "tokenize" in inspect.signature(own).parameters:
        return ProcessorSpeech(processor, marker)
    return None
