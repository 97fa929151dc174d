"""Items that have a size and no content: for texts and token counts without decoding.

Token counts follow from sizes. So the real processor runs on tensors of the item's size on
torch's meta device, where arithmetic costs nothing, or, where a class looks at values, on a
blank item of the same size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from PIL import Image

from lazydecode.models.processor_call import plain_metadata

Way = Literal["meta", "blank", "silence", "content"]
"""How an item's text follows from its size; `content`: it does not."""

_PARTS: Final = ("image_processor", "video_processor")


def stand_in(modality: str, shape: Sequence[Any], way: Way) -> Any:
    """Return an item of this size for the processor.

    Args:
        modality: `image`: shape (height, width); `video`: (frames, height, width, metadata as
            sorted pairs); `audio`: (samples,).
        shape: The size, as `item.shape_of` gives it.
        way: `meta`, `blank` or `silence`.
    """
    if modality == "image":
        height, width = shape
        if way == "meta":
            return torch.empty((3, height, width), dtype=torch.uint8, device="meta")
        return Image.new("RGB", (width, height))
    if modality == "video":
        frames, height, width, metadata = shape
        if way == "meta":
            pixels: Any = torch.empty((frames, 3, height, width), dtype=torch.uint8, device="meta")
        else:
            pixels = np.zeros((frames, height, width, 3), dtype=np.uint8)
        return pixels, {k: list(v) if isinstance(v, tuple) else v for k, v in metadata}
    return np.zeros(int(shape[0]), dtype=np.float32)


def video_shape(metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the size of the video that a decode with this metadata gives."""
    plain = plain_metadata(metadata)
    pairs = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    pairs["do_sample_frames"] = bool(metadata.get("do_sample_frames", False))
    frames = len(metadata["frames_indices"])
    return (
        frames,
        int(metadata["height"]),
        int(metadata["width"]),
        tuple(sorted(pairs.items(), key=lambda pair: pair[0])),
    )


def substitutes(processor: Any) -> dict[str, Any]:
    """Return stand-ins for the parts of a processor that return meta tensors."""
    found = {name: getattr(processor, name, None) for name in _PARTS}
    return {name: _MetaPart(part) for name, part in found.items() if part is not None}


class _MetaPart:
    """An image or video processor whose meta tensors come out as zeros without memory."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _without_meta(self._part(*args, **kwargs))

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        return _without_meta(self._part.preprocess(*args, **kwargs))


def _without_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            return value
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    if isinstance(value, list):
        return [_without_meta(part) for part in value]
    if isinstance(value, tuple):
        return tuple(_without_meta(part) for part in value)
    data = getattr(value, "data", None)
    if isinstance(data, dict):  # a BatchFeature
        for name, part in data.items():
            data[name] = _without_meta(part)
    return value
