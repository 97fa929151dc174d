"""What answers while the model is being loaded: that it is."""

from __future__ import annotations

import json
import os
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from lazydecode.errors import OverloadedError
from lazydecode.server.error_mapping import map_error

RETRY_AFTER_S: Final = 1


class Doorway:
    """An ASGI application that says 503 until it is opened, and then is the one behind it."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """Let all requests from now on through to `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        assert scope["type"] == "http"
        request_id = os.urandom(16).hex()
        if scope["path"] == "/health":
            answer: dict[str, object] = {"status": "loading"}
        else:
            error = OverloadedError("the model is being loaded", retry_after_s=RETRY_AFTER_S)
            answer = map_error(error, request_id=request_id).body
        body = json.dumps(answer).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(RETRY_AFTER_S).encode()),
            (b"x-request-id", request_id.encode()),
            # A request's body, which is not read here, would be taken for the next request.
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})
