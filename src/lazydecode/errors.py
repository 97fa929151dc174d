"""Every error that lazydecode raises for something a request can cause.

    LazyDecodeError                      500
    ├── InvalidRequestError              400  the request itself is wrong
    │   ├── ValidationError              400  one named parameter is out of range
    │   │   └── PluginError              400  it names a plug-in that cannot be used
    │   ├── BlockedURLError              400  the URL policy refuses this URL
    │   ├── TooManyItemsError            400  more media items than the model or the server takes
    │   ├── MissingMediaError            400  an item without data that the cache does not hold
    │   ├── UuidConflictError            400  a uuid that stands for other media already
    │   ├── PlaceholderMismatchError     400  the prompt's placeholders do not fit the items
    │   ├── AuthenticationError          401
    │   ├── NotFoundError                404  unknown model or route
    │   └── RequestTooLargeError         413  the body is over the configured size
    ├── UnprocessableMediaError          422  the media cannot be used
    │   ├── CorruptMediaError            422  no decoder reads it
    │   ├── MediaTooLargeError           422  encoded or decoded size over a limit
    │   ├── PluginFailedError            422  a plug-in failed on the item; the log says how
    │   └── OriginRefusedError           422  the origin answered 4xx
    ├── FetchError                       502  retryable: the origin could not be reached or failed
    │   └── FetchTimeoutError            504  retryable
    ├── TimeLimitError                   504  retryable: the server's own time limit was reached
    ├── WorkerDiedError                  503  retryable: the item's process died, also the next
    ├── PluginBrokenError                500  a plug-in failed, and no item is to blame
    ├── OverloadedError                  503  retryable, with Retry-After: queue or budget full
    └── EngineError                      500
        ├── EngineDeadError              503  retryable: the engine process went away
        └── CacheMissError               internal: the receiver lacks items; the sender repairs it

Misuse by the calling programmer is a plain `ValueError` or `TypeError`. The classes below
that stand for bad values are `ValueError`s as well, so library callers can catch either.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self


class LazyDecodeError(Exception):
    """Base of all our errors: a message for the caller, and where it belongs."""

    status: ClassVar[int] = 500
    """HTTP status of the answer."""
    error_type: ClassVar[str] = "InternalServerError"
    """The `type` field of OpenAI's error object."""
    retryable: ClassVar[bool] = False
    """Whether the same request can succeed later, unchanged."""

    def __init__(
        self,
        message: str,
        *,
        modality: str | None = None,
        index: int | None = None,
        parameter: str | None = None,
        value: Any = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.modality = modality
        self.index = index
        self.parameter = parameter
        self.value = value
        self.retry_after_s = retry_after_s

    def at(self, modality: str, index: int) -> Self:
        """Return a new error of this class that also names the item.

        A new object each time: requests that share one decode have different indices.
        """
        return type(self)(
            self.message,
            modality=modality,
            index=index,
            parameter=self.parameter,
            value=self.value,
            retry_after_s=self.retry_after_s,
        )

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        state = {
            "modality": self.modality,
            "index": self.index,
            "parameter": self.parameter,
            "value": self.value,
            "retry_after_s": self.retry_after_s,
        }
        return _rebuild, (type(self), self.message, state)


def _rebuild(cls: type[LazyDecodeError], message: str, state: dict[str, Any]) -> LazyDecodeError:
    return cls(message, **state)


class InvalidRequestError(LazyDecodeError, ValueError):
    """The request is malformed or asks for something that is not allowed."""

    status = 400
    error_type = "BadRequestError"


class ValidationError(InvalidRequestError):
    """One named parameter is out of range; `parameter` and `value` say which and how."""


class PluginError(ValidationError):
    """A part that another installed package offers cannot be used; names both and says why."""


class BlockedURLError(InvalidRequestError):
    """The URL policy refuses this URL; nothing was connected to or opened."""


class TooManyItemsError(InvalidRequestError):
    """The request has more items of a modality than the model or the server takes."""


class MissingMediaError(InvalidRequestError):
    """The request names an item by its uuid alone, and the cache does not hold it."""


class UuidConflictError(InvalidRequestError):
    """A uuid came with other media than it stands for; only with `--uuid-conflict error`."""


class PlaceholderMismatchError(InvalidRequestError, RuntimeError):
    """The prompt has fewer placeholders, or others, than the request has items."""


class AuthenticationError(InvalidRequestError):
    """The API key is missing or wrong."""

    status = 401
    error_type = "AuthenticationError"


class NotFoundError(InvalidRequestError):
    """The model or route does not exist."""

    status = 404
    error_type = "NotFoundError"


class RequestTooLargeError(InvalidRequestError):
    """The request body is larger than the server accepts."""

    status = 413
    error_type = "RequestTooLargeError"


class RequestTimeoutError(LazyDecodeError):
    """The client did not send its request in time."""

    status = 408
    error_type = "RequestTimeoutError"


class UnprocessableMediaError(LazyDecodeError, ValueError):
    """The request is well formed, but one of its media items cannot be used."""

    status = 422
    error_type = "UnprocessableEntityError"


class CorruptMediaError(UnprocessableMediaError):
    """No decoder could read the item: truncated, damaged, or of an unsupported format."""


class MediaTooLargeError(UnprocessableMediaError):
    """The item is over a limit on encoded bytes, pixels, duration or decoded bytes."""


class PluginFailedError(UnprocessableMediaError):
    """A part from another package failed on the item; the log has its traceback."""


class PayloadChangedError(UnprocessableMediaError):
    """The source has other bytes now than when it was identified: it is to be fetched anew."""

    retryable = True


class OriginRefusedError(UnprocessableMediaError):
    """The origin answered that the client may not have this (a 4xx other than 408 and 429)."""


class FetchError(LazyDecodeError):
    """The origin could not be reached, or failed, after all retries."""

    status = 502
    error_type = "BadGatewayError"
    retryable = True


class FetchTimeoutError(FetchError):
    """The origin did not deliver in time."""

    status = 504
    error_type = "GatewayTimeoutError"


class TimeLimitError(LazyDecodeError):
    """The request, or one of its items, took longer than the server allows."""

    status = 504
    error_type = "GatewayTimeoutError"
    retryable = True


class WorkerDiedError(LazyDecodeError):
    """The process that worked on the item died, and so did the next one that tried."""

    status = 503
    error_type = "ServiceUnavailableError"
    retryable = True


class PluginBrokenError(LazyDecodeError):
    """A part from another package failed, and no item can be blamed; the log names it."""


class OverloadedError(LazyDecodeError):
    """A queue or a budget is full, or too much is open; `retry_after_s` says when to come back."""

    status = 503
    error_type = "ServiceUnavailableError"
    retryable = True


class EngineError(LazyDecodeError):
    """The engine failed on a request that the front end had accepted."""


class EngineDeadError(EngineError):
    """The engine process went away; it is being restarted."""

    status = 503
    error_type = "ServiceUnavailableError"
    retryable = True


class CacheMissError(EngineError):
    """The receiver cache does not hold items that were sent by name only.

    Never reaches a client: the front end invalidates `hashes` and sends the items again.
    """

    def __init__(self, hashes: list[str], **where: Any) -> None:
        super().__init__(f"{len(hashes)} items are not in the receiver cache", **where)
        self.hashes = hashes

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheMissError, (self.hashes,)


def forget_frames(error: BaseException) -> None:
    """Let go of what the frames hold through which an error and its causes came.

    Such a frame holds the request or the payload, and mostly what holds the error: a circle that
    would keep them until the collector comes by, long after their memory was counted as given
    back. For whoever has logged the error, or knows that nobody will.
    """
    pending, seen = [error], set[int]()
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        found.__traceback__ = None
        pending += [near for near in (found.__cause__, found.__context__) if near is not None]
        if isinstance(found, BaseExceptionGroup):
            pending += found.exceptions
