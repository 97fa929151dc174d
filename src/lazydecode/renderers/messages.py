"""OpenAI chat messages as they come off the wire, typed, with media URLs left where they are.

A media URL is a `msgspec.Raw`: a view of the request body. A data URL of many megabytes is
therefore never built as text; `MediaText` slices it, and base64 is decoded from the view.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Final

import msgspec

from lazydecode.errors import InvalidRequestError
from lazydecode.media.known_texts import TextTag

_SCAN_BYTES: Final = 1 << 16
_MAX_UUID_CHARS: Final = 1024


class MediaURL(msgspec.Struct):
    """The object form of `image_url`, `video_url` and `audio_url`."""

    url: msgspec.Raw = msgspec.Raw()
    """A JSON string, or null beside a uuid."""
    detail: str | None = None
    """OpenAI's hint for images. Checked, and without effect: models set their own sizes."""
    uuid: msgspec.Raw = msgspec.Raw()


class PlainURL(MediaURL):
    """The same, made of a URL that is known to be a string without escape sequences.

    None is ever read off the wire.
    """

    tag: TextTag | None = None
    """Of the base64 text in it, if that was made."""


class InputAudio(msgspec.Struct):
    """The object form of `input_audio`: base64 and a format name."""

    data: msgspec.Raw = msgspec.Raw()
    format: str | None = None


class FunctionCall(msgspec.Struct):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON text, or the object itself."""


class ToolCall(msgspec.Struct):
    """One tool call of an assistant message."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ContentPart(msgspec.Struct):
    """One part of a message; `type` says which of the other fields counts."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: MediaURL | str | None = None
    video_url: MediaURL | str | None = None
    audio_url: MediaURL | str | None = None
    input_audio: InputAudio | None = None
    image_embeds: msgspec.Raw = msgspec.Raw()
    """Embeddings: a URL or base64, or an object of those by the names of the tensors."""
    video_embeds: msgspec.Raw = msgspec.Raw()
    audio_embeds: msgspec.Raw = msgspec.Raw()
    uuid: msgspec.Raw = msgspec.Raw()
    """The caller's identity of the media item."""


class ChatMessage(msgspec.Struct):
    """One message of any role. Fields that only some providers know are ignored."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def read_media_text(
    raw: msgspec.Raw, *, where: str, is_plain: bool = False
) -> str | memoryview | None:
    """Return a JSON string's content: text, or for a data URL or base64 a view of the body.

    The view is given for strings of 4 KiB and more that hold no escape sequence; it shares
    memory with the request body and must not outlive the request.

    Args:
        raw: The JSON value.
        where: Names it in errors.
        is_plain: Whether it is known to be a string without escape sequences.

    Returns:
        None for null or an absent value.

    Raises:
        InvalidRequestError: If it is not a string.
    """
    view = memoryview(raw)
    if len(view) == 0 or bytes(view[:4]) == b"null":
        return None
    if view[0] != 0x22:  # a JSON value that does not begin with a quotation mark
        raise InvalidRequestError(f"{where} must be a string", parameter=where)
    inner = view[1:-1]
    if len(inner) < 4096 or (not is_plain and _has_escape(inner)):
        try:
            return msgspec.json.decode(raw, type=str)
        except msgspec.DecodeError as exc:
            raise InvalidRequestError(f"{where} is not a valid string", parameter=where) from exc
    return inner


def read_uuid(raw: msgspec.Raw, *, where: str) -> str | None:
    """Return the client's identity of an item; None for null or an absent value.

    Raises:
        InvalidRequestError: If it is no string, empty, too long, or has control characters.
    """
    view = memoryview(raw)
    if len(view) == 0 or bytes(view[:4]) == b"null":
        return None

    def refuse(rule: str) -> InvalidRequestError:
        return InvalidRequestError(f"{where} {rule}", parameter=where)

    if view[0] != 0x22:
        raise refuse("must be a string")
    # An escape sequence of six bytes is the longest way to write a character.
    if len(view) > 6 * _MAX_UUID_CHARS + 2:
        raise refuse(f"is longer than {_MAX_UUID_CHARS} characters")
    try:
        uuid = msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise refuse("is not a valid string") from exc
    if not uuid:
        raise refuse("must not be empty")
    if len(uuid) > _MAX_UUID_CHARS:
        raise refuse(f"is longer than {_MAX_UUID_CHARS} characters")
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in uuid):
        raise refuse("must not have control characters")
    return uuid


def read_embeds(raw: msgspec.Raw, *, where: str) -> dict[str, str | memoryview]:
    """Return the sources of an embeddings part by tensor name; one without a name under "".

    Raises:
        InvalidRequestError: If it is neither a string nor an object of strings, or empty.
    """
    view = memoryview(raw)
    fields: dict[str, msgspec.Raw] = {"": raw}
    if len(view) and view[0] == 0x7B:  # an opening brace
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as exc:
            raise InvalidRequestError(f"{where} is not a valid object", parameter=where) from exc
        if "" in fields:
            raise InvalidRequestError(f"{where} has a tensor without a name", parameter=where)
    sources: dict[str, str | memoryview] = {}
    for name, value in fields.items():
        path = f"{where}.{name[:80]}" if name else where
        source = read_media_text(value, where=path)
        if source is None:
            raise InvalidRequestError(f"{path} is missing", parameter=path)
        sources[name] = source
    if not sources:
        raise InvalidRequestError(f"{where} is empty", parameter=where)
    return sources


def _has_escape(view: memoryview) -> bool:
    """Whether a backslash is in `view`.

    Small copies stay in the cache: 0.08 ms per MB, where `re` on the view takes ten times that.
    """
    return any(
        b"\\" in bytes(view[start : start + _SCAN_BYTES])
        for start in range(0, len(view), _SCAN_BYTES)
    )
