"""How far a request may turn the numbers of a processor.

What a processor allocates follows from its options as much as from the media: a lower bound of
pixels enlarges the smallest image to it, a temporal patch repeats a frame that often. Budgets know
the size of what was decoded only, so numbers that make more of it are bounded by name here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from lazydecode.errors import InvalidRequestError

MAX_AREA: Final = 2**25
"""Pixels to which an image may be enlarged: 8K video, 400 MB as three channels of floats."""
MAX_NUMBER: Final = 8192
"""Of edges, frames, seconds, samples per second, and whatever else an option counts."""
_FACTOR: Final = 4
"""How much more than the model's own value is taken where that is above these limits already."""
_SHAPE_WORDS: Final = ("patch", "merge", "tile", "crops", "temporal")
"""Numbers that multiply what is allocated have no other limit than the model's own value."""
_MAX_SHAPE_NUMBER: Final = 16
_CEILING: Final = "max_pixels"
"""An upper bound of pixels alone never enlarges anything."""


def check_numbers(
    options: Mapping[str, Any], parts: Collection[Any], *, areas: Collection[str]
) -> None:
    """Refuse numbers of a request that let a processor allocate without bound.

    Args:
        options: The request's, flat or within scopes.
        parts: Image, video and audio processors, which know the model's own values.
        areas: Names of edges that mean a number of pixels, the lower bound first; empty where
            edges are edges.

    Raises:
        InvalidRequestError: It names the option and the limit.
    """
    for name, number in _numbers(options):
        if name == _CEILING or name in list(areas)[1:]:
            continue
        limit = _limit(name, _own_value(name, parts), is_area=name in areas)
        if not number <= limit:  # NaN is not
            raise InvalidRequestError(
                f"mm_processor_kwargs: {name!r} may be at most {limit:g} in a request",
                parameter="mm_processor_kwargs",
            )


def _limit(name: str, own: float, *, is_area: bool) -> float:
    if is_area or "pixels" in name:
        return max(MAX_AREA, own)
    least = _MAX_SHAPE_NUMBER if any(word in name for word in _SHAPE_WORDS) else MAX_NUMBER
    return max(least, _FACTOR * own)


def _own_value(name: str, parts: Collection[Any]) -> float:
    """The largest value that the model's processors have for an option themselves; 0 if none."""
    values = [0.0]
    for part in parts:
        size = getattr(part, "size", None)
        inner = size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)
        values += [
            value
            for value in (getattr(part, name, None), inner)
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
    return max(values)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number within `value` with the name that is nearest to it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
