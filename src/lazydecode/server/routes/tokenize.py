"""`POST /tokenize`, `/detokenize` and `/v1/chat/completions/count`: tokens, without an answer.

Media count by their headers where the model allows it. The processor caches are asked, and are
afterwards as they were before.
"""

from __future__ import annotations

import uuid
from typing import Any

from lazydecode.inputs import MultiModalInput
from lazydecode.models.token_ids import check_token_ids
from lazydecode.renderers.hold import EncodedHold
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.requests import (
    ParsedRequest,
    check_against_settings,
    check_model,
    read_body_as,
    read_request,
    render_request,
    timeline_wanted,
)
from lazydecode.server.tokenizing import Tokenizing, parse_detokenize, parse_tokenize


async def tokenize(context: ServerContext, exchange: Exchange) -> None:
    """Answer the token ids of a text, or of a chat request with all its media expanded."""
    async with EncodedHold(context.renderer.encoded_budget) as hold:
        given = await read_body_as(context, exchange, parse_tokenize, hold)
        check_against_settings(context, given.chat)
        await exchange.run_while_connected(_answer_tokens(context, exchange, given, hold))


async def _answer_tokens(
    context: ServerContext, exchange: Exchange, given: Tokenizing, hold: EncodedHold
) -> None:
    frontend, text = context.frontend, given.text
    on_tokenizer = context.renderer.prompts.on_thread
    if text is not None:
        context.renderer.prompts.check_text(text, parameter="prompt")
        token_ids = await on_tokenizer(lambda: frontend.encode(text, given.add_special_tokens))
    else:
        parsed = ParsedRequest(given.chat, given.conversation, hold)
        token_ids = (await _count(context, exchange, parsed))["prompt_token_ids"]
    strings = None
    if given.wants_strings:
        strings = await on_tokenizer(lambda: frontend.prompt_tokenizer.spellings(token_ids))
    await exchange.answer_json(
        200,
        {
            "count": len(token_ids),
            "max_model_len": context.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        },
    )


async def detokenize(context: ServerContext, exchange: Exchange) -> None:
    """Answer the text of token ids, control tokens included."""
    frontend = context.frontend
    async with EncodedHold(context.renderer.encoded_budget) as hold:
        given = await read_body_as(context, exchange, parse_detokenize, hold)
        check_model(context, given.model)
        context.renderer.prompts.check_token_count(given.tokens, parameter="tokens")

        def decode() -> str:
            check_token_ids(given.tokens, frontend.vocabulary_size, parameter="tokens")
            return frontend.decode(given.tokens, skip_special_tokens=False)

        text = await context.renderer.prompts.on_thread(decode)
    await exchange.answer_json(200, {"prompt": text})


async def count_tokens(context: ServerContext, exchange: Exchange) -> None:
    """Answer how many tokens a chat request has, in all and for each of its media."""
    async with EncodedHold(context.renderer.encoded_budget) as hold:
        parsed = await read_request(context, exchange, hold)
        await exchange.run_while_connected(_answer_count(context, exchange, parsed))


async def _answer_count(context: ServerContext, exchange: Exchange, parsed: ParsedRequest) -> None:
    prompt = await _count(context, exchange, parsed)
    body = {
        "count": len(prompt["prompt_token_ids"]),
        "max_model_len": context.max_model_len,
        "items": count_items(prompt),
    }
    headers: dict[str, str] = {}
    extra: dict[str, Any] = {}
    if timeline_wanted(exchange, parsed.request):
        headers = {"server-timing": exchange.timeline.server_timing()}
        extra = {"timeline": exchange.timeline.to_dict()}
    await exchange.answer_json(200, body | extra, headers=headers)


async def _count(
    context: ServerContext, exchange: Exchange, parsed: ParsedRequest
) -> MultiModalInput:
    async with context.renderer.open(
        render_request(parsed, f"count-{uuid.uuid4().hex}"),
        timeline=exchange.timeline,
        hold=parsed.hold,
        purpose="count",
    ) as rendered:
        return await rendered.count()


def count_items(prompt: MultiModalInput) -> list[dict[str, Any]]:
    """Return the tokens of each item that the client sent, in the order of the prompt.

    The chunks that a model takes a video in are the client's one video.
    """
    origins = prompt.get("mm_origins", {})
    places = sorted(
        (
            (place, *(origins[modality][index] if modality in origins else (modality, index)))
            for modality, group in prompt["mm_placeholders"].items()
            for index, place in enumerate(group)
        ),
        key=lambda entry: entry[0].offset,
    )
    items: dict[tuple[str, int], dict[str, Any]] = {}
    for place, modality, index in places:
        item = items.setdefault(
            (modality, index),
            {"modality": modality, "index": index, "tokens": 0, "embeddings": 0},
        )
        item["tokens"] += place.length
        item["embeddings"] += place.num_embeds
    return list(items.values())
