"""Chat messages become a conversation for the template and media requests in order.

Pure: nothing is fetched, and no payload is touched. Media keep the position that the client
can count, within their own modality and in message order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from lazydecode.errors import InvalidRequestError, TooManyItemsError
from lazydecode.media.known_texts import TextTag
from lazydecode.renderers.messages import (
    ChatMessage,
    ContentPart,
    InputAudio,
    MediaURL,
    PlainURL,
    ToolCall,
    read_embeds,
    read_media_text,
    read_uuid,
)
from lazydecode.renderers.nesting import check_nesting, is_nested_too_deeply

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_EMBEDS: Final = {"image_embeds": "image", "video_embeds": "video", "audio_embeds": "audio"}
PART_TYPES: Final = ("text", "image_url", "video_url", "audio_url", "input_audio", *_EMBEDS)
_MODALITIES: Final = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
_SHORT_MESSAGES: Final = 8
_SHORT_CHARS: Final = 512
"""Template and tokenizer take some 0.2 ms for as many; a thread that is handed a job and hands
back the result costs 0.1 to 0.2 ms of two threads' time."""
_DETAILS: Final = (None, "auto", "low", "high", "original")


@dataclass(slots=True)
class MediaRequest:
    """One media part: what to fetch, and where the client put it."""

    modality: str
    index: int
    """Position among the request's items of this modality, from 0."""
    where: str
    """Path of the part in the request, for example `messages[0].content[1]`."""
    source: str | memoryview | None
    """URL, or the whole data URL or bare base64 as a view of the request body; None beside a
    uuid. Dropped as soon as it was fetched, so that the body can go."""
    media_type: str | None = None
    """Set for bare base64 (`input_audio`): the media type that its format names."""
    uuid: str | None = None
    is_held: bool = False
    """Whether a cache holds what the uuid stands for, so that the URL is left alone."""
    of_video: int | None = None
    """For the sound of a video: the video's index. It shares the video's part and source."""
    tag: TextTag | None = field(default=None, compare=False)
    """Of the base64 text in the source, if that was made."""

    def __repr__(self) -> str:
        return f"<MediaRequest {self.modality}[{self.index}] at {self.where}>"


@dataclass(slots=True)
class EmbedsRequest:
    """One part that holds embeddings in the place of media."""

    modality: str
    index: int
    """Position among the request's items of this modality, from 0."""
    where: str
    """Path of the part in the request."""
    sources: dict[str, str | memoryview]
    """Tensor name -> URL or base64; under "" the source of one that has no name. Emptied as
    soon as it was fetched."""

    def __repr__(self) -> str:
        return f"<EmbedsRequest {self.modality}[{self.index}] at {self.where}>"


@dataclass(slots=True)
class Conversation:
    """Messages in Hugging Face form, and the media that their parts name."""

    messages: list[dict[str, Any]]
    media: list[MediaRequest] = field(default_factory=list)
    """In message order."""
    embeds: list[EmbedsRequest] = field(default_factory=list)
    """In message order."""

    @property
    def has_items(self) -> bool:
        """Whether anything but text is in it."""
        return bool(self.media or self.embeds)

    @property
    def is_short(self) -> bool:
        """Whether its prompt is written in less time than a thread takes to be asked for it."""
        if len(self.messages) > _SHORT_MESSAGES:
            return False
        num_chars = 0
        for message in self.messages:
            if len(message) > 2:  # names, reasoning and calls have texts of their own
                return False
            content = message["content"]
            if isinstance(content, str):
                num_chars += len(content)
            else:
                num_chars += sum(len(part.get("text", "")) + 1 for part in content)
            if num_chars > _SHORT_CHARS:
                return False
        return True

    def counts(self) -> dict[str, int]:
        """Modality -> number of items, embeddings among them."""
        counts: dict[str, int] = {}
        for group in (self.media, self.embeds):
            for item in group:
                counts[item.modality] = counts.get(item.modality, 0) + 1
        return counts


