"""One table turns exceptions into answers: status, headers, OpenAI's error object."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from lazydecode.errors import LazyDecodeError, PluginFailedError, ValidationError

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_MAX_CHARS = 2000
"""Of each text in an answer: a client's own words are not handed back to it by the megabyte."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What the client gets instead of an answer."""

    status: int
    body: dict[str, Any]
    """`{"error": {...}}`."""
    headers: dict[str, str]


def map_error(exc: BaseException, *, request_id: str) -> ErrorAnswer:
    """Return the answer for `exc`; what is our fault is logged, and named by id only."""
    if isinstance(exc, LazyDecodeError) and exc.status != 500:
        return _known(exc, request_id)
    logger.error("request %s failed", request_id, exc_info=exc)
    error = {
        "message": f"internal error; the server's log has the details of request {request_id}",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
        "request_id": request_id,
        "retryable": False,
    }
    return ErrorAnswer(500, {"error": error}, {})


def _known(exc: LazyDecodeError, request_id: str) -> ErrorAnswer:
    if isinstance(exc, PluginFailedError):
        # How it failed was logged where it did, maybe in another process.
        logger.error("request %s: %s", request_id, _bounded(exc.message))
    error: dict[str, Any] = {
        "message": _bounded(exc.message),
        "type": exc.error_type,
        "param": None if exc.parameter is None else _bounded(exc.parameter),
        "code": exc.status,
        "request_id": request_id,
        "retryable": exc.retryable,
    }
    if exc.modality is not None:
        error["modality"] = exc.modality
    if exc.index is not None:
        error["index"] = exc.index
        prefix = f"{exc.modality} {exc.index}"
        if not _names_index(exc.message, exc.index):
            error["message"] = f"{prefix}: {_bounded(exc.message)}"
    if isinstance(exc, ValidationError) and isinstance(exc.value, bool | int | float | str):
        error["value"] = _bounded(exc.value) if isinstance(exc.value, str) else exc.value
    headers = {}
    if exc.retryable:
        delay = _RETRY_AFTER_S if exc.retry_after_s is None else exc.retry_after_s
        headers["Retry-After"] = str(max(1, math.ceil(delay)))
    if exc.status in (408, 413):
        # The rest of the body is not waited for.
        headers["Connection"] = "close"
    if exc.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorAnswer(exc.status, {"error": error}, headers)


def _bounded(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"


def _names_index(message: str, index: int) -> bool:
    """Whether the text already says which item, as `... at index 1: ...` or `...[1]`."""
    return f"index {index}" in message or message.startswith("messages[")
