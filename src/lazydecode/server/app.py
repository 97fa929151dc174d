"""The ASGI application: routes and their order of life."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lazydecode.server.context import ServerContext
from lazydecode.server.endpoint import Endpoint
from lazydecode.server.routes import chat, render, system, tokenize, transcriptions


def create_app(context: ServerContext, *, runs_context: bool = True) -> Starlette:
    """Return the application over `context`.

    Args:
        context: The server's parts.
        runs_context: Whether the application's lifespan starts and closes them; False if the
            caller does.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with context.running() if runs_context else contextlib.nullcontext():
            yield

    routes = [
        Route(
            "/v1/chat/completions",
            Endpoint(context, "chat", chat.create_completion, limited=True),
            methods=["POST"],
        ),
        Route(
            "/v1/chat/completions/render",
            Endpoint(context, "render", render.render_completion, limited=True),
            methods=["POST"],
        ),
        Route(
            "/v1/audio/transcriptions",
            Endpoint(context, "transcriptions", transcriptions.create_transcription, limited=True),
            methods=["POST"],
        ),
        Route(
            "/v1/audio/translations",
            Endpoint(context, "translations", transcriptions.create_translation, limited=True),
            methods=["POST"],
        ),
        Route(
            "/v1/chat/completions/count",
            Endpoint(context, "count", tokenize.count_tokens, limited=True),
            methods=["POST"],
        ),
        Route(
            "/tokenize",
            Endpoint(context, "tokenize", tokenize.tokenize, limited=True),
            methods=["POST"],
        ),
        Route(
            "/detokenize",
            Endpoint(context, "detokenize", tokenize.detokenize, limited=True),
            methods=["POST"],
        ),
        Route(
            "/reset_mm_cache",
            Endpoint(context, "reset_mm_cache", system.reset_mm_cache),
            methods=["POST"],
        ),
        Route("/v1/models", Endpoint(context, "models", system.list_models), methods=["GET"]),
        Route(
            "/v1/models/{model:path}",
            Endpoint(context, "models", system.show_model),
            methods=["GET"],
        ),
        Route(
            "/health", Endpoint(context, "health", system.health, needs_key=False), methods=["GET"]
        ),
        Route(
            "/metrics",
            Endpoint(context, "metrics", system.metrics, needs_key=False),
            methods=["GET"],
        ),
        Route(
            "/version",
            Endpoint(context, "version", system.version, needs_key=False),
            methods=["GET"],
        ),
    ]
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error}
    )


async def _http_error(request: Request, exc: Exception) -> Response:
    """Unknown routes and methods, in the same form as every other error."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    headers = exc.headers if isinstance(exc, HTTPException) else None
    message = f"{request.method} is not allowed here" if status == 405 else "no such route"
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status, headers=dict(headers or {}))