def parse_messages(messages: Sequence[ChatMessage]) -> Conversation:
    """Check `messages` and split them into a conversation and its media.

    Raises:
        InvalidRequestError: For an unknown role or part type, a part that lacks what its type
            needs, or a message without content; it names the message and the part.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", parameter="messages")
    conversation = Conversation([])
    counts: Counter[str] = Counter()
    for position, message in enumerate(messages):
        conversation.messages.append(
            _parse_message(message, f"messages[{position}]", conversation, counts)
        )
    return conversation


def parse_media_messages(messages: Sequence[ChatMessage]) -> Conversation:
    """Take only the media out of messages, as beside a prompt that came as token ids.

    Raises:
        InvalidRequestError: If there is anything else in them, or as `parse_messages`.
    """
    for position, message in enumerate(messages):
        where = f"messages[{position}].content"
        if not isinstance(message.content, list):
            raise InvalidRequestError(
                f"{where} must be a list of media parts beside prompt_token_ids", parameter=where
            )
        for number, part in enumerate(message.content):
            if part.type in ("text", "refusal"):
                raise InvalidRequestError(
                    f"{where}[{number}] is text, and the prompt is in prompt_token_ids already; "
                    "only media parts may stand beside it",
                    parameter=f"{where}[{number}]",
                )
    return parse_messages(messages) if messages else Conversation([])


def with_sounds(media: Sequence[MediaRequest]) -> list[MediaRequest]:
    """Return the items of a request with the sound of each video behind it, as an audio item.

    It carries the video's uuid. Sounds are numbered after the client's own audio items, whose
    numbers stay.
    """
    number = sum(1 for item in media if item.modality == "audio")
    items: list[MediaRequest] = []
    for item in media:
        items.append(item)
        if item.modality == "video":
            items.append(
                MediaRequest(
                    "audio",
                    number,
                    item.where,
                    item.source,
                    uuid=item.uuid,
                    of_video=item.index,
                    tag=item.tag,
                )
            )
            number += 1
    return items


def check_item_counts(
    counts: Mapping[str, int],
    *,
    modalities: Sequence[str],
    max_items: Mapping[str, int | None],
    are_off: bool = False,
) -> None:
    """Refuse items that the model or the server does not take, before any is fetched.

    Args:
        counts: Modality -> items in the request.
        modalities: What the model takes; empty for a text-only model.
        max_items: Modality -> most items in one request; None or absent: no limit.
        are_off: Whether the model has modalities that this server cannot use.

    Raises:
        InvalidRequestError: For a modality that the model has not.
        TooManyItemsError: For more items than allowed.
    """
    for modality, count in counts.items():
        if not modalities:
            reason = (
                "this server cannot use the model's media, as its log says,"
                if are_off
                else "the model is text-only"
            )
            raise InvalidRequestError(
                f"{reason} and takes no {modality} items",
                modality=modality,
                index=0,
                parameter="messages",
            )
        if modality not in modalities:
            raise InvalidRequestError(
                f"the model takes no {modality} items; it takes {', '.join(modalities)}",
                modality=modality,
                index=0,
                parameter="messages",
            )
        limit = max_items.get(modality)
        if limit is not None and count > limit:
            raise TooManyItemsError(
                f"the request has {count} {modality} items; at most {limit} are allowed",
                modality=modality,
                index=limit,
                parameter="messages",
                value=count,
            )


def _parse_message(
    message: ChatMessage, where: str, found: Conversation, counts: Counter[str]
) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, not {message.role[:40]!r}",
            parameter=f"{where}.role",
        )
    parsed: dict[str, Any] = {
        # OpenAI's newer name of the same role; chat templates know the older one.
        "role": "system" if message.role == "developer" else message.role,
        "content": _parse_content(message, where, found, counts),
    }
    if message.name is not None:
        parsed["name"] = message.name
    if message.tool_call_id is not None:
        parsed["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        parsed["tool_calls"] = [
            _parse_tool_call(call, f"{where}.tool_calls[{position}]")
            for position, call in enumerate(message.tool_calls)
        ]
    if message.reasoning_content is not None:
        parsed["reasoning_content"] = message.reasoning_content
    return parsed


def _parse_content(
    message: ChatMessage, where: str, found: Conversation, counts: Counter[str]
) -> str | list[dict[str, Any]]:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequestError(f"{where}.content is missing", parameter=f"{where}.content")
    if isinstance(content, str):
        return content
    return [
        _parse_part(part, f"{where}.content[{position}]", found, counts)
        for position, part in enumerate(content)
    ]


def _parse_part(
    part: ContentPart, where: str, found: Conversation, counts: Counter[str]
) -> dict[str, Any]:
    kind = part.type
    if kind in ("text", "refusal"):
        text = part.text if kind == "text" else part.refusal
        if text is None:
            raise InvalidRequestError(f"{where}.{kind} is missing", parameter=f"{where}.{kind}")
        return {"type": "text", "text": text}
    if kind is None:
        raise InvalidRequestError(f"{where}.type is missing", parameter=f"{where}.type")
    if kind in _EMBEDS:
        return _parse_embeds(part, kind, where, found, counts)
    modality = _MODALITIES.get(kind)
    if modality is None:
        raise InvalidRequestError(
            f"{where}.type must be one of {', '.join(PART_TYPES)}, not {kind[:40]!r}",
            parameter=f"{where}.type",
        )
    try:
        item = _parse_media(part, kind, where)
    except InvalidRequestError as exc:
        raise exc.at(modality, counts[modality]) from exc.__cause__
    item.index = counts[modality]
    counts[modality] += 1
    found.media.append(item)
    return {"type": modality}


def _parse_embeds(
    part: ContentPart, kind: str, where: str, found: Conversation, counts: Counter[str]
) -> dict[str, Any]:
    modality = _EMBEDS[kind]
    index = counts[modality]
    try:
        if len(part.uuid):
            raise InvalidRequestError(
                f"{where}.uuid: embeddings have none, as no cache holds them",
                parameter=f"{where}.uuid",
            )
        sources = read_embeds(getattr(part, kind), where=f"{where}.{kind}")
    except InvalidRequestError as exc:
        raise exc.at(modality, index) from exc.__cause__
    found.embeds.append(EmbedsRequest(modality, index, where, sources))
    counts[modality] += 1
    return {"type": modality}


def _parse_media(part: ContentPart, kind: str, where: str) -> MediaRequest:
    field_name = f"{where}.{kind}"
    value = getattr(part, kind)
    uuid = read_uuid(part.uuid, where=f"{where}.uuid")
    source: str | memoryview | None = None
    media_type = tag = None
    if isinstance(value, InputAudio):
        source = read_media_text(value.data, where=f"{field_name}.data")
        media_type = _audio_media_type(value.format, where=f"{field_name}.format")
        if source is None:
            raise InvalidRequestError(
                f"{field_name}.data is missing", parameter=f"{field_name}.data"
            )
    elif isinstance(value, MediaURL):
        is_plain = isinstance(value, PlainURL)
        tag = value.tag if isinstance(value, PlainURL) else None
        source = read_media_text(value.url, where=f"{field_name}.url", is_plain=is_plain)
        if isinstance(source, memoryview) and bytes(source[:5]).lower() != b"data:":
            source = _as_text(source, where=f"{field_name}.url")
        if value.detail not in _DETAILS:
            raise InvalidRequestError(
                f"{field_name}.detail must be auto, low or high", parameter=f"{field_name}.detail"
            )
        if uuid is None:
            uuid = read_uuid(value.uuid, where=f"{field_name}.uuid")
    else:
        source = value
    if source is None and uuid is None:
        missing = f"{field_name}.url" if isinstance(value, MediaURL) else field_name
        raise InvalidRequestError(f"{missing} is missing", parameter=missing)
    return MediaRequest(_MODALITIES[kind], -1, where, source, media_type, uuid, tag=tag)


def _as_text(view: memoryview, *, where: str) -> str:
    try:
        return str(view, "utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequestError(f"{where} is not valid UTF-8", parameter=where) from exc


def _audio_media_type(name: str | None, *, where: str) -> str:
    """The format is a hint: decoders look at the content, so any simple word will do."""
    if name is None:
        return "audio/wav"
    if not name.isascii() or not name.replace("-", "").isalnum() or len(name) > 20:
        raise InvalidRequestError(f"{where} must be a format name such as wav", parameter=where)
    return f"audio/{name.lower()}"


def _parse_tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        # Templates of the Hugging Face form want the object; clients send its JSON text.
        try:
            arguments = msgspec.json.decode(arguments) if arguments else {}
        except (msgspec.DecodeError, RecursionError):
            arguments = call.function.arguments
        if is_nested_too_deeply(arguments):
            arguments = call.function.arguments
    else:
        check_nesting(arguments, where=f"{where}.function.arguments")
    parsed: dict[str, Any] = {
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments or {}},
    }
    if call.id is not None:
        parsed["id"] = call.id
    return parsed
