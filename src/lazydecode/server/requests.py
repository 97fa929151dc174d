"""What both chat routes do with a request before it is rendered."""

from __future__ import annotations

from dataclasses import dataclass

from lazydecode.errors import NotFoundError, ValidationError
from lazydecode.renderers.base import RenderRequest
from lazydecode.renderers.chat import Conversation
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.body import read_chat_request
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.protocol import ChatCompletionRequest

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
    with exchange.timeline.stage("parse"):
        request, conversation = await read_chat_request(
            exchange.scope,
            exchange.receive,
            max_bytes=context.settings.request_limits.max_body_bytes,
            max_stall_s=context.settings.request_limits.max_body_stall_s,
            executor=context.renderer.executor.quick,
            hold=hold,
        )
    check_against_settings(context, request)
    return ParsedRequest(request, conversation, hold)


def check_against_settings(context: ServerContext, request: ChatCompletionRequest) -> None:
    """Refuse another model's name, and per-request options where they are turned off.

    Raises:
        NotFoundError: For an unknown model.
        ValidationError: For an option that this server does not take.
    """
    if request.model is not None and request.model not in context.model_names:
        raise NotFoundError(
            f"the model {request.model[:200]!r} is not served here; "
            f"this is {context.model_names[0]!r}",
            parameter="model",
        )
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
    )


def timeline_wanted(exchange: Exchange, request: ChatCompletionRequest) -> bool:
    """Whether the client asked to be told what happened when, by header or field."""
    return bool(request.timeline) or exchange.header(TIMELINE_HEADER) in ("1", "true")
