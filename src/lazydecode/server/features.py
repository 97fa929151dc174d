"""The render route's answer: ids, ranges, identities, and the tensors in their wire form.

It comes as JSON, with tensors in base64, or as one MessagePack map of the same names in which each
item is the map that the base64 stands for: its tensors are copied once, into the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import pybase64
import torch

from lazydecode.engine.protocol import SamplingParams
from lazydecode.engine.wire import (
    array_header,
    encode_metadata,
    item_chunks,
    map_header,
    small_numbers,
)
from lazydecode.inputs import MultiModalInput, MultiModalKwargsItem, PlaceholderRange
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.protocol import Payload
from lazydecode.server.token_text import with_runs_written

PIECE_BYTES: Final = 256 * 1024
"""Size of the pieces of a large answer: what is encoded at once is sent at once, uncopied."""
_STEP_BYTES: Final = PIECE_BYTES // 4 * 3


JSON: Final = "application/json"
MESSAGE_PACK: Final = "application/msgpack"


class AnswerBody:
    """An answer in pieces that are made when they are wanted.

    Tensors are read from their own memory while the answer is sent: it exists nowhere as a whole.

    Attributes:
        num_bytes: Length of the whole.
        content_type: `JSON` or `MESSAGE_PACK`.
    """

    def __init__(
        self, parts: Sequence[bytes | Base64Text | RawChunks], content_type: str = JSON
    ) -> None:
        self._parts = parts
        self.content_type = content_type
        self.num_bytes = sum(map(len, parts))

    def pieces(self) -> Iterator[bytes]:
        """Yield the answer in pieces of mostly `PIECE_BYTES`; linear in the tensors.

        Small parts are collected. Large ones are yielded as they were made, without a copy.
        """
        pending: list[bytes] = []
        num_pending = 0
        for part in self._parts:
            for piece in (part,) if isinstance(part, bytes) else part.pieces():
                if num_pending and num_pending + len(piece) > PIECE_BYTES:
                    yield b"".join(pending)
                    pending, num_pending = [], 0
                pending.append(piece)
                num_pending += len(piece)
        if pending:
            yield b"".join(pending)

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())


class Base64Text:
    """Standard base64 of chunks that are never joined."""

    def __init__(self, chunks: Sequence[bytes | memoryview]) -> None:
        self._chunks = chunks
        self._num_chars = -(-sum(map(len, chunks)) // 3) * 4

    def __len__(self) -> int:
        return self._num_chars

    def pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces of at most `PIECE_BYTES`."""
        carry = b""
        for chunk in self._chunks:
            view = memoryview(chunk)
            if carry:
                missing = 3 - len(carry)
                carry += bytes(view[:missing])
                view = view[missing:]
                if len(carry) < 3:
                    continue
                yield pybase64.b64encode(carry)
            whole = len(view) // 3 * 3
            for begin in range(0, whole, _STEP_BYTES):
                yield pybase64.b64encode(view[begin : min(begin + _STEP_BYTES, whole)])
            carry = bytes(view[whole:])
        if carry:
            yield pybase64.b64encode(carry)


class RawChunks:
    """Chunks as they are."""

    def __init__(self, chunks: Sequence[bytes | memoryview]) -> None:
        self._chunks = chunks
        self._num_bytes = sum(map(len, chunks))

    def __len__(self) -> int:
        return self._num_bytes

    def pieces(self) -> Iterator[bytes]:
        """Yield copies of at most `PIECE_BYTES`.

        Copies, as what is still to be sent outlives the request, and with it the lease on shared
        memory that a tensor may lie in.
        """
        for chunk in self._chunks:
            for begin in range(0, len(chunk), PIECE_BYTES):
                yield bytes(chunk[begin : begin + PIECE_BYTES])


def build_answer(
    prompt: MultiModalInput,
    fields: Mapping[str, Any],
    sampling: SamplingParams,
    *,
    payload: Payload,
    dtype: torch.dtype | None,
    timeline: Timeline | None = None,
    packed: bool = False,
) -> AnswerBody:
    """Return the answer.

    A thread's work: tensors are cast here if they have to be.

    Args:
        prompt: What was rendered.
        fields: `request_id` and `model`, then further fields of the answer.
        sampling: Becomes `sampling_params`.
        payload: What of each item is in it.
        dtype: The model's dtype, to which floating-point tensors are cast.
        timeline: Is added if given.
        packed: Whether it is MessagePack instead of JSON.
    """
    token_ids = prompt["prompt_token_ids"]
    answer: dict[str, Any] = {
        "request_id": fields["request_id"],
        "model": fields["model"],
        "token_ids": token_ids
        if packed
        else with_runs_written(token_ids, prompt["mm_placeholders"]),
        "features": None,
        "sampling_params": msgspec.to_builtins(sampling, str_keys=True) if packed else sampling,
        **fields,
    }
    if timeline is not None:
        answer["timeline"] = timeline.to_dict()
    if packed:
        packed_parts = list(_packed(prompt, answer, payload=payload, dtype=dtype))
        return AnswerBody(packed_parts, MESSAGE_PACK)
    if payload == "none" or not prompt["mm_hashes"]:
        if prompt["mm_hashes"]:
            answer["features"] = _numbers(prompt)
        return AnswerBody([msgspec.json.encode(answer)])
    parts: list[bytes | Base64Text] = []
    for name, value in answer.items():
        parts.append((b"," if parts else b"{") + msgspec.json.encode(name) + b":")
        if name == "features":
            parts += _features(prompt, payload=payload, dtype=dtype)
        else:
            parts.append(msgspec.json.encode(value))
    return AnswerBody([*parts, b"}"])


