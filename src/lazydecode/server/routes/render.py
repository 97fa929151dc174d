"""`POST /v1/chat/completions/render`: what an engine needs, instead of an answer."""

from __future__ import annotations

from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.rendering import render_answer
from lazydecode.server.requests import ParsedRequest, read_request, timeline_wanted


async def render_completion(context: ServerContext, exchange: Exchange) -> None:
    """Answer token ids and features, with tensors unless the request says otherwise."""
    async with EncodedHold(context.renderer.encoded_budget) as hold:
        parsed = await read_request(context, exchange, hold)
        await exchange.run_while_connected(_answer(context, exchange, parsed))


async def _answer(
    context: ServerContext,
    exchange: Exchange,
    parsed: ParsedRequest,
) -> None:
    shows_timeline = timeline_wanted(exchange, parsed.request)
    body = await render_answer(
        context,
        parsed,
        timeline=exchange.timeline,
        shows_timeline=shows_timeline,
    )
    headers = {"server-timing": exchange.timeline.server_timing()} if shows_timeline else {}
    await exchange.answer_pieces(
        body.pieces(), body.num_bytes, executor=context.renderer.executor.quick, headers=headers
    )
