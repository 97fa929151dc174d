"""What both chat routes do with a request before it is rendered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lazydecode.errors import NotFoundError, ValidationError
from lazydecode.renderers.chat import Conversation
from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.prompts import RenderRequest
from lazydecode.server.body import ReadBody, parse_body, read_parsed
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.payload_cut import PayloadFinder
from lazydecode.server.protocol import ChatCompletionRequest

_T = TypeVar("_T")
TIMELINE_HEADER = "x-lazydecode-timeline"


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A chat request that was read: its options, its messages, and the memory that it holds."""

    request: ChatCompletionRequest
    conversation: Conversation
    hold: EncodedHold


async def read_request(
    context: ServerContext, exchange: Exchange, hold: EncodedHold
) -> ParsedRequest:
    """Read, parse and check a chat request against this server's settings.

    Raises:
        InvalidRequestError: If the body, a field or the model name is wrong.
    """
    parse = partial(parse_body, texts=context.renderer.known_texts)
    request, conversation = await read_body_as(
        context, exchange, parse, hold, finder=PayloadFinder()
    )
    check_against_settings(context, request)
    return ParsedRequest(request, conversation, hold)


async def read_body_as(
    context: ServerContext,
    exchange: Exchange,
    parse: Callable[[ReadBody], _T],
    hold: EncodedHold | None = None,
    *,
    finder: PayloadFinder | None = None,
) -> _T:
    """Read a body within this server's limits and parse it, as `read_parsed` does.

    Raises:
        InvalidRequestError: If the body or a field is wrong.
    """
    limits = context.renderer.limits
    with exchange.timeline.stage("parse"):
        return await read_parsed(
            exchange.scope,
            exchange.receive,
            parse,
            max_bytes=limits.max_body_bytes,
            max_stall_s=limits.max_body_stall_s,
            executor=context.renderer.executor.quick,
            turns=context.turns,
            hold=hold,
            finder=finder,
        )


def check_model(context: ServerContext, model: str | None) -> None:
    """Refuse the name of another model; none given is this one.

    Raises:
        NotFoundError: If it is not served here.
    """
    if model is not None and model not in context.model_names:
        raise NotFoundError(
            f"the model {model[:200]!r} is not served here; this is {context.model_names[0]!r}",
            parameter="model",
        )


def check_against_settings(context: ServerContext, request: ChatCompletionRequest) -> None:
    """Refuse another model's name, and per-request options where they are turned off.

    Raises:
        NotFoundError: For an unknown model.
        ValidationError: For an option that this server does not take.
    """
    check_model(context, request.model)
    if not context.settings.request_kwargs:
        for name in ("media_io_kwargs", "mm_processor_kwargs"):
            if getattr(request, name):
                raise ValidationError(
                    f"{name} is not taken by this server: its options are fixed", parameter=name
                )


def render_request(parsed: ParsedRequest, request_id: str) -> RenderRequest:
    """Return the part of a chat request that the renderer works on."""
    request = parsed.request
    continue_final = bool(request.continue_final_message)
    return RenderRequest(
        request_id,
        parsed.conversation,
        prompt_token_ids=request.prompt_token_ids,
        tools=request.tools or None,
        chat_template_kwargs=request.chat_template_kwargs or {},
        add_generation_prompt=(
            not continue_final
            if request.add_generation_prompt is None
            else request.add_generation_prompt
        ),
        continue_final_message=continue_final,
        media_io_kwargs=request.media_io_kwargs or {},
        mm_processor_kwargs=request.mm_processor_kwargs or {},
        cache_salt=request.cache_salt,
        skip_mm_cache=bool(request.skip_mm_cache),
    )


def timeline_wanted(exchange: Exchange, request: ChatCompletionRequest) -> bool:
    """Whether the client asked to be told what happened when, by header or field."""
    return bool(request.timeline) or exchange.header(TIMELINE_HEADER) in ("1", "true")
