"""Requests of the token routes: what they may say, and how they are read.

`/tokenize` and `/detokenize` have the form that vLLM made common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lazydecode.errors import ValidationError
from lazydecode.renderers.chat import Conversation, parse_messages
from lazydecode.renderers.messages import ChatMessage
from lazydecode.server.body import ReadBody
from lazydecode.server.protocol import ChatCompletionRequest, check_request, decode_body


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /tokenize`: a text, or messages as of a chat request."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Of a text: whether what goes around every text of the model is added (default: yes)."""
    return_token_strs: bool | None = None
    """Whether the answer shows each token as the vocabulary spells it."""

    # -- as of a chat request
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    skip_mm_cache: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


_TOKENIZE: Final = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeRequest)
_CHAT_FIELDS: Final = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "cache_salt",
    "skip_mm_cache",
)


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """A request to tokenize, checked: a text or a conversation."""

    model: str | None
    text: str | None
    """None: it is a conversation."""
    add_special_tokens: bool
    wants_strings: bool
    chat: ChatCompletionRequest
    """The fields of a chat request; empty beside a text."""
    conversation: Conversation


def parse_tokenize(body: ReadBody) -> Tokenizing:
    """Parse and check a body of `/tokenize`; linear in it.

    Raises:
        InvalidRequestError: If a field is wrong, or it has not either a prompt or messages.
    """
    given = decode_body(body.view, _TOKENIZE)
    if (given.prompt is None) == (given.messages is None):
        raise ValidationError("either prompt or messages must be given", parameter="prompt")
    fields = {name: getattr(given, name) for name in _CHAT_FIELDS}
    if given.messages is None:
        for name, value in fields.items():
            if value is not None:
                raise ValidationError(f"{name} goes with messages only", parameter=name)
    elif given.add_special_tokens:
        raise ValidationError(
            "add_special_tokens goes with prompt only: with messages the chat template writes them",
            parameter="add_special_tokens",
            value=True,
        )
    chat = ChatCompletionRequest(messages=[], model=given.model, **fields)
    check_request(chat)
    return Tokenizing(
        model=given.model,
        text=given.prompt,
        add_special_tokens=given.add_special_tokens is not False,
        wants_strings=bool(given.return_token_strs),
        chat=chat,
        conversation=Conversation([]) if given.messages is None else parse_messages(given.messages),
    )


def parse_detokenize(body: ReadBody) -> DetokenizeRequest:
    """Parse a body of `/detokenize`.

    Raises:
        InvalidRequestError: If it is not JSON, or a field is wrong.
    """
    return decode_body(body.view, _DETOKENIZE)
