"""From the mode in which a picture is stored to the mode that was asked for."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

IMAGE_MODES: Final = frozenset(
    ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"]
)
"""Modes that may be asked for."""

_WIDE_GREY: Final = frozenset(["I;16", "I;16L", "I;16B", "I;16N", "I", "F"])
_ALPHA_MODES: Final = frozenset(["LA", "La", "PA", "RGBA", "RGBa"])

_TRANSPOSITIONS: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what makes the picture upright."""


def orient(image: Image.Image, orientation: int) -> Image.Image:
    """Return the picture upright, as its EXIF orientation says."""
    transposition = _TRANSPOSITIONS.get(orientation)
    return image if transposition is None else image.transpose(transposition)


def to_mode(image: Image.Image, mode: str | None, background: tuple[int, int, int]) -> Image.Image:
    """Return `image` in `mode`; None leaves it as it is stored.

    Going to RGB, transparent pixels show `background`, also those of an RGB picture with a key
    colour. Grey of more than 8 bits is scaled, not
    clipped: Pillow's own conversion turns nearly every 16-bit picture white.
    """
    if mode is None or (image.mode == mode and "transparency" not in image.info):
        return image
    if image.mode in _WIDE_GREY and mode not in ("I", "F"):
        image = _narrow(image)
        if image.mode == mode:
            return image
    if mode == "RGB" and has_transparency(image):
        return _flatten(image, background)
    if image.mode == "La":
        image = image.convert("LA")
    elif image.mode == "RGBa":
        image = image.convert("RGBA")
    return image.convert(mode)


def has_transparency(image: Image.Image) -> bool:
    """Whether any pixel may be transparent: an alpha channel, a palette entry or a key colour."""
    return image.mode in _ALPHA_MODES or "transparency" in image.info


def _flatten(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    if image.mode != "RGBA":
        image = _key_colour_in_8_bits(image).convert("RGBA")
    flat = Image.new("RGB", image.size, background)
    flat.paste(image, mask=image.getchannel("A"))
    return flat


def _key_colour_in_8_bits(image: Image.Image) -> Image.Image:
    """Bring the key colour of a 16-bit RGB picture to the 8 bits that Pillow keeps of it."""
    key = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(key, tuple) and any(part > 255 for part in key):
        image.info["transparency"] = tuple(part >> 8 for part in key)
    return image


def _narrow(image: Image.Image) -> Image.Image:
    """Scale grey of more than 8 bits to `L`, or to `LA` if a grey level is transparent.

    16 bits keep their high byte, as Pillow does with 16-bit colour. Modes `I` and `F` do not
    say their range: floats up to 1 are fractions, values up to 255 are kept, values up to
    65,535 are taken as 16 bits, and anything larger is scaled by the largest value.
    """
    wide: NDArray[np.generic] = np.asarray(image)
    if image.mode in ("I", "F"):
        narrow = _narrow_unbounded(wide.astype(np.float64))
    else:
        narrow = (wide.astype(np.uint16) >> 8).astype(np.uint8)
    grey = Image.fromarray(narrow)
    key = image.info.get("transparency")
    if not isinstance(key, int):
        return grey
    alpha = np.where(wide == key, np.uint8(0), np.uint8(255))
    return Image.merge("LA", (grey, Image.fromarray(alpha)))


def _narrow_unbounded(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    top = float(values.max(initial=0.0))
    if top <= 1.0:
        scale = 255.0
    elif top <= 255.0:
        scale = 1.0
    else:
        scale = 255.0 / max(top, 65_535.0)
    scaled: NDArray[np.uint8] = np.clip(values * scale, 0, 255).astype(np.uint8)
    return scaled
