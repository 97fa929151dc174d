"""What foreign decoders raise, as our errors: one border for all kinds of media."""

from __future__ import annotations

import errno
import logging
import re
from typing import Final

from lazydecode.errors import (
    CorruptMediaError,
    LazyDecodeError,
    MediaTooLargeError,
    OverloadedError,
)
from lazydecode.on_error import OnError

logger = logging.getLogger(__name__)

_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
_NO_THREAD: Final = "can't start new thread"
"""What CPython says, in a `RuntimeError` of no class of its own."""
_OBJECT_REPR: Final = re.compile(r"<[^<>]*\bat 0x[0-9a-fA-F]+[^<>]*>")
_CLASS_REPR: Final = re.compile(r"<(?:class|enum) '(?:\w+\.)*(\w+)'>")
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{6,}")
_PATH: Final = re.compile(r"(?<![\w:/])/(?:[\w.+-]+/)+[\w.+-]*")
_MAX_CHARS: Final = 200


def describe(exc: BaseException) -> str:
    """Return what `exc` says, fit for a client: one line, no addresses, objects or paths,
    and classes by their last name."""
    text = " ".join(str(exc).split())
    text = _OBJECT_REPR.sub("the data", text)
    text = _CLASS_REPR.sub(r"\1", text)
    text = _ADDRESS.sub("an address", text)
    text = _PATH.sub("a file", text)
    if len(text) > _MAX_CHARS:
        text = text[: _MAX_CHARS - 1] + "…"
    return text or type(exc).__name__


def shortage(exc: BaseException) -> OverloadedError | None:
    """Return the error for what this machine lacks, whatever file it was needed for.

    None: `exc` tells of no such shortage. Memory is none: a file may have asked for too much.
    """
    no_descriptor = isinstance(exc, OSError) and exc.errno in _NO_DESCRIPTOR
    if not no_descriptor and not (isinstance(exc, RuntimeError) and _NO_THREAD in str(exc)):
        return None
    logger.warning("the limits of this process are too low: %s", describe(exc))
    return OverloadedError("the server has too much open to take the item; try again later")


def corrupt_on_failure(prefix: str) -> OnError:
    """Turn any exception of a decoder into `CorruptMediaError("{prefix}: {what it said}")`.

    Our own errors pass unchanged, and a `shortage` is no fault of the file's. A decoder that asks
    for more memory than there is was told to by the file, so `MemoryError` becomes
    `MediaTooLargeError`.
    """

    def handle(exc: BaseException) -> None:
        if isinstance(exc, LazyDecodeError) or not isinstance(exc, Exception):
            return
        if (lacking := shortage(exc)) is not None:
            raise lacking from exc
        if isinstance(exc, MemoryError):
            raise MediaTooLargeError(f"{prefix}: it needs more memory than there is") from exc
        # Decoders raise what they like: SyntaxError for a broken PNG chunk, struct.error,
        # zlib.error, IndexError, even AttributeError. Whatever it is, the file made it happen.
        raise CorruptMediaError(f"{prefix}: {describe(exc)}") from exc

    return OnError(handle)
