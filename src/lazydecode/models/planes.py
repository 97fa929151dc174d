"""A Pillow picture as planes of bytes, in one pass over its pixels.

Most image processors work on tensors of shape (channels, height, width). Pillow keeps an RGB
picture as four bytes a pixel; its own way to an array copies them three times. It also hands
its memory out by Arrow's C data interface, which two structs of ctypes are enough to read.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

_STRIP_BYTES: Final = 1024 * 1024
"""A picture in several blocks of memory is copied in strips that stay in the processor's cache."""


def planes_of(image: Image.Image) -> torch.Tensor:
    """Return an RGB picture as a uint8 tensor, shape (3, height, width)."""
    planes = torch.empty((3, image.height, image.width), dtype=torch.uint8)
    array = planes.numpy()
    if _write_planes(image, array):
        return planes
    rows = max(1, _STRIP_BYTES // (4 * image.width))
    for top in range(0, image.height, rows):
        bottom = min(image.height, top + rows)
        strip = image.crop((0, top, image.width, bottom))
        if not _write_planes(strip, array[:, top:bottom]):
            for channel, name in enumerate("RGB"):
                plane = np.frombuffer(strip.tobytes("raw", name), np.uint8)
                array[channel, top:bottom] = plane.reshape(strip.height, strip.width)
    return planes


def _write_planes(image: Image.Image, out: NDArray[np.uint8]) -> bool:
    """Write the channels of a picture to `out`, shape (3, height, width), if it can be read."""
    held = _Held(image)
    if held.pixels is None:
        return False
    # Whole pixels are read and cut down to one byte: numpy does that four times as fast as it
    # reads every fourth byte.
    np.copyto(out[0], held.pixels, casting="unsafe")
    np.right_shift(held.pixels, 8, out=out[1], casting="unsafe")
    np.right_shift(held.pixels, 16, out=out[2], casting="unsafe")
    return True


class _ArrowArray(ctypes.Structure):
    """`struct ArrowArray` of Arrow's C data interface."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset")),
    *((name, ctypes.c_int64) for name in ("n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    *((name, ctypes.c_void_p) for name in ("dictionary", "release", "private_data")),
]

_capsule_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Held:
    """The memory of a picture, for as long as this object lives."""

    def __init__(self, image: Image.Image) -> None:
        self.pixels: NDArray[np.uint32] | None = None
        """Shape (height, width), little endian: red in the lowest byte. None if the picture is
        not in one piece of memory (over 16 MB), or Pillow does not hand it out."""
        try:
            self._capsules: Any = image.__arrow_c_array__()
        except (AttributeError, ValueError, MemoryError):
            return
        array = _ArrowArray.from_address(_capsule_pointer(self._capsules[1], b"arrow_array"))
        count = image.width * image.height
        if not count or array.length != count or array.offset or array.n_children != 1:
            return
        values = array.children[0].contents
        if values.length != 4 * count or values.offset or values.n_buffers != 2:
            return
        memory = (ctypes.c_uint8 * (4 * count)).from_address(values.buffers[1])
        pixels = np.frombuffer(memoryview(memory), dtype=np.dtype("<u4"))
        self.pixels = pixels.reshape(image.height, image.width)