def _numbers(prompt: MultiModalInput) -> dict[str, Any]:
    """Return the features of an answer without tensors."""
    return {
        **_places(prompt),
        "kwargs_data": None,
        "mm_metadata": None,
        "mm_grids": {
            modality: [{} if item is None else small_numbers(item) for item in items]
            for modality, items in prompt["mm_kwargs"].items()
        },
    }


def _features(
    prompt: MultiModalInput, *, payload: Payload, dtype: torch.dtype | None
) -> list[bytes | Base64Text]:
    parts: list[bytes | Base64Text] = [msgspec.json.encode(_places(prompt))[:-1]]
    if payload == "metadata":
        return [*parts, b',"kwargs_data":null,"mm_metadata":', _all_metadata(prompt, dtype), b"}"]
    parts.append(b',"kwargs_data":{')
    for number, (modality, items) in enumerate(prompt["mm_kwargs"].items()):
        parts.append((b"," if number else b"") + msgspec.json.encode(modality) + b":[")
        for position, item in enumerate(items):
            separator = b"," if position else b""
            if item is None:
                parts.append(separator + b"null")
            else:
                text = Base64Text(item_chunks(item, dtype=dtype))
                parts += [separator + b'"', text, b'"']
        parts.append(b"]")
    parts.append(b'},"mm_metadata":' + _all_metadata(prompt, dtype) + b"}")
    return parts


def _packed(
    prompt: MultiModalInput,
    answer: Mapping[str, Any],
    *,
    payload: Payload,
    dtype: torch.dtype | None,
) -> Iterator[bytes | RawChunks]:
    encode = msgspec.msgpack.encode
    yield map_header(len(answer))
    for name, value in answer.items():
        yield encode(name)
        if name == "features" and prompt["mm_hashes"]:
            yield from _packed_features(prompt, payload=payload, dtype=dtype)
        else:
            yield encode(value)


def _packed_features(
    prompt: MultiModalInput, *, payload: Payload, dtype: torch.dtype | None
) -> Iterator[bytes | RawChunks]:
    if payload == "none":
        yield msgspec.msgpack.encode(_numbers(prompt))
        return
    features = {**_places(prompt), "kwargs_data": None, "mm_metadata": None}
    items = prompt["mm_kwargs"]
    yield map_header(len(features))
    for name, value in features.items():
        yield msgspec.msgpack.encode(name)
        if name == "kwargs_data" and payload == "tensors":
            yield from _packed_items(items, lambda item: item_chunks(item, dtype=dtype))
        elif name == "mm_metadata":
            small = {m: group for m, group in items.items() if any(map(_is_small, group))}
            yield from _packed_items(small, lambda item: _small_chunks(item, dtype))
        else:
            yield msgspec.msgpack.encode(value)


def _packed_items(
    items: Mapping[str, Sequence[MultiModalKwargsItem | None]],
    chunks: Callable[[MultiModalKwargsItem], Sequence[bytes | memoryview]],
) -> Iterator[bytes | RawChunks]:
    yield map_header(len(items))
    for modality, group in items.items():
        yield msgspec.msgpack.encode(modality)
        yield array_header(len(group))
        for item in group:
            yield RawChunks([msgspec.msgpack.encode(None)] if item is None else chunks(item))


def _is_small(item: MultiModalKwargsItem | None) -> bool:
    return item is not None and any(elem.field.keep_on_cpu for elem in item.values())


def _small_chunks(item: MultiModalKwargsItem, dtype: torch.dtype | None) -> list[bytes]:
    return [encode_metadata(item, dtype=dtype) or msgspec.msgpack.encode(None)]


def _places(prompt: MultiModalInput) -> dict[str, Any]:
    """Return the features that are the same in every form."""
    return {
        "mm_hashes": prompt["mm_hashes"],
        "mm_placeholders": {
            modality: [_range(place) for place in places]
            for modality, places in prompt["mm_placeholders"].items()
        },
    }


def _all_metadata(prompt: MultiModalInput, dtype: torch.dtype | None) -> bytes:
    metadata = {
        modality: small_parts
        for modality, items in prompt["mm_kwargs"].items()
        if any(small_parts := [_metadata(item, dtype) for item in items])
    }
    return msgspec.json.encode(metadata)


def _metadata(item: MultiModalKwargsItem | None, dtype: torch.dtype | None) -> str | None:
    small = None if item is None else encode_metadata(item, dtype=dtype)
    return None if small is None else pybase64.b64encode_as_string(small)


def _range(place: PlaceholderRange) -> dict[str, Any]:
    form: dict[str, Any] = {"offset": place.offset, "length": place.length}
    if place.is_embed is not None:
        form["is_embed"] = place.is_embed.tolist()
    return form
