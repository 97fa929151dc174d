"""One more picture of a size that was met before: what its class asks its image processor for.

Around its image processor a class merges and checks options, and writes, checks and tokenizes a
text. All of that follows from the picture's size and the options. So it is watched once for each
size: how the class calls its image processor, and that it hands the results on as they are. The
next picture of that size goes to the image processor alone, with the same arguments.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Final

import torch

from lazydecode.models.field_inference import same_values

_CALL: Final = "__call__"
_INNER: Final = "_preprocess_image_like_inputs"
"""What transformers' image processors call once their options are merged and checked."""
_MAX_DEPTH: Final = 2
"""Lists that a class puts around a picture: one per text, one per request."""
_NOTES: Final = "_lazydecode_notes"
_PLAIN: Final = (type(None), bool, int, float, str, enum.Enum, torch.dtype, torch.device)
"""Options of these types cannot be written into."""


@dataclass(frozen=True, slots=True)
class PartCall:
    """How a class calls its image processor for a picture of one size, under some options."""

    part: Any
    """The image processor."""
    method: str
    depth: int
    """Lists around the picture."""
    options: Mapping[str, Any]
    fresh: tuple[str, ...]
    """Options that the method could write into: each call gets its own."""
    names: tuple[str, ...]
    """Results that the class hands on."""

    def run(self, image: Any) -> dict[str, Any]:
        """Return what the class would hand on for this picture.

        Args:
            image: Of the same size, and in the same form, as the one that was watched.

        Raises:
            Exception: Whatever the image processor raises.
        """
        images = image
        for _ in range(self.depth):
            images = [images]
        options = dict(self.options)
        for name in self.fresh:
            options[name] = copy.deepcopy(options[name])
        results = getattr(self.part, self.method)(images, **options)
        return {name: results[name] for name in self.names}


class WatchedPart:
    """Notes how a class calls its image processor. For one call of the class.

    Args:
        part: The image processor.
        stand_in: See the attribute.
    """

    def __init__(self, part: Any, stand_in: Any) -> None:
        self._part = part
        self._seen: list[_Seen] = []
        self.stand_in = stand_in
        """What the class has to call in its place: a copy, of a class that notes its calls."""
        stand_in.__dict__[_NOTES] = self._seen

    @classmethod
    def of(cls, part: Any) -> WatchedPart | None:
        """Return one for an image processor; None if it is of a kind that cannot be copied so."""
        try:
            stand_in = copy.copy(part)
            kind: Any = type(part)
            stand_in.__class__ = _watched_class(kind)
            return cls(part, stand_in)
        except (TypeError, AttributeError):  # it has slots, or is made in C
            return None

    def call_for(self, image: Any, tensors: Mapping[str, Any]) -> PartCall | None:
        """Return how the next picture of this size gets its tensors; None: only from the class.

        Args:
            image: What the class was given.
            tensors: What came out of the class.
        """
        for method in (_INNER, _CALL):
            calls = [seen for seen in self._seen if seen.method == method]
            if len(calls) != 1 or not calls[0].gave(tensors):
                continue
            (seen,) = calls
            depth = _depth(seen.images, image)
            if depth is not None and seen.options is not None:
                fresh = tuple(n for n, v in seen.options.items() if _is_own(v, self._part, n))
                names = tuple(tensors)
                return PartCall(self._part, method, depth, seen.options, fresh, names)
        return None


class _Seen:
    """One call of a method of an image processor.

    Args:
        part: The image processor.
        method: Which.
        images: Its first argument.
        arguments: Its further arguments by position.
        options: Those by name.
    """

    def __init__(
        self,
        part: Any,
        method: str,
        images: Any,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
    ) -> None:
        self.method = method
        self.images = images
        self.options: dict[str, Any] | None = None
        """As they were before the call; None if there is more than options among them."""
        if not arguments and all(map(_is_plain, options.values())):
            self.options = {
                name: copy.deepcopy(value) if _is_own(value, part, name) else value
                for name, value in options.items()
            }
        self._results: dict[str, tuple[Any, list[int]]] = {}

    def note_results(self, results: Any) -> None:
        """Note what came out: the class may go on to change it."""
        for name, value in results.items() if hasattr(results, "items") else ():
            kept = list(value) if isinstance(value, list) else value
            self._results[name] = (kept, _versions(kept))

    def gave(self, tensors: Mapping[str, Any]) -> bool:
        """Whether these are among the results, and unchanged since."""
        for name, value in tensors.items():
            kept, versions = self._results.get(name, (None, []))
            if not isinstance(value, torch.Tensor | list) or versions != _versions(kept):
                return False
            if value is not kept and not same_values(value, kept):
                return False
        return True


def _versions(value: Any) -> list[int]:
    """Return how often each tensor in a result was written into."""
    if isinstance(value, list):
        return [version for part in value for version in _versions(part)]
    return [value._version] if isinstance(value, torch.Tensor) else []


@functools.cache
def _watched_class(kind: Any) -> Any:
    """Return the class of an image processor, with calls that are noted."""

    def watched(method: str) -> Any:
        def call(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
            seen = _Seen(self, method, images, args, kwargs)
            results = getattr(kind, method)(self, images, *args, **kwargs)
            seen.note_results(results)
            self.__dict__[_NOTES].append(seen)
            return results

        return call

    methods = {name: watched(name) for name in (_CALL, _INNER) if hasattr(kind, name)}
    return type(kind.__name__, (kind,), methods)


def _depth(images: Any, image: Any) -> int | None:
    """Return how many lists stand around the one picture; None if it is not that alone."""
    for depth in range(_MAX_DEPTH + 1):
        if images is image:
            return depth
        if not isinstance(images, list | tuple) or len(images) != 1:
            return None
        images = images[0]
    return None


def _is_plain(value: Any) -> bool:
    """Whether a value is an option: it says nothing about one picture."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    # transformers' SizeDict
    return is_dataclass(value) and all(map(_is_plain, vars(value).values()))


def _is_own(value: Any, part: Any, name: str) -> bool:
    """Whether an option belongs to one call, which could write into it."""
    if isinstance(value, _PLAIN) or value is getattr(part, name, None):
        return False
    return not (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))
