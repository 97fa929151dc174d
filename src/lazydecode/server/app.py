"""The ASGI application: routes and their order of life."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lazydecode.server.context import ServerContext
from lazydecode.server.endpoint import Endpoint, Handler
from lazydecode.server.exchange import choose_request_id
from lazydecode.server.routes import chat, render, system, timeline, tokenize, transcriptions


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

    def post(path: str, name: str, handler: Handler, *, limited: bool = True) -> Route:
        endpoint = Endpoint(context, name, handler, limited=limited)
        return Route(path, endpoint, methods=["POST"])

    def get(path: str, name: str, handler: Handler, *, needs_key: bool = True) -> Route:
        endpoint = Endpoint(context, name, handler, needs_key=needs_key)
        return Route(path, endpoint, methods=["GET"])

    routes = [
        post("/v1/chat/completions", "chat", chat.create_completion),
        post("/v1/chat/completions/render", "render", render.render_completion),
        post("/v1/chat/completions/count", "count", tokenize.count_tokens),
        post("/v1/audio/transcriptions", "transcriptions", transcriptions.create_transcription),
        post("/v1/audio/translations", "translations", transcriptions.create_translation),
        post("/tokenize", "tokenize", tokenize.tokenize),
        post("/detokenize", "detokenize", tokenize.detokenize),
        post("/reset_mm_cache", "reset_mm_cache", system.reset_mm_cache, limited=False),
        get("/v1/models", "models", system.list_models),
        get("/v1/models/{model:path}", "models", system.show_model),
        get("/timeline", "timeline", timeline.show_page),
        get("/timeline.json", "timeline", timeline.show_json),
        get("/health", "health", system.health, needs_key=False),
        get("/metrics", "metrics", system.metrics, needs_key=False),
        get("/version", "version", system.version, needs_key=False),
    ]
    app = _App(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    app.posts = {route.path: route.endpoint for route in routes if "POST" in (route.methods or ())}
    return app


class _App(Starlette):
    """Starlette, with a short way to the endpoints that are posted to.

    An endpoint answers every error itself, so that Starlette's layers around it do nothing but
    be called for each message: 40 of the 500 µs that a short text takes.
    """

    posts: Mapping[str, ASGIApp]
    """Path -> endpoint."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the application's life."""
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self.posts.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


async def _http_error(request: Request, exc: Exception) -> Response:
    """Unknown routes and methods, in the same form as every other error."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    headers = exc.headers if isinstance(exc, HTTPException) else None
    message = f"{request.method} is not allowed here" if status == 405 else "no such route"
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    request_id = choose_request_id(request.headers.get("x-request-id", ""))
    error = {
        "message": message,
        "type": kind,
        "param": None,
        "code": status,
        "request_id": request_id,
        "retryable": False,
    }
    return JSONResponse(
        {"error": error}, status, headers={**(headers or {}), "x-request-id": request_id}
    )
