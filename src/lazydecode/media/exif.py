"""The two facts that matter in EXIF and XMP: the orientation and the ImageID.

Reads the TIFF structure itself: Pillow's `getexif` costs 10-80 µs on a JPEG and decodes the
whole picture of a PNG to look for metadata behind it.
"""

from __future__ import annotations

import re
import struct
import uuid
from typing import Final

from PIL import ExifTags, Image

_ORIENTATION: Final = int(ExifTags.Base.Orientation)
_IMAGE_ID: Final = int(ExifTags.Base.ImageID)
_EXIF_PREFIX: Final = b"Exif\0\0"

_INTEGER_TYPES: Final = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
"""TIFF field type -> struct format of one value."""
_ASCII_TYPE: Final = 2

# As Pillow: the element or the attribute of an XMP packet, whatever else is in it.
_XMP_ORIENTATION: Final = re.compile(rb'tiff:Orientation(="|>)([0-9])')

NO_ROTATION: Final = 1


def read_exif(exif: bytes) -> tuple[int | None, bytes | None]:
    """Return (orientation, ImageID) of an EXIF block; None for what is absent or broken.

    Args:
        exif: The TIFF structure, with or without the `Exif` prefix.

    Returns:
        The orientation as stored, any integer; the 16 bytes of the UUID in ImageID.
    """
    while exif.startswith(_EXIF_PREFIX):
        exif = exif[len(_EXIF_PREFIX) :]
    try:
        return _read_ifd0(exif)
    except struct.error:
        return None, None


def _read_ifd0(tiff: bytes) -> tuple[int | None, bytes | None]:
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return None, None
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    (count,) = struct.unpack_from(order + "H", tiff, start)
    orientation = image_id = None
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        if entry + 12 > len(tiff):
            break  # a cut block: what was read so far holds
        tag, kind, length = struct.unpack_from(order + "HHI", tiff, entry)
        if tag == _ORIENTATION and kind in _INTEGER_TYPES and length == 1:
            (orientation,) = struct.unpack_from(order + _INTEGER_TYPES[kind], tiff, entry + 8)
        elif tag == _IMAGE_ID and kind == _ASCII_TYPE:
            offset = entry + 8
            if length > 4:
                (offset,) = struct.unpack_from(order + "I", tiff, entry + 8)
            image_id = parse_image_id(tiff[offset : offset + min(length, 64)])
    return orientation, image_id


def read_xmp_orientation(xmp: bytes) -> int | None:
    """Return the orientation that an XMP packet states; the packet need not be valid."""
    match = _XMP_ORIENTATION.search(xmp)
    return None if match is None else int(match[2])


def parse_image_id(value: object) -> bytes | None:
    """Return the 16 bytes of an ImageID value that is a UUID, or the text of one; else None."""
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if not isinstance(value, str):
        return None
    try:
        return uuid.UUID(value.split("\0", 1)[0].strip()).bytes
    except ValueError:
        return None


def get_image_id_bytes(image: Image.Image) -> bytes | None:
    """Return the 16 bytes of the UUID in an image's EXIF ImageID, or None.

    Broken EXIF is no identity, and nothing is decoded: a PNG file's EXIF counts only where
    Pillow has met it already.
    """
    return parse_image_id(_exif_value(image, _IMAGE_ID))


def get_orientation(image: Image.Image) -> int:
    """Return the EXIF (or XMP) orientation of an image; 1 if there is none or it is broken.

    Nothing is decoded, as in `get_image_id_bytes`.
    """
    value = _exif_value(image, _ORIENTATION)
    return value if isinstance(value, int) else NO_ROTATION


def _exif_value(image: Image.Image, tag: int) -> object:
    try:
        # Not `image.getexif()`: a PNG file's own method reads to the end, which decodes it.
        return Image.Image.getexif(image).get(tag)
    except Exception:  # Pillow raises whatever a broken block makes it; that is no metadata
        return None
