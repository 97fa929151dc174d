"""What one fetch did and how long its steps took, for timelines and metrics."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class FetchTrace:
    """What one fetch did and how long it took; filled while `trace_fetch` is open."""

    source: Literal["", "data", "file", "http", "disk"] = ""
    is_shared: bool = False
    """Whether the download of a concurrent fetch was joined."""
    num_bytes: int = 0
    num_attempts: int = 0
    fetch_s: float = 0.0
    """Until the encoded bytes were there; includes base64 and reading a file."""
    digest_s: float = 0.0
    """Building the refs, and the digest unless the bytes came by http."""


_trace: contextvars.ContextVar[FetchTrace | None] = contextvars.ContextVar(
    "lazydecode_fetch_trace", default=None
)


@contextmanager
def trace_fetch() -> Iterator[FetchTrace]:
    """Record the fetch that is awaited inside the block."""
    trace = FetchTrace()
    token = _trace.set(trace)
    try:
        yield trace
    finally:
        _trace.reset(token)


def current_trace() -> FetchTrace | None:
    """The trace that the running fetch is to fill, if anyone asked for one."""
    return _trace.get()
