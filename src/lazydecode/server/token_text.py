"""A prompt's token ids as JSON: the thousands of equal ones of an item are one text, repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from lazydecode.inputs import PlaceholderRange

_LONG_RUN: Final = 4096
"""Shorter ones are written one by one, in 10 ns each; up to some 2,000 that is no slower."""


def with_runs_written(
    token_ids: list[int], placeholders: Mapping[str, Sequence[PlaceholderRange]]
) -> list[int] | msgspec.Raw:
    """Return a prompt's ids, or their JSON array if that is written faster than by msgspec.

    A 4K picture's 10,549 ids take 92 µs one by one, and 52 as a text that is repeated once they
    were found to be equal.

    Args:
        token_ids: The ids.
        placeholders: Modality -> where items stand among them.
    """
    if len(token_ids) < _LONG_RUN:
        return token_ids
    long = [
        place for group in placeholders.values() for place in group if place.length >= _LONG_RUN
    ]
    if not long:
        return token_ids
    encode = msgspec.json.encode
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
