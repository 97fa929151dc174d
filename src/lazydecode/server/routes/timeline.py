"""`GET /timeline` and `/timeline.json`: where the time of the last requests went."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

import msgspec

from lazydecode.errors import ValidationError
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.recent import trace_events, write_page


async def show_page(context: ServerContext, exchange: Exchange) -> None:
    """A page with a lane per request and item; written on a thread."""
    page = await asyncio.to_thread(lambda: write_page(tuple(context.recent)).encode())
    await exchange.answer(200, page, content_type="text/html; charset=utf-8")


async def show_json(context: ServerContext, exchange: Exchange) -> None:
    """The same as JSON: our own form, or with `form=trace` that of trace viewers."""
    query = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
    form = query.get("form", ["spans"])[-1]
    if form not in ("spans", "trace"):
        raise ValidationError("form must be spans or trace", parameter="form", value=form[:80])

    def write() -> bytes:
        requests = tuple(context.recent)
        if form == "trace":
            return msgspec.json.encode(trace_events(requests))
        return msgspec.json.encode([request.to_dict() for request in requests])

    body = await asyncio.to_thread(write)
    await exchange.answer(200, body, content_type="application/json")
