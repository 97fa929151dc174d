"""Kimi K2.5's rescale, normalize and patchify in one pass over the pixels, compiled by numba.

The class makes three passes and as many copies. Here each value is looked up in a table of the
256 results that the class itself gives, and written to its place: the same bits. Threads of
numba's workqueue layer abort the process if a second thread enters while they work, so whoever
uses this lets one thread in at a time (`lazydecode.models.exclusion`).
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

_PARTS: Final = ("image_processor", "video_processor")
PROCESSOR: Final = "Kimi_K25Processor"
REASON: Final = "its pixels are processed by numba, whose workqueue lets one thread in"
"""Why the copy is not re-entrant."""


def fused(processor: Any) -> Any | None:
    """Return a copy of Kimi K2.5's processor that works in one pass; None if it cannot.

    A line in the log says that numba is missing.
    """
    if type(processor).__name__ != PROCESSOR:
        return None
    if importlib.util.find_spec("numba") is None:
        logger.warning("fused preprocessing is off: it needs numba (pip install lazydecode[numba])")
        return None
    _kernel()
    fast = copy.copy(processor)
    for name in _PARTS:
        part = copy.copy(getattr(processor, name))
        usual: Any = type(part)
        part.__class__ = _fused_class(usual)
        setattr(fast, name, part)
    return fast


@dataclass(frozen=True, slots=True)
class _Pending:
    """Pictures whose pixels are normalized when they are cut into patches."""

    images: torch.Tensor
    """Shape (..., 3, height, width), uint8."""
    table: torch.Tensor
    """Shape (3, 256), float32: what each value of each channel becomes."""

    def __len__(self) -> int:
        """Number of pictures or videos: the class counts them."""
        return len(self.images)


@functools.cache
def _fused_class(kind: Any) -> Any:
    def rescale_and_normalize(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        if images.dtype != torch.uint8 or images.device.type != "cpu":
            return kind.rescale_and_normalize(self, images, *args, **kwargs)
        values = torch.arange(256, dtype=torch.uint8).expand(1, images.shape[-3], 1, 256)
        table = kind.rescale_and_normalize(self, values.contiguous(), *args, **kwargs)
        if table.dtype != torch.float32:
            return kind.rescale_and_normalize(self, images, *args, **kwargs)
        return _Pending(images, table.reshape(images.shape[-3], 256).contiguous())

    def patchify(self: Any, images: Any, patch_size: int) -> Any:
        if not isinstance(images, _Pending):
            return kind.patchify(self, images, patch_size=patch_size)
        shape = tuple(images.images.shape)
        rows, columns = shape[-2] // patch_size, shape[-1] // patch_size
        patches = cut_patches(images, patch_size)
        frames = shape[1:-3]
        count = rows * columns * (frames[0] if frames else 1)
        size = (shape[0], count, shape[-3], patch_size, patch_size)
        return (patches.reshape(size), *frames, rows, columns)

    # The name stays: records and backends are bound to it.
    return type(
        kind.__name__,
        (kind,),
        {
            "rescale_and_normalize": rescale_and_normalize,
            "patchify": patchify,
            "__module__": __name__,
            "__doc__": kind.__doc__,
        },
    )


def cut_patches(pending: _Pending, size: int) -> torch.Tensor:
    """Return the patches of pictures, shape (patches, 3, size, size), float32."""
    images = pending.images.reshape(-1, *pending.images.shape[-3:]).contiguous()
    count, channels, height, width = images.shape
    shape = (count * (height // size) * (width // size), channels, size, size)
    patches = torch.empty(shape, dtype=torch.float32)
    enter_kernel(images.numpy(), pending.table.numpy(), patches.numpy())
    return patches


def enter_kernel(images: Any, table: Any, patches: Any) -> None:
    """Fill `patches`; one thread at a time may be inside."""
    _kernel()(images, table, patches)


@functools.cache
def _kernel() -> Any:
    """Return the compiled pass; the first call takes a few seconds."""
    import numba

    def fill(images: Any, table: Any, patches: Any) -> None:
        size = patches.shape[2]
        count, channels, height, width = images.shape
        rows, columns = height // size, width // size
        for band in numba.prange(count * rows):
            image, row = band // rows, band % rows
            for column in range(columns):
                at = band * columns + column
                for channel in range(channels):
                    for y in range(size):
                        for x in range(size):
                            value = images[image, channel, row * size + y, column * size + x]
                            patches[at, channel, y, x] = table[channel, value]

    signature = "void(uint8[:,:,:,::1], float32[:,::1], float32[:,:,:,::1])"
    return numba.njit(signature, parallel=True)(fill)
