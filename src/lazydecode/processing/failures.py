"""What failed for which item, in words for the client."""

from __future__ import annotations

from lazydecode.errors import (
    CorruptMediaError,
    LazyDecodeError,
    TimeLimitError,
    UnprocessableMediaError,
)
from lazydecode.media.faults import describe


class ItemCountError(RuntimeError):
    """Code of ours or of a model family returned more or fewer parts than there are items."""


def check_count(what: str, modality: str, num_parts: int, num_items: int) -> None:
    """Check that there is one part for each item.

    Raises:
        ItemCountError: If not.
    """
    if num_parts != num_items:
        raise ItemCountError(f"there are {what} for {num_parts} of {num_items} {modality} items")


def decode_error(modality: str, index: int, cause: Exception) -> LazyDecodeError:
    """Return the error for an item that could not be decoded.

    Args:
        modality: The item's modality.
        index: Its position as the client counts.
        cause: What the decoder raised. One of our own keeps its class.
    """
    # What decoders raise for bad bytes; anything else is not known to be the file's fault.
    is_corrupt = isinstance(cause, OSError | SyntaxError | ValueError)
    kind = CorruptMediaError if is_corrupt else UnprocessableMediaError
    return _located("decode", modality, index, cause, kind)


def time_limit_error(limit_s: float) -> TimeLimitError:
    """Return the error for an item on which somebody works for too long."""
    return TimeLimitError(f"it takes longer than the {limit_s:g} s that the server allows")


def process_error(modality: str, index: int, cause: Exception) -> Exception:
    """Return the error for an item that the model's processor did not take.

    A wrong number of results is not the item's fault and stays what it is.
    """
    if isinstance(cause, ItemCountError):
        return cause
    return _located("process", modality, index, cause, UnprocessableMediaError)


def of_sound(error: LazyDecodeError, index: int, video: int) -> LazyDecodeError:
    """Return the error of an audio item that is the sound of a video, named as the video's.

    Args:
        error: Names the audio item.
        index: Its number.
        video: The video's position as the client counts.
    """
    named = error.at("video", video)
    sound = f"the sound of the video at index {video}"
    named.message = error.message
    for name in (_item_name("audio", index), f"audio at index {index}"):
        named.message = named.message.replace(name, sound)
    named.args = (named.message,)
    return named


def _item_name(modality: str, index: int) -> str:
    return f"{modality} media at index {index}"


def _located(
    verb: str,
    modality: str,
    index: int,
    cause: Exception,
    kind: type[UnprocessableMediaError],
) -> LazyDecodeError:
    prefix = f"Failed to {verb} {_item_name(modality, index)}: "
    if not isinstance(cause, LazyDecodeError):
        return kind(prefix + describe(cause), modality=modality, index=index)
    error = cause.at(modality, index)
    # One that names an item says already what failed: a late decode within processing.
    if cause.modality is None or cause.index is None:
        error.message = prefix + cause.message
        error.args = (error.message,)
    return error
