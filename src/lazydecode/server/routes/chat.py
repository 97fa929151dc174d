"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from lazydecode.engine.protocol import TokenLogprob
from lazydecode.errors import InvalidRequestError
from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.rendered import RenderedRequest
from lazydecode.server import answers
from lazydecode.server.context import ServerContext
from lazydecode.server.detokenize import Detokenizer
from lazydecode.server.exchange import Exchange
from lazydecode.server.generation import Delta, Generation
from lazydecode.server.protocol import ChatCompletionRequest
from lazydecode.server.requests import (
    ParsedRequest,
    read_request,
    render_request,
    timeline_wanted,
)
from lazydecode.server.sampling import build_sampling


async def create_completion(context: ServerContext, exchange: Exchange) -> None:
    """Answer a chat request, whole or as a stream of events."""
    if not context.frontend.generates:
        raise InvalidRequestError(
            "this model embeds and does not generate; use /v1/chat/completions/render"
        )
    if not context.generates:
        raise InvalidRequestError(
            "this server renders only (--engine none); use /v1/chat/completions/render"
        )
    async with EncodedHold(context.renderer.encoded_budget) as hold:
        parsed = await read_request(context, exchange, hold)
        await exchange.run_while_connected(_answer(context, exchange, parsed))


async def _answer(
    context: ServerContext,
    exchange: Exchange,
    parsed: ParsedRequest,
) -> None:
    request = parsed.request
    sampling = build_sampling(request, context.default_sampling)
    answer = _Answer(context, exchange, request)
    async with context.renderer.open(
        render_request(parsed, answer.id),
        timeline=exchange.timeline,
        hold=parsed.hold,
        purpose="engine",
    ) as rendered:
        generation = Generation(
            context.engine,
            rendered,
            sampling,
            Detokenizer(context.frontend.decode, request.stop_strings),
            context.metrics,
        )
        if request.stream:
            await answer.stream(generation, rendered)
        else:
            await answer.send_whole(generation, rendered)


class _Answer:
    """One answer's fixed parts, and the two ways in which it is sent."""

    def __init__(
        self, context: ServerContext, exchange: Exchange, request: ChatCompletionRequest
    ) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._context = context
        self._exchange = exchange
        self._request = request
        self._created = int(time.time())
        self._model = request.model or context.model_names[0]
        self._wants_timeline = timeline_wanted(exchange, request)

    async def send_whole(self, generation: Generation, rendered: RenderedRequest) -> None:
        text: list[str] = []
        logprobs: list[TokenLogprob] = []
        reason = "stop"
        async with aclosing(self._observed(generation, rendered)) as deltas:
            async for delta in deltas:
                text.append(delta.text)
                logprobs += delta.logprobs
                reason = delta.finish_reason or reason
        body = answers.completion(
            self.id,
            self._created,
            self._model,
            "".join(text),
            reason,
            logprobs=logprobs if self._request.logprobs else None,
            usage=answers.usage(rendered.num_prompt_tokens, generation.num_tokens),
            decode=self._context.frontend.decode,
        )
        await self._exchange.answer_json(200, body | self._timeline(), headers=self._headers())

    async def stream(self, generation: Generation, rendered: RenderedRequest) -> None:
        await self._exchange.answer_events(self._events(generation, rendered), self._headers)

    async def _events(
        self, generation: Generation, rendered: RenderedRequest
    ) -> AsyncGenerator[bytes]:
        options = self._request.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        writer = answers.ChunkWriter(
            self.id,
            self._created,
            self._model,
            wants_usage=wants_usage,
            wants_logprobs=bool(self._request.logprobs),
            decode=self._context.frontend.decode,
        )
        is_first = True
        async with aclosing(self._observed(generation, rendered)) as deltas:
            async for delta in deltas:
                if is_first:
                    # Not before the first token: until then an error is a plain HTTP error.
                    yield writer.first()
                    is_first = False
                if delta.text or delta.logprobs or delta.finish_reason is not None:
                    yield writer.delta(delta)
        if wants_usage or self._wants_timeline:
            usage = answers.usage(rendered.num_prompt_tokens, generation.num_tokens)
            yield writer.last(usage if wants_usage else None, self._timeline())
        self._exchange.complete()
        yield answers.DONE

    async def _observed(
        self, generation: Generation, rendered: RenderedRequest
    ) -> AsyncGenerator[Delta]:
        """The deltas, with the times and counts that metrics want."""
        metrics = self._context.metrics
        started = time.perf_counter()
        is_first = True
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    if is_first:
                        metrics.first_token.observe(time.perf_counter() - self._exchange.started)
                        is_first = False
                    yield delta
        finally:
            rendering = rendered.processing_s
            self._exchange.timeline.add(
                "engine", max(0.0, time.perf_counter() - started - rendering)
            )
            metrics.prompt_tokens.add(rendered.num_prompt_tokens)
            metrics.answer_tokens.add(generation.num_tokens)

    def _headers(self) -> dict[str, str]:
        if not self._wants_timeline:
            return {}
        return {"server-timing": self._exchange.timeline.server_timing()}

    def _timeline(self) -> dict[str, Any]:
        return {"timeline": self._exchange.timeline.to_dict()} if self._wants_timeline else {}
