"""Pictures that a processor would enlarge beyond all bounds.

Some processors make the shorter edge of a picture as long as the model wants it, keep the shape,
and cut the middle out afterwards. A strip of 1 by 5000 pixels, some hundred bytes as a file, then
becomes 512 by 2,560,000: four gigabytes, which no budget of decoded bytes knows of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lazydecode.errors import InvalidRequestError
from lazydecode.models.option_limits import MAX_AREA

_USUAL_RATIO: Final = 16
"""Longer to shorter edge up to which a picture is taken, however large the model's own edge is."""
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
