"""`POST /v1/chat/completions/render`: what an engine needs, instead of an answer."""

from __future__ import annotations

from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.features import MESSAGE_PACK
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
        packed=wants_message_pack(exchange.header("accept")),
    )
    headers = {"server-timing": exchange.timeline.server_timing()} if shows_timeline else None
    await exchange.answer_pieces(
        body.pieces(),
        body.num_bytes,
        content_type=body.content_type,
        headers=headers,
    )


def wants_message_pack(accept: str | None) -> bool:
    """Whether an `Accept` header names MessagePack; without a preference there is JSON."""
    if accept is None:
        return False
    for entry in accept.lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if name in (MESSAGE_PACK, "application/x-msgpack", "application/vnd.msgpack"):
            return not any(p.replace(" ", "").rstrip("0") in ("q=", "q=0.") for p in parameters)
    return False
