"""Whether a decoded JPEG is whole: libjpeg fills what is missing with grey and only warns.

A file that simply stops is noticed by Pillow. One that was cut and closed again with an end
marker, or cut and filled up with zeros to its length, is not: its lower part comes out grey.
"""

from __future__ import annotations

import io
from typing import Any, Final

from PIL import Image, ImageFile, JpegImagePlugin

_END: Final = b"\xff\xd9"
_FILLER: Final = bytes((37 * n + n * n) % 251 for n in range(4096))
"""Entropy-coded data of no picture: no 0xFF, so no marker."""


def draft(image: ImageFile.ImageFile, scale: int) -> None:
    """Have an opened JPEG decoded to `1 / scale` of its sides, rounded up.

    Args:
        image: Not decoded yet.
        scale: 1, 2, 4 or 8, and not more than the shorter side.
    """
    width, height = image.size
    image.draft(image.mode, (width // scale, height // scale))


def check_whole(data: bytes, image: Image.Image, *, scale: int = 1) -> None:
    """Raise if `image`, decoded from `data`, lacks picture data at its end.

    Args:
        data: The JPEG.
        image: What Pillow decoded from it, before orientation.
        scale: As for `draft`.

    Raises:
        OSError: If the file was cut off.
    """
    start = _start_of_scan(data)
    # Behind the start of scan, 0xFF is a marker or stuffed with 0: this is the end marker, or
    # that of a further picture in the same file.
    end = data.find(_END, start)
    if end < 0:
        raise OSError("image file is truncated (no end marker)")
    if not _ends_grey(image):
        return
    # The decoder gives mid-grey for blocks without data; the picture may be grey as well. With
    # filler before the end marker a missing block comes out different, and a whole picture
    # stays as it is: the decoder skips what is behind its last block.
    longer = JpegImagePlugin.JpegImageFile(io.BytesIO(data[:end] + _FILLER + data[end:]))
    if scale > 1:
        draft(longer, scale)
    longer.load()
    if longer.tobytes() != image.tobytes():
        raise OSError("image file is truncated (no data for the lower part)")


def _start_of_scan(data: bytes) -> int:
    position = 2
    while 0 <= (position := data.find(b"\xff", position)) < len(data) - 3:
        marker = data[position + 1]
        if marker == 0xDA:
            return position
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD8:
            position += 1
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return 0


def _ends_grey(image: Image.Image) -> bool:
    """Whether the last pixel is what missing data decodes to (of CMYK, the inverse)."""
    width, height = image.size
    pixel: Any = image.getpixel((width - 1, height - 1))
    levels = {pixel} if isinstance(pixel, int) else set(pixel[:3])
    return levels <= {127, 128}
