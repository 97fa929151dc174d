"""`/health`, `/version`, `/metrics`, `/v1/models` and `/reset_mm_cache`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from lazydecode import __version__
from lazydecode.errors import NotFoundError
from lazydecode.server.context import ServerContext
from lazydecode.server.exchange import Exchange
from lazydecode.server.metrics import CONTENT_TYPE


async def health(context: ServerContext, exchange: Exchange) -> None:
    """200 while requests are served; 503 while the engine or a worker is away."""
    healthy = context.is_healthy
    part = "a worker" if context.engine.is_alive else "the engine"
    status = "ok" if healthy else f"{part} is being restarted"
    await exchange.answer_json(200 if healthy else 503, {"status": status})


async def version(context: ServerContext, exchange: Exchange) -> None:
    """The version of this software."""
    await exchange.answer_json(200, {"version": __version__})


async def metrics(context: ServerContext, exchange: Exchange) -> None:
    """Prometheus' text form; built on a thread, since it takes some milliseconds."""
    text = await asyncio.to_thread(context.render_metrics)
    await exchange.answer(200, text, content_type=CONTENT_TYPE)


async def reset_mm_cache(context: ServerContext, exchange: Exchange) -> None:
    """Empty the caches of processed items, the engine's too; answer what they held.

    All workers do; what the answer says is what the one held that gives it.
    """
    cleared = await context.clear_caches()
    await exchange.answer_json(200, {"cleared": asdict(cleared)})


async def list_models(context: ServerContext, exchange: Exchange) -> None:
    """OpenAI's list of models: the one that is served, under each of its names."""
    models = [_model(context, name) for name in context.model_names]
    await exchange.answer_json(200, {"object": "list", "data": models})


async def show_model(context: ServerContext, exchange: Exchange) -> None:
    """One model by name."""
    name = exchange.scope["path_params"]["model"]
    if name not in context.model_names:
        raise NotFoundError(f"the model {name!r} is not served here", parameter="model")
    await exchange.answer_json(200, _model(context, name))


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "lazydecode",
        "root": context.frontend.model_id,
        "max_model_len": context.max_model_len,
        "modalities": list(context.frontend.modalities),
    }
