"""What the render route and `lazydecode render` have in common: a request's JSON answer."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import torch

from lazydecode.engine.wire import is_at_hand
from lazydecode.inputs import MultiModalInput
from lazydecode.renderers.hold import EncodedHold
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.body import ReadBody, parse_body
from lazydecode.server.context import ServerContext
from lazydecode.server.features import AnswerBody, build_answer
from lazydecode.server.protocol import Payload
from lazydecode.server.requests import ParsedRequest, check_against_settings, render_request
from lazydecode.server.sampling import build_sampling

_INLINE_TOKENS: Final = 32 * 1024
"""Up to here writing an answer without tensors takes 0.2 ms at most, no more than a thread hop."""
_INLINE_ITEMS: Final = 16
"""Each adds some 10 µs for its grids, and several times that in the form of tensors."""


async def render_answer(
    context: ServerContext,
    parsed: ParsedRequest,
    *,
    timeline: Timeline,
    shows_timeline: bool = False,
    packed: bool = False,
) -> AnswerBody:
    """Render a request and return the answer, as JSON or as MessagePack.

    Raises:
        LazyDecodeError: If it cannot be rendered.
    """
    request = parsed.request
    payload = request.mm_payload or "tensors"
    with_payload = payload == "tensors"
    sampling = build_sampling(request, context.default_sampling)
    renderer = context.renderer
    request_id = f"chatcmpl-{os.urandom(16).hex()}"
    async with renderer.open(
        render_request(parsed, request_id), timeline=timeline, hold=parsed.hold
    ) as rendered:
        prompt = await rendered.render(with_payload=with_payload)
    context.metrics.prompt_tokens.add(len(prompt["prompt_token_ids"]))
    fields = {
        "request_id": request_id,
        "model": request.model or context.model_names[0],
        "stream": bool(request.stream),
        "priority": 0,
        "cache_salt": request.cache_salt,
    }

    def build() -> AnswerBody:
        return build_answer(
            prompt,
            fields,
            sampling,
            payload=payload,
            dtype=context.dtype,
            timeline=timeline if shows_timeline else None,
            packed=packed,
        )

    num_items = sum(map(len, prompt["mm_hashes"].values()))
    is_short = num_items <= _INLINE_ITEMS and len(prompt["prompt_token_ids"]) <= _INLINE_TOKENS
    if is_short and (not with_payload or _are_at_hand(prompt, context.dtype)):
        return build()
    # Casting tensors takes milliseconds per MB: not on the event loop.
    return await asyncio.get_running_loop().run_in_executor(renderer.executor.quick, build)


def _are_at_hand(prompt: MultiModalInput, dtype: torch.dtype) -> bool:
    """Whether no tensor has to be cast or copied before it is written."""
    return all(
        item is None or is_at_hand(item, dtype=dtype)
        for items in prompt["mm_kwargs"].values()
        for item in items
    )


async def render_offline(
    context: ServerContext, body: bytes, *, payload: Payload | None = None
) -> AnswerBody:
    """Do for a body what the route does; `payload` replaces its `mm_payload`.

    Raises:
        LazyDecodeError: If it is malformed or cannot be rendered.
    """
    request, conversation = parse_body(ReadBody(memoryview(body)), context.renderer.known_texts)
    check_against_settings(context, request)
    if payload is not None:
        request.mm_payload = payload
    timeline = Timeline()
    return await render_answer(
        context,
        ParsedRequest(request, conversation, EncodedHold(context.renderer.encoded_budget)),
        timeline=timeline,
        shows_timeline=bool(request.timeline),
    )
