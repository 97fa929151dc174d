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


class ItemCountError(RuntimeError):
    """Code of ours or of a model family returned more or fewer parts than there are items."""


def check_count(what: str, modality: str, num_parts: int, num_items: int) -> None:
    """Check that there is one part for each item.

    Raises:
        ItemCountError: If not.
    """
    if num_parts != num_items:
        raise ItemCountError(f"there are {what} for {num_parts} of {num_items} {modality} items")


def process_error(modality: str, index: int, cause: Exception) -> Exception:
    """Return the error for an item that the model's processor did not take.

    A wrong number of results is not the item's fault and stays what it is.
    """
    if isinstance(cause, ItemCountError):
        return cause
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
