"""Pictures that a processor would enlarge beyond all bounds.

Some processors make the shorter edge of a picture as long as the model wants it, keep the shape,
and cut the middle out afterwards. A strip of 1 by 5000 pixels, some hundred bytes as a file, then
becomes 512 by 2,560,000: four gigabytes, which no budget of decoded bytes knows of. Others pad a
strip to a square before they make it small.

The first is worked out from the sizes. Whatever else a class does shows when it runs on a strip
without content, on torch's device without memory (see `header_only`), and each result is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazydecode.errors import InvalidRequestError
from lazydecode.models.option_limits import MAX_AREA

_USUAL_RATIO: Final = 16
"""Longer to shorter edge up to which a picture is taken, however large the model's own edge is."""
_PIXEL_BYTES: Final = 3 * 4
"""Of a pixel as floats."""
_SCOPES: Final = {"image": "images_kwargs", "video": "videos_kwargs"}


def check_enlargement(
    modality: str, shape: Sequence[Any], part: Any, options: Mapping[str, Any]
) -> None:
    """Refuse an item that a processor would make too large by its shorter edge.

    Args:
        modality: `image` or `video`; others are never enlarged.
        shape: As `item.shape_of` gives it.
        part: The processor of the modality.
        options: Options of the call, over the processor's own.

    Raises:
        InvalidRequestError: If it would have more than `MAX_AREA` pixels in all, and more than a
            picture of usual shape has with the model's own edge.
    """
    own = _shortest_edge(getattr(part, "size", None))
    if own is None or modality not in _SCOPES:
        return
    scoped = options.get(_SCOPES[modality])
    given = options.get("size") or (scoped.get("size") if isinstance(scoped, Mapping) else None)
    edge = own if given is None else _shortest_edge(given)
    if edge is None:
        return
    frames, height, width = (1, *shape) if modality == "image" else shape[:3]
    short, long = sorted((max(1, int(height)), max(1, int(width))))
    enlarged = edge * long // short
    if frames * edge * enlarged > max(MAX_AREA, frames * _USUAL_RATIO * own**2):
        raise InvalidRequestError(
            f"{width} x {height} pixels are too narrow: the model's processor makes the shorter "
            f"edge {edge} pixels long, and the longer one {enlarged}",
            modality=modality,
        )


def _shortest_edge(size: Any) -> int | None:
    """Return the length of the shorter edge, if the size says no more than that."""
    if isinstance(size, Mapping):
        edge, bound = size.get("shortest_edge"), size.get("longest_edge")
    else:
        edge, bound = getattr(size, "shortest_edge", None), getattr(size, "longest_edge", None)
    return int(edge) if edge and not bound else None


def is_strip(modality: str, shape: Sequence[Any]) -> bool:
    """Whether an item is narrower than usual media are.

    Args:
        modality: Any.
        shape: As `item.shape_of` gives it.
    """
    if modality not in _SCOPES:
        return False
    height, width = shape[-2:] if modality == "image" else shape[1:3]
    short, long = sorted((int(height), int(width)))
    return long > _USUAL_RATIO * max(1, short)


class ResultLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch make no large tensor inside, be it on the device without memory.

    A processor that pads a strip to a square makes one and throws it away, so that nothing of it
    shows in what comes out.

    Args:
        num_pixels: How many the item has itself.
    """

    def __init__(self, num_pixels: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._max_bytes = _PIXEL_BYTES * max(MAX_AREA, num_pixels)
        self.num_bytes = 0
        """Of the tensor that was too large; 0: there was none."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation.

        Raises:
            InvalidRequestError: If its result is too large.
        """
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, list | tuple) else (result,):
            if isinstance(part, torch.Tensor):
                num_bytes = part.untyped_storage().nbytes()
                if num_bytes > self._max_bytes:
                    self.num_bytes = num_bytes
                    raise InvalidRequestError("the model's processor makes too much of it")
        return result
