"""What failed for which item, in words for the client."""

from __future__ import annotations

from lazydecode.errors import CorruptMediaError, LazyDecodeError, UnprocessableMediaError
from lazydecode.media.faults import describe


def decode_error(modality: str, index: int, cause: Exception) -> LazyDecodeError:
    """Return the error for an item that could not be decoded.

    Args:
        modality: The item's modality.
        index: Its position as the client counts.
        cause: What the decoder raised. One of our own keeps its class.
    """
    return _located("Failed to decode {modality} media at index {index}: ", modality, index, cause)


def process_error(modality: str, index: int, cause: Exception) -> LazyDecodeError:
    """Return the error for an item that the model's processor did not take."""
    return _located("Failed to process {modality} media at index {index}: ", modality, index, cause)


def _located(prefix: str, modality: str, index: int, cause: Exception) -> LazyDecodeError:
    prefix = prefix.format(modality=modality, index=index)
    if isinstance(cause, LazyDecodeError):
        # Wrapped before, for example by a late decode within processing: it says it already.
        if cause.modality is not None and cause.index is not None:
            return cause.at(modality, index)
        error = cause.at(modality, index)
        error.message = prefix + cause.message
        error.args = (error.message,)
        return error
    # What decoders raise for bad bytes; anything else is not known to be the file's fault.
    is_corrupt = isinstance(cause, OSError | SyntaxError | ValueError)
    kind = CorruptMediaError if is_corrupt else UnprocessableMediaError
    return kind(prefix + describe(cause), modality=modality, index=index)
