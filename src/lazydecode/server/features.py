"""The render route's answer: ids, ranges, identities, and the tensors in their wire form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import pybase64
import torch

from lazydecode.engine.protocol import SamplingParams
from lazydecode.engine.wire import encode_metadata, item_chunks, small_numbers
from lazydecode.inputs import MultiModalInput, MultiModalKwargsItem, PlaceholderRange
from lazydecode.renderers.timeline import Timeline
from lazydecode.server.protocol import Payload

PIECE_BYTES: Final = 256 * 1024
"""Size of the pieces of a large answer: what is encoded at once is sent at once, uncopied."""
_STEP_BYTES: Final = PIECE_BYTES // 4 * 3


class AnswerBody:
    """The JSON of an answer, in pieces that are made when they are wanted.

    Tensors are encoded from their own memory while the answer is sent: it exists nowhere as a
    whole.
    """

    def __init__(self, parts: Sequence[bytes | Base64Text]) -> None:
        self._parts = parts
        self.num_bytes = sum(
            len(part) if isinstance(part, bytes) else part.num_chars for part in parts
        )

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON in pieces of mostly `PIECE_BYTES`; linear in the tensors.

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
        self.num_chars = -(-sum(len(chunk) for chunk in chunks) // 3) * 4

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


def build_answer(
    prompt: MultiModalInput,
    fields: Mapping[str, Any],
    sampling: SamplingParams,
    *,
    payload: Payload,
    dtype: torch.dtype | None,
    timeline: Timeline | None = None,
) -> AnswerBody:
    """Return the answer's JSON.

    A thread's work: tensors are cast here if they have to be.

    Args:
        prompt: What was rendered.
        fields: Further fields of the answer.
        sampling: Becomes `sampling_params`.
        payload: What of each item is in it.
        dtype: The model's dtype, to which floating-point tensors are cast.
        timeline: Is added if given.
    """
    head: dict[str, Any] = {
        "request_id": fields["request_id"],
        "model": fields["model"],
        "token_ids": prompt["prompt_token_ids"],
    }
    tail: dict[str, Any] = {
        "sampling_params": msgspec.to_builtins(sampling, str_keys=True),
        **{name: value for name, value in fields.items() if name not in head},
    }
    if timeline is not None:
        tail["timeline"] = timeline.to_dict()
    parts: list[bytes | Base64Text] = [msgspec.json.encode(head)[:-1] + b',"features":']
    if prompt["mm_hashes"]:
        parts += _features(prompt, payload=payload, dtype=dtype)
    else:
        parts.append(b"null")
    parts.append(b"," + msgspec.json.encode(tail)[1:])
    return AnswerBody(parts)


def _features(
    prompt: MultiModalInput, *, payload: Payload, dtype: torch.dtype | None
) -> list[bytes | Base64Text]:
    small = {
        "mm_hashes": prompt["mm_hashes"],
        "mm_placeholders": {
            modality: [_range(place) for place in places]
            for modality, places in prompt["mm_placeholders"].items()
        },
    }
    parts: list[bytes | Base64Text] = [msgspec.json.encode(small)[:-1]]
    if payload == "none":
        parts.append(b',"kwargs_data":null,"mm_metadata":null,"mm_grids":')
        return [*parts, msgspec.json.encode(_grids(prompt)), b"}"]
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


def _grids(prompt: MultiModalInput) -> dict[str, list[dict[str, Any]]]:
    """Return modality -> per item its small tensors as numbers, by name."""
    return {
        modality: [{} if item is None else small_numbers(item) for item in items]
        for modality, items in prompt["mm_kwargs"].items()
    }


def _range(place: PlaceholderRange) -> dict[str, Any]:
    form: dict[str, Any] = {"offset": place.offset, "length": place.length}
    if place.is_embed is not None:
        form["is_embed"] = place.is_embed.tolist()
    return form
