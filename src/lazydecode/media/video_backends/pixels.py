"""From a decoded frame to upright RGB pixels in a given buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from av.sidedata.sidedata import SideDataContainer
from numpy.typing import NDArray

_side_data: Final[Any] = SideDataContainer
"""Its type stub lacks the frame among the arguments."""
_BACKGROUND: Final = 255
"""Grey level behind transparent pixels: white, as for images."""


@dataclass(frozen=True, slots=True)
class Orientation:
    """One of the eight ways in which a display matrix with right angles turns a frame."""

    swaps_sides: bool = False
    flips_rows: bool = False
    flips_columns: bool = False

    @property
    def is_mirrored(self) -> bool:
        """Whether it is no mere turn: left and right change places as in a mirror."""
        return self.swaps_sides ^ self.flips_rows ^ self.flips_columns

    @classmethod
    def from_matrix(cls, matrix: NDArray[Any]) -> Orientation:
        """Return what a 3x3 matrix does; other angles go to the nearest.

        Args:
            matrix: Shape (9,), as in ISO/IEC 14496-12 (`tkhd`): a pixel at (x, y) is shown
                at (m[0] x + m[3] y, m[1] x + m[4] y).
        """
        a, b, c, d = (float(matrix[i]) for i in (0, 1, 3, 4))
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls(False, d < 0, a < 0)
        return cls(True, b < 0, c < 0)

    @classmethod
    def from_angle(cls, degrees: float) -> Orientation:
        """Return a mere turn counterclockwise; other angles go to the nearest right one."""
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        return cls.from_matrix(np.array([cos, -sin, 0, sin, cos, 0, 0, 0, 1]))

    def apply(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a turned view of `image` (height, width, channels); nothing is copied."""
        if self.swaps_sides:
            image = image.transpose(1, 0, 2)
        if self.flips_rows:
            image = image[::-1]
        if self.flips_columns:
            image = image[:, ::-1]
        return image

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) after turning."""
        return (height, width) if self.swaps_sides else (width, height)


UPRIGHT: Final = Orientation()
"""The orientation of a frame without a display matrix."""


def orientation_of(frame: Any) -> Orientation:
    """Return how a decoded PyAV frame must be turned to stand upright."""
    # Not `frame.side_data`: the frame and what that returns refer to each other, so that its
    # buffer would be kept until the collector comes by, and FFmpeg's pool would have to map a new
    # one for the next frame. 32 frames of 4K took 2.5 GB so, and take 0.9.
    try:
        matrix = _side_data(frame).get("DISPLAYMATRIX")
    except ValueError:
        # Beside it is a kind that PyAV cannot name (the EXIF of a Motion JPEG): the angle is known.
        return Orientation.from_angle(frame.rotation)
    if matrix is None:
        return UPRIGHT
    return Orientation.from_matrix(np.frombuffer(bytes(matrix), dtype=np.int32))


def upright_size(frame: Any) -> tuple[int, int]:
    """Return (width, height) of a decoded PyAV frame once it stands upright."""
    return orientation_of(frame).size(frame.width, frame.height)


def write_rgb(frame: Any, out: NDArray[np.uint8]) -> None:
    """Write a decoded PyAV frame, upright, into `out` of shape (height, width, 3).

    A frame of another size than `out` (the stream changed its resolution) is scaled to it.
    Transparent pixels show white.
    """
    orientation = orientation_of(frame)
    out_height, out_width = out.shape[:2]
    width, height = orientation.size(out_width, out_height)
    pixel_format = frame.format
    has_alpha = pixel_format.name == "pal8" or any(c.is_alpha for c in pixel_format.components)
    packed = frame.reformat(
        width=width,
        height=height,
        format="rgba" if has_alpha else "rgb24",
        # One thread: the media pool is what keeps the cores busy.
        threads=1,
    )
    channels = 4 if has_alpha else 3
    plane = packed.planes[0]
    rows = np.frombuffer(plane, dtype=np.uint8).reshape(-1, plane.line_size)[:height]
    image = rows[:, : width * channels].reshape(height, width, channels)
    if has_alpha:
        image = _on_background(image)
    out[...] = orientation.apply(image)


def _on_background(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    alpha = image[..., 3:].astype(np.uint32)
    blended = image[..., :3] * alpha + _BACKGROUND * (255 - alpha)
    return ((blended + 127) // 255).astype(np.uint8)
