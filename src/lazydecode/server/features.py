"""The render route's answer: ids, ranges, identities, and the tensors in their wire form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pybase64
import torch

from lazydecode.engine.protocol import SamplingParams
from lazydecode.engine.wire import encode_item, encode_metadata
from lazydecode.inputs import MultiModalInput, MultiModalKwargsItem, PlaceholderRange
from lazydecode.renderers.timeline import Timeline


def build_answer(
    prompt: MultiModalInput,
    fields: Mapping[str, Any],
    sampling: SamplingParams,
    *,
    with_payload: bool,
    dtype: torch.dtype | None,
    timeline: Timeline | None = None,
) -> list[bytes]:
    """Return the answer's JSON in pieces; a thread's work, linear in the tensors.

    Args:
        prompt: What was rendered.
        fields: Further fields of the answer.
        sampling: Becomes `sampling_params`.
        with_payload: Whether the tensors are in it.
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
    pieces = [msgspec.json.encode(head)[:-1] + b',"features":']
    if prompt["mm_hashes"]:
        pieces += _features(prompt, with_payload=with_payload, dtype=dtype)
    else:
        pieces.append(b"null")
    pieces.append(b"," + msgspec.json.encode(tail)[1:])
    return pieces


def _features(
    prompt: MultiModalInput, *, with_payload: bool, dtype: torch.dtype | None
) -> list[bytes]:
    small = {
        "mm_hashes": prompt["mm_hashes"],
        "mm_placeholders": {
            modality: [_range(place) for place in places]
            for modality, places in prompt["mm_placeholders"].items()
        },
    }
    pieces = [msgspec.json.encode(small)[:-1]]
    if not with_payload:
        return [*pieces, b',"kwargs_data":null,"mm_metadata":null}']
    pieces.append(b',"kwargs_data":{')
    first = True
    for modality, items in prompt["mm_kwargs"].items():
        pieces.append((b"" if first else b",") + msgspec.json.encode(modality) + b":[")
        first = False
        pieces += _entries(items, dtype)
        pieces.append(b"]")
    metadata = {
        modality: parts
        for modality, items in prompt["mm_kwargs"].items()
        if any(parts := [_metadata(item, dtype) for item in items])
    }
    pieces.append(b'},"mm_metadata":' + msgspec.json.encode(metadata) + b"}")
    return pieces


def _entries(
    items: Sequence[MultiModalKwargsItem | None], dtype: torch.dtype | None
) -> list[bytes]:
    pieces: list[bytes] = []
    for position, item in enumerate(items):
        if position:
            pieces.append(b",")
        if item is None:
            pieces.append(b"null")
        else:
            pieces += [b'"', pybase64.b64encode(encode_item(item, dtype=dtype)), b'"']
    return pieces


def _metadata(item: MultiModalKwargsItem | None, dtype: torch.dtype | None) -> str | None:
    small = None if item is None else encode_metadata(item, dtype=dtype)
    return None if small is None else pybase64.b64encode_as_string(small)


def _range(place: PlaceholderRange) -> dict[str, Any]:
    form: dict[str, Any] = {"offset": place.offset, "length": place.length}
    if place.is_embed is not None:
        form["is_embed"] = place.is_embed.tolist()
    return form
