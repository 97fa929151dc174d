"""What every route has in common: key, admission, errors, metrics, one log line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from lazydecode.errors import OverloadedError, forget_frames
from lazydecode.server.context import ServerContext
from lazydecode.server.error_mapping import ErrorAnswer, map_error
from lazydecode.server.exchange import Exchange
from lazydecode.server.recent import FinishedRequest

logger = logging.getLogger(__name__)

Handler = Callable[[ServerContext, Exchange], Awaitable[None]]
CLIENT_LEFT = 499
"""Status under which metrics count a request whose client went away; nobody receives it."""


class Endpoint:
    """One route as an ASGI application.

    Args:
        context: The server's parts.
        route: Name in metrics and logs.
        handler: Answers the exchange, or raises.
        needs_key: Whether the API key is asked for.
        limited: Whether the route counts against the queue limit.
    """

    def __init__(
        self,
        context: ServerContext,
        route: str,
        handler: Handler,
        *,
        needs_key: bool = True,
        limited: bool = False,
    ) -> None:
        self._context = context
        self._route = route
        self._handler = handler
        self._needs_key = needs_key
        self._limited = limited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every exception becomes an answer or a counted disconnect."""
        exchange = Exchange(scope, receive, send, on_complete=self._count)
        try:
            await self._answer(exchange)
        except (ClientDisconnect, OSError) as exc:
            forget_frames(exc)
            exchange.status = CLIENT_LEFT
            logger.debug("request %s: the client went away", exchange.request_id)
        finally:
            exchange.complete()

    async def _answer(self, exchange: Exchange) -> None:
        context = self._context
        try:
            if self._needs_key:
                exchange.check_key(context.settings.api_key)
            if not self._limited:
                await self._handler(context, exchange)
                return
            with context.queue:
                exchange.is_admitted = True
                await self._handler(context, exchange)
        except ClientDisconnect:
            raise
        except asyncio.CancelledError:
            # Only the server's end cancels a request as a whole. This task is the request's
            # own: nobody waits for the cancellation, and the client waits for an answer.
            await _answer_error(exchange, OverloadedError("the server is being stopped"))
        except Exception as exc:  # Whatever it is, the client gets an answer.
            await _answer_error(exchange, exc)

    def _count(self, exchange: Exchange) -> None:
        metrics = self._context.metrics
        seconds = time.perf_counter() - exchange.started
        # Of requests that left no status the client went away before its answer.
        status = exchange.status or CLIENT_LEFT
        metrics.observe_request(self._route, status, seconds)
        if exchange.is_admitted:
            metrics.observe_timeline(exchange.timeline)
        if self._limited:
            self._context.recent.add(
                FinishedRequest(
                    exchange.request_id, self._route, status, seconds, exchange.timeline
                )
            )
            logger.info(
                "request %s %s %d %.1f ms",
                exchange.request_id,
                self._route,
                status,
                seconds * 1000,
            )


async def _answer_error(exchange: Exchange, exc: Exception) -> None:
    error = map_error(exc, request_id=exchange.request_id)
    forget_frames(exc)
    if exchange.status is None:
        await exchange.answer_json(error.status, error.body, headers=error.headers)
        return
    # Headers are out: only an event stream can still say what went wrong.
    await exchange.end_events(error_event(error))


def error_event(error: ErrorAnswer) -> bytes:
    """A server-sent event that tells of an error in the middle of a stream."""
    return b"data: " + msgspec.json.encode(error.body) + b"\n\n"
