"""Options of a model's processor: merged over defaults, old names translated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from lazydecode.errors import InvalidRequestError
from lazydecode.models.option_limits import check_numbers
from lazydecode.models.processor_call import audio_processor_of

SCOPES: Final = ("text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs")
_RESERVED: Final = frozenset(
    {
        "text",
        "images",
        "videos",
        "audio",
        "audios",
        "return_tensors",
        "return_text_replacement_offsets",
        "return_metadata",
        "video_metadata",
        "padding",
        "truncation",
        "max_length",
        "common_kwargs",
        "text_kwargs",
        "device",
    }
)
"""What a request may not set: it would change the call, not the item."""
_BOUNDS: Final = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class ProcessorOptions:
    """Checks and merges options for one processor. Immutable; threads share it.

    Args:
        processor: The model's processor.
        defaults: Options of every request.
    """

    def __init__(self, processor: Any, defaults: Mapping[str, Any] | None = None) -> None:
        self._parts: dict[str, Any] = {
            "images_kwargs": getattr(processor, "image_processor", None),
            "videos_kwargs": getattr(processor, "video_processor", None),
            "audio_kwargs": audio_processor_of(processor),
        }
        self._known = frozenset(_known_names(processor, self._parts))
        self.defaults = self._translate(dict(defaults or {}))

    def merge(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the options of a request over the defaults; the request wins name by name.

        Raises:
            InvalidRequestError: If an option is unknown, too large, or not a request's to set.
        """
        if not options:
            return self.defaults
        self._check(options)
        merged: dict[str, Any] = {
            name: dict(value) if name in SCOPES and isinstance(value, Mapping) else value
            for name, value in self.defaults.items()
        }
        for name, value in self._translate(options).items():
            if name in SCOPES and isinstance(value, Mapping):
                merged[name] = {**merged.get(name, {}), **value}
                for inner in value:
                    merged.pop(inner, None)
            else:
                merged[name] = value
                for scope in SCOPES:
                    if isinstance(merged.get(scope), dict):
                        merged[scope].pop(name, None)
        return merged

    def _check(self, options: Mapping[str, Any]) -> None:
        for name in _names(options):
            if name in _RESERVED:
                raise InvalidRequestError(
                    f"mm_processor_kwargs cannot set {name!r}", parameter="mm_processor_kwargs"
                )
            if self._known and name not in self._known and name not in SCOPES:
                raise InvalidRequestError(
                    f"mm_processor_kwargs: the model's processor has no option {name!r}",
                    parameter="mm_processor_kwargs",
                )
        for scope in SCOPES:
            value = options.get(scope)
            if value is not None and not isinstance(value, Mapping):
                raise InvalidRequestError(
                    f"mm_processor_kwargs: {scope!r} must be a mapping",
                    parameter="mm_processor_kwargs",
                )
        means_areas = any(_edges(part) is not None for part in self._parts.values())
        areas = tuple(_BOUNDS.values()) if means_areas else ()
        check_numbers(options, self._parts.values(), areas=areas)

    def _translate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Write pixel bounds as the `size` that they mean; the old names are deprecated."""
        translated: dict[str, Any] = {
            name: dict(value) if name in SCOPES and isinstance(value, Mapping) else value
            for name, value in options.items()
        }
        flat = {n: translated[n] for n in _BOUNDS if translated.get(n) is not None}
        left = dict(flat)
        for scope, part in self._parts.items():
            inner = translated.get(scope) or {}
            bounds = {**flat, **{n: inner[n] for n in _BOUNDS if inner.get(n) is not None}}
            size = _edges(part)
            if not bounds or size is None:
                continue
            given = inner.get("size", translated.get("size")) or {}
            size = {**size, **dict(given), **{_BOUNDS[n]: v for n, v in bounds.items()}}
            kept = {n: v for n, v in inner.items() if n not in _BOUNDS}
            translated[scope] = {**kept, "size": size}
            left.clear()
        if flat and not left:
            for name in (*_BOUNDS, "size"):
                translated.pop(name, None)
        return translated


def _edges(part: Any) -> dict[str, int] | None:
    """Return the pixel bounds of a part that states them as edges and knows their old names."""
    annotations = getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})
    size = getattr(part, "size", None)
    if not set(_BOUNDS) <= set(annotations) or size is None:
        return None
    edges = {name: _get(size, name) for name in _BOUNDS.values()}
    return {n: v for n, v in edges.items() if v is not None} if all(edges.values()) else None


def _get(size: Any, name: str) -> int | None:
    value = size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)
    return None if value is None else int(value)


def _names(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if name in SCOPES and name != "text_kwargs" and isinstance(value, Mapping):
            yield from value
        else:
            yield name


def _known_names(processor: Any, parts: Mapping[str, Any]) -> Iterator[str]:
    """Yield every option that a processor and its parts declare; none if it declares nothing."""
    declared = getattr(getattr(processor, "valid_processor_kwargs", None), "__annotations__", None)
    if declared is None:
        return
    for name, kind in declared.items():
        inner = getattr(kind, "__annotations__", None)
        yield from inner if inner is not None else (name,)
    for part in parts.values():
        yield from getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})
        if hasattr(part, "to_dict"):
            yield from part.to_dict()
