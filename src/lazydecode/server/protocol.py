"""The OpenAI chat request, typed, and how its fields are checked.

Every field is either used, or neutral (it asks for what happens anyway), or refused by name:
nothing that a client asks for is silently ignored.
"""

from __future__ import annotations

import operator
import re
from typing import Any, Final, Literal, TypeAlias, TypeVar

import msgspec

from lazydecode.engine.protocol import MAX_LOGPROBS
from lazydecode.errors import InvalidRequestError, ValidationError
from lazydecode.renderers.messages import ChatMessage
from lazydecode.renderers.nesting import check_nesting

_T = TypeVar("_T")

Payload: TypeAlias = Literal["tensors", "metadata", "none"]
"""What an answer holds of each item: all, its small tensors (grids, sizes), or those as numbers."""

_MAX_STOP_STRINGS: Final = 16
_MAX_STOP_CHARS: Final = 1024
_RAW: Final = msgspec.Raw()

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "bad_words": ([],),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (False,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
}
"""Known fields that this server does not implement -> the values that change nothing."""
_MAX_NEUTRAL_BYTES: Final = 1000
"""No such value is as long; what is longer is not even parsed."""
_RANGES: Final[dict[str, tuple[float, float | None, bool]]] = {
    "max_tokens": (1, None, False),
    "max_completion_tokens": (1, None, False),
    "min_tokens": (0, None, False),
    "temperature": (0, 2, False),
    "top_p": (0, 1, True),
    "top_k": (-1, None, False),
    "min_p": (0, 1, False),
    "seed": (-(2**63), 2**63 - 1, False),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "repetition_penalty": (0, 100, True),
    "top_logprobs": (0, MAX_LOGPROBS, False),
}
"""Number -> least value, largest or None, and whether it must be above the least."""
_FREE_FORM: Final = ("tools", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs")
"""Fields whose values are handed on as the client wrote them."""
_OF_TEMPLATES: Final = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
"""Fields that say how the chat template writes the prompt."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Send a last chunk without choices that holds the usage."""


class ChatCompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/chat/completions` and of its render route."""

    messages: list[ChatMessage]
    model: str | None = None

    # -- sampling
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`; it wins."""
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id, as a string, -> bias."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # -- answer
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    mm_payload: Payload | None = None
    """Of the render route: how much of each item `features` holds."""
    timeline: bool | None = None
    """Whether the answer tells what happened to each item, and when."""

    # -- prompt
    prompt_token_ids: list[int] | None = None
    """The prompt itself, with one placeholder per item; `messages` then hold the media alone."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # -- media
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    """Modality -> decode options, merged over the server's."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's processor, merged over the server's."""
    cache_salt: str | None = None
    """Separates tenants: part of every identity in the processor cache."""
    skip_mm_cache: bool | None = None
    """Whether the request passes the processor caches by."""

    # -- accepted, without effect on the answer
    user: str | None = None
    metadata: msgspec.Raw = _RAW
    """An object; nothing is made of what is in it, which may be a million objects."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # -- accepted only with a value that asks for nothing: see _NEUTRAL
    best_of: msgspec.Raw = _RAW
    bad_words: msgspec.Raw = _RAW
    echo: msgspec.Raw = _RAW
    functions: msgspec.Raw = _RAW
    function_call: msgspec.Raw = _RAW
    length_penalty: msgspec.Raw = _RAW
    modalities: msgspec.Raw = _RAW
    n: msgspec.Raw = _RAW
    parallel_tool_calls: msgspec.Raw = _RAW
    prediction: msgspec.Raw = _RAW
    priority: msgspec.Raw = _RAW
    prompt_logprobs: msgspec.Raw = _RAW
    response_format: msgspec.Raw = _RAW
    service_tier: msgspec.Raw = _RAW
    skip_special_tokens: msgspec.Raw = _RAW
    spaces_between_special_tokens: msgspec.Raw = _RAW
    store: msgspec.Raw = _RAW
    tool_choice: msgspec.Raw = _RAW
    use_beam_search: msgspec.Raw = _RAW
    include_stop_str_in_output: msgspec.Raw = _RAW
    logits_processors: msgspec.Raw = _RAW
    truncate_prompt_tokens: msgspec.Raw = _RAW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none if not given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def answer_tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as the model has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_DECODER: Final = msgspec.json.Decoder(ChatCompletionRequest)
_ANY_DECODER: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder()
_NEED_NO_CHECK: Final = frozenset(
    {
        "messages",  # by `parse_messages`
        "model",  # against the server's settings
        "stream",
        "mm_payload",
        "timeline",
        "add_generation_prompt",
        "skip_mm_cache",
        "ignore_eos",
        "stop_token_ids",
        "user",
        "safety_identifier",
        "prompt_cache_key",
    }
)
_CHECKED: Final = {
    field.name: field.default
    for field in msgspec.structs.fields(ChatCompletionRequest)
    if field.name not in _NEED_NO_CHECK
}
_read_checked: Final = operator.attrgetter(*_CHECKED)
_NONE_CHECKED: Final = tuple(_CHECKED.values())
_read_neutral: Final = operator.attrgetter(*_NEUTRAL)
_NONE_NEUTRAL: Final = (_RAW,) * len(_NEUTRAL)
_read_ranged: Final = operator.attrgetter(*_RANGES)
_NONE_RANGED: Final = (None,) * len(_RANGES)
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_PATH: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


def decode_request(body: bytes | bytearray | memoryview) -> ChatCompletionRequest:
    """Parse and check a body; media URLs in the result are views of `body`.

    Holds the GIL for about 0.5 ms per MB: bodies of more than some 100 KB belong on a thread.

    Raises:
        InvalidRequestError: If it is not JSON, has a field of the wrong type, or asks for
            something that is not supported; the message names the field.
    """
    request = decode_body(body, _DECODER)
    check_request(request)
    return request


def decode_body(body: bytes | bytearray | memoryview, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Parse a body into a typed request.

    Raises:
        InvalidRequestError: If it is not JSON, or has an unknown field or one of the wrong type.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc)) from exc
    except RecursionError as exc:
        raise InvalidRequestError("the body is nested too deeply") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequestError(f"the body is not valid JSON: {exc}") from exc


def check_request(request: ChatCompletionRequest) -> None:
    """Check every value's range, and refuse by name what is not supported.

    Raises:
        ValidationError: It names the field and shows the value.
    """
    # Nearly all requests give few of these: a comparison instead of a look at each.
    if _read_checked(request) == _NONE_CHECKED:
        return
    if bytes(memoryview(request.metadata)[:1]) not in (b"", b"{", b"n"):  # null
        raise InvalidRequestError("metadata: expected an object", parameter="metadata")
    request.metadata = _RAW  # or it would keep the body
    for name in _FREE_FORM:
        check_nesting(getattr(request, name), where=name)
    if _read_neutral(request) != _NONE_NEUTRAL:
        for name, neutral in _NEUTRAL.items():
            _check_neutral(name, getattr(request, name), neutral)
            setattr(request, name, _RAW)
    if _read_ranged(request) != _NONE_RANGED:
        for name, (low, high, is_open) in _RANGES.items():
            _check_range(name, getattr(request, name), low, high, is_open)
    for token, bias in (request.logit_bias or {}).items():
        if not token.isdecimal() or len(token) > 9 or not -100 <= bias <= 100:
            raise _invalid("logit_bias", f"{token}: {bias}", "maps token ids to -100..100")
    if request.top_logprobs is not None and not request.logprobs:
        raise _invalid("top_logprobs", request.top_logprobs, "needs logprobs: true")
    stops = request.stop_strings
    if len(stops) > _MAX_STOP_STRINGS:
        raise _invalid("stop", len(stops), f"takes at most {_MAX_STOP_STRINGS} strings")
    if any(not 0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise _invalid("stop", None, f"strings have 1 to {_MAX_STOP_CHARS} characters")
    if request.stream_options is not None and not request.stream:
        raise _invalid("stream_options", None, "needs stream: true")
    if request.prompt_token_ids is not None:
        _check_prompt_tokens(request)
    if request.continue_final_message and request.add_generation_prompt:
        raise _invalid(
            "continue_final_message", True, "cannot go together with add_generation_prompt"
        )
    if request.cache_salt is not None and not request.cache_salt:
        raise _invalid("cache_salt", "", "must not be empty")
    for modality in request.media_io_kwargs or {}:
        if modality not in ("image", "video", "audio"):
            raise _invalid("media_io_kwargs", modality, "takes image, video and audio")


def _check_prompt_tokens(request: ChatCompletionRequest) -> None:
    if not request.prompt_token_ids:
        raise _invalid("prompt_token_ids", None, "must not be empty")
    for name in _OF_TEMPLATES:
        if getattr(request, name) is not None:
            raise _invalid(name, None, "cannot go together with prompt_token_ids")


def _check_neutral(name: str, raw: msgspec.Raw, neutral: tuple[Any, ...]) -> None:
    if not memoryview(raw):
        return
    if len(memoryview(raw)) > _MAX_NEUTRAL_BYTES:
        raise _invalid(name, None, "is not supported by this server")
    value = decode_body(memoryview(raw), _ANY_DECODER)  # its text has not been looked at before
    if value is None or any(_same(value, allowed) for allowed in neutral):
        return
    raise _invalid(name, value, "is not supported by this server")


def _same(value: Any, allowed: Any) -> bool:
    """Equality in which true is not 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _check_range(
    name: str, value: float | None, low: float, high: float | None, is_open: bool
) -> None:
    if value is None:
        return
    if value < low or (is_open and value == low) or (high is not None and value > high):
        bound = f"more than {low}" if is_open else f"at least {low}"
        raise _invalid(
            name, value, f"must be {bound}" + ("" if high is None else f" and at most {high}")
        )


def _invalid(name: str, value: Any, rule: str) -> ValidationError:
    shown = "" if value is None or isinstance(value, dict | list | bytes) else f", got {value!r}"
    return ValidationError(f"{name} {rule}{shown[:80]}", parameter=name, value=value)


def _explain(text: str) -> InvalidRequestError:
    """Turn msgspec's text into ours: the path as the client writes it, then what is wrong."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    where = path.removeprefix("$").removeprefix(".")
    unknown = _UNKNOWN_FIELD.match(what)
    if unknown is not None:
        name = f"{where}.{unknown['name']}" if where else unknown["name"]
        return ValidationError(f"{name} is not supported by this server", parameter=name)
    what = what.replace("`", "").replace("Object missing required field", "missing field")
    what = what[:1].lower() + what[1:]
    message = f"{where}: {what}" if where else f"the body: {what}"
    return InvalidRequestError(message, parameter=where or None)
