"""What one fetch did and how long its steps took, for timelines and metrics."""

from __future__ import annotations

import contextvars
import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lazydecode.media.known_texts import TextTag

FetchSource: TypeAlias = Literal["", "data", "file", "http", "disk"]
"""Where a payload came from; empty: a transport that does not say."""


@dataclass(slots=True)
class FetchTrace:
    """What one fetch did and how long it took; filled while `trace_fetch` is open."""

    tenant: str | None = None
    """Who it is for. This and the next are told to the fetch."""
    tag: TextTag | None = None
    """Of the base64 text in the URL, if it was made."""
    url: object = field(default=None, repr=False)
    """What the tag was made of; None when the fetch has ended."""
    source: FetchSource = ""
    is_shared: bool = False
    """Whether the download of a concurrent fetch was joined."""
    num_bytes: int = 0
    num_attempts: int = 0
    fetch_s: float = 0.0
    """Until the encoded bytes were there; includes base64 and reading a file."""
    digest_s: float = 0.0
    """Building the refs, and the digest unless the bytes came by http."""

    def tag_of(self, url: object) -> TextTag | None:
        """Return the tag, if it is that of this very URL: a plug-in may fetch another one."""
        return self.tag if url is self.url else None


_trace: contextvars.ContextVar[FetchTrace | None] = contextvars.ContextVar(
    "lazydecode_fetch_trace", default=None
)


class trace_fetch:  # noqa: N801 - a context that reads like a function
    """Record the fetch that is awaited inside the block, in what the block is given.

    Args:
        tenant: Who it is for: nobody can tell from the time it takes what others have sent.
        url: The URL that is fetched.
        tag: Of the base64 text in it, if it was made.
    """

    __slots__ = ("_token", "_trace")

    def __init__(
        self, tenant: str | None = None, url: object = None, tag: TextTag | None = None
    ) -> None:
        self._trace = FetchTrace(tenant, tag, url)

    def __enter__(self) -> FetchTrace:
        self._token = _trace.set(self._trace)
        return self._trace

    def __exit__(self, *_: object) -> None:
        _trace.reset(self._token)
        self._trace.url = None  # a view of a request's body, which may go


def current_trace() -> FetchTrace | None:
    """The trace that the running fetch is to fill, if anyone asked for one."""
    return _trace.get()


def fill_trace(
    trace: FetchTrace | None,
    source: FetchSource,
    num_bytes: int,
    start: float,
    fetched: float,
) -> None:
    """Note where a payload came from, and how long that and its digest took until now.

    Args:
        trace: What is filled, if anyone asked for it.
        source: Where it came from.
        num_bytes: Its length.
        start: When the fetch began.
        fetched: When its bytes were there.
    """
    if trace:
        trace.source, trace.num_bytes = source, num_bytes
        trace.fetch_s = fetched - start
        trace.digest_s = time.perf_counter() - fetched
