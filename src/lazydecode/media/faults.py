"""What foreign decoders raise, as our errors: one border for all kinds of media."""

from __future__ import annotations

import re
from typing import Final

from lazydecode.errors import CorruptMediaError, LazyDecodeError, MediaTooLargeError
from lazydecode.on_error import OnError

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


def corrupt_on_failure(prefix: str) -> OnError:
    """Turn any exception of a decoder into `CorruptMediaError("{prefix}: {what it said}")`.

    Our own errors pass unchanged. A decoder that asks for more memory than there is was told
    to by the file, so `MemoryError` becomes `MediaTooLargeError`.
    """

    def handle(exc: BaseException) -> None:
        if isinstance(exc, LazyDecodeError) or not isinstance(exc, Exception):
            return
        if isinstance(exc, MemoryError):
            raise MediaTooLargeError(f"{prefix}: it needs more memory than there is") from exc
        # Decoders raise what they like: SyntaxError for a broken PNG chunk, struct.error,
        # zlib.error, IndexError, even AttributeError. Whatever it is, the file made it happen.
        raise CorruptMediaError(f"{prefix}: {describe(exc)}") from exc

    return OnError(handle)
