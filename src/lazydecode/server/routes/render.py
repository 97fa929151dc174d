"""`POST /v1/chat/completions/render`: what an engine needs, instead of an answer."""

from __future__ import annotations

from lazydecode.renderers.chat import Conversation
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.protocol import ChatCompletionRequest
from lazydecode.server.rendering import render_answer
from lazydecode.server.requests import read_request, timeline_wanted


async def render_completion(context: ServerContext, exchange: Exchange) -> None:
    """Answer token ids and features, with tensors unless the request says otherwise."""
    request, conversation = await read_request(context, exchange)
    await exchange.run_while_connected(_answer(context, exchange, request, conversation))


async def _answer(
    context: ServerContext,
    exchange: Exchange,
    request: ChatCompletionRequest,
    conversation: Conversation,
) -> None:
    shows_timeline = timeline_wanted(exchange, request)
    pieces = await render_answer(
        context,
        request,
        conversation,
        timeline=exchange.timeline,
        shows_timeline=shows_timeline,
    )
    headers = {"server-timing": exchange.timeline.server_timing()} if shows_timeline else {}
    await exchange.answer(200, pieces, headers=headers)
