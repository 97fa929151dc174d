"""OpenAI's form of a transcription request: which fields there are and what they may say."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from lazydecode.errors import ValidationError
from lazydecode.models.speech import SpeechModel, SpeechRequest, Task

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
RESPONSE_FORMATS: Final[tuple[ResponseFormat, ...]] = (
    "json",
    "text",
    "verbose_json",
    "srt",
    "vtt",
)
TIMED_FORMATS: Final = ("verbose_json", "srt", "vtt")
"""Formats that say when what was said."""
_LISTS: Final = ("timestamp_granularities", "include")
"""Fields that may stand several times, written with `[]` or without."""
_NUMBER: Final = re.compile(
    r"[+-]?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?"
)
_WHOLE: Final = re.compile(r"0{0,40}[0-9]{1,10}")
_TRUE: Final = ("true", "1")
_FALSE: Final = ("false", "0", "")


@dataclass(frozen=True, slots=True)
class TranscriptionForm:
    """A request as it was sent, checked."""

    model: str | None = None
    response_format: ResponseFormat = "json"
    temperature: float = 0.0
    stream: bool = False
    max_tokens: int | None = None
    """Most tokens per piece of the recording."""
    cache_salt: str | None = None
    speech: SpeechRequest = field(default_factory=SpeechRequest)

    def translated(self) -> TranscriptionForm:
        """Return the same request for an answer in English."""
        return replace(self, speech=replace(self.speech, task="translate"))


def parse_form(fields: Sequence[tuple[str, str]], task: Task) -> TranscriptionForm:
    """Check the text fields of a form.

    Raises:
        ValidationError: For a field that is unknown, stands twice, or has a wrong value;
            `parameter` names it.
    """
    values: dict[str, str] = {}
    granularities: list[str] = []
    for name, value in fields:
        plain = name.removesuffix("[]")
        if plain in _LISTS:
            if plain == "include" or value not in ("segment", ""):
                raise _refused(plain, value, "is not supported by this server")
            granularities.append(value)
        elif name in values:
            raise _refused(name, None, "stands twice in the form")
        elif name in _FIELDS and not (task == "translate" and name in _NOT_TRANSLATED):
            values[name] = value
        else:
            raise _refused(name, None, "is not supported by this server")
    response_format = _one_of("response_format", values, RESPONSE_FORMATS, "json")
    stream = _flag(values)
    if stream and response_format not in ("json", "text"):
        raise _refused("stream", None, "needs the response_format json or text")
    if granularities and response_format != "verbose_json":
        raise _refused("timestamp_granularities", None, "needs the response_format verbose_json")
    if values.get("chunking_strategy", "auto") not in ("auto", ""):
        raise _refused(
            "chunking_strategy", values["chunking_strategy"], "must be auto: pieces end in pauses"
        )
    salt = values.get("cache_salt")
    if salt is not None and not salt:
        raise _refused("cache_salt", salt, "must not be empty")
    return TranscriptionForm(
        model=values.get("model"),
        response_format=response_format,
        temperature=_temperature(values),
        stream=stream,
        max_tokens=_max_tokens(values),
        cache_salt=salt,
        speech=SpeechRequest(
            task,
            language=values.get("language") or None,
            prompt=values.get("prompt", ""),
            timestamps=response_format in TIMED_FORMATS,
        ),
    )


_FIELDS: Final = frozenset(
    {
        "model",
        "language",
        "prompt",
        "response_format",
        "temperature",
        "stream",
        "chunking_strategy",
        "max_completion_tokens",
        "cache_salt",
    }
)
_NOT_TRANSLATED: Final = frozenset({"language"})
"""Fields of transcriptions that translations have not."""


def check_abilities(form: TranscriptionForm, speech: SpeechModel) -> None:
    """Check that the model can give what is asked.

    Raises:
        ValidationError: If it cannot; `parameter` names the field.
    """
    if form.speech.timestamps and speech.timestamps is None:
        raise _refused(
            "response_format",
            form.response_format,
            "needs times, which this model does not give; use json or text",
        )
    speech.check(form.speech)


def _one_of(
    name: str,
    values: dict[str, str],
    known: tuple[ResponseFormat, ...],
    default: ResponseFormat,
) -> ResponseFormat:
    given = values.get(name) or default
    found = next((value for value in known if value == given), None)
    if found is None:
        raise _refused(name, given, f"must be one of {', '.join(known)}")
    return found


def _flag(values: dict[str, str]) -> bool:
    given = values.get("stream", "").lower()
    if given not in _TRUE + _FALSE:
        raise _refused("stream", given, "must be true or false")
    return given in _TRUE


def _temperature(values: dict[str, str]) -> float:
    given = values.get("temperature") or "0"
    # `float` takes digits of all scripts, underscores between them and white space around.
    value = float(given) if _NUMBER.fullmatch(given) else math.nan
    if not 0 <= value <= 2:
        raise _refused("temperature", given, "must be a number from 0 to 2")
    return value


def _max_tokens(values: dict[str, str]) -> int | None:
    given = values.get("max_completion_tokens")
    if not given:
        return None
    if not _WHOLE.fullmatch(given) or not 0 < int(given) < 2**31:
        raise _refused("max_completion_tokens", given, "must be a whole number above 0")
    return int(given)


def _refused(name: str, value: str | None, rule: str) -> ValidationError:
    shown = "" if value is None else f", got {value[:40]!r}"
    return ValidationError(f"{name[:100]} {rule}{shown}", parameter=name[:100], value=value)
