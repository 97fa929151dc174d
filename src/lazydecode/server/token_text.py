"""A prompt's token ids as JSON: the thousands of equal ones of an item are one text, repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from lazydecode.inputs import PlaceholderRange

_LONG_RUN: Final = 256
"""Shorter ones are written one by one, in 10 ns each; finding out takes some µs."""


def ids_as_json(
    token_ids: list[int], placeholders: Mapping[str, Sequence[PlaceholderRange]]
) -> msgspec.Raw:
    """Return the JSON array of a prompt's ids.

    A 4K picture's 10,549 ids take 115 µs one by one, and 40 as a text that is repeated once they
    were found to be equal.

    Args:
        token_ids: The ids.
        placeholders: Modality -> where items stand among them.
    """
    encode = msgspec.json.encode
    long = [
        place for group in placeholders.values() for place in group if place.length >= _LONG_RUN
    ]
    texts: list[bytes] = []
    last = 0
    for place in sorted(long, key=lambda place: place.offset):
        start, stop = place.offset, place.offset + place.length
        run = token_ids[start:stop]
        if start < last or not run or run.count(run[0]) != place.length:
            continue
        if last < start:
            texts.append(encode(token_ids[last:start])[1:-1])
        texts.append((b"%d," % run[0] * place.length)[:-1])
        last = stop
    if last < len(token_ids):
        texts.append(encode(token_ids[last:])[1:-1])
    return msgspec.Raw(b"[" + b",".join(texts) + b"]")
