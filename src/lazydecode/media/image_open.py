"""Which encoded images are accepted, and how each is opened: an explicit list.

A format is recognised by its first bytes and opened by its own parser class, never by trying
what is registered: Pillow's registry also holds formats that start an interpreter (EPS), call
a handler of the platform (WMF), or hold other files, and any package may add more.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Final

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from lazydecode.errors import CorruptMediaError
from lazydecode.media.exif import get_image_id_bytes, get_orientation, parse_image_id
from lazydecode.media.image_header import ImageFacts, count_tiff_pages, parse_image_header

ACCEPTED_FORMATS: Final = ("JPEG", "PNG", "WebP", "GIF", "AVIF", "HEIC", "TIFF", "BMP")
"""Names of the accepted formats, for messages."""

_TIFF_MAGIC: Final = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_AVIF_BRANDS: Final = frozenset([b"avif", b"avis"])
_HEIF_BRANDS: Final = frozenset(
    [b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"]
)


def open_image(data: bytes) -> ImageFile.ImageFile:
    """Open an encoded image; its pixels stay encoded and `data` is not copied.

    Raises:
        CorruptMediaError: If the bytes are of no accepted format.
        Exception: Whatever the format's parser raises.
    """
    opener = _opener_for(data)
    if opener is None:
        found = "it is empty" if not data else _looks_like(data)
        accepted = ", ".join(ACCEPTED_FORMATS)
        raise CorruptMediaError(f"Failed to load image: {found}; accepted are {accepted}")
    return opener(io.BytesIO(data))


def read_image_facts(data: bytes) -> ImageFacts:
    """Read the header of an encoded image, by our own parser where it can.

    Raises:
        CorruptMediaError: If the bytes are of no accepted format.
        Exception: Whatever the format's parser raises.
    """
    facts = parse_image_header(data)
    if facts is not None:
        return facts
    opened = open_image(data)
    width, height = opened.size
    if isinstance(opened, TiffImagePlugin.TiffImageFile):
        # Pillow turns the page while it decodes it, and states the turned size. Its directory
        # holds the ImageID; `getexif` would parse that a second time.
        return ImageFacts(
            width,
            height,
            opened.mode,
            "TIFF",
            num_frames=count_tiff_pages(data),
            image_id=parse_image_id(opened.tag_v2.get(ExifTags.Base.ImageID)),
        )
    format = opened.format or ""
    return ImageFacts(
        width,
        height,
        opened.mode,
        format,
        num_frames=getattr(opened, "n_frames", 1) if format in _COUNTED else 1,
        orientation=get_orientation(opened),
        image_id=get_image_id_bytes(opened),
    )


_COUNTED: Final = frozenset(["AVIF", "HEIF"])
"""Formats whose opener has read the number of frames already."""


def _opener_for(data: bytes) -> Callable[[io.BytesIO], ImageFile.ImageFile] | None:
    if data.startswith(b"\xff\xd8\xff"):
        # Also for MPO, a JPEG with further pictures behind it: the first one is the picture.
        return JpegImagePlugin.JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GifImagePlugin.GifImageFile
    if data.startswith(_TIFF_MAGIC):
        return TiffImagePlugin.TiffImageFile
    if data.startswith(b"BM"):
        return BmpImagePlugin.BmpImageFile
    brands = _iso_brands(data)
    if brands & _AVIF_BRANDS:
        return _open_avif
    if brands & _HEIF_BRANDS:
        return _open_heif
    return None


def _open_avif(stream: io.BytesIO) -> ImageFile.ImageFile:
    # Pillow takes a thread per core for each picture, and has nothing but this global to say
    # otherwise. Whoever decodes several at once spreads them over the cores himself.
    AvifImagePlugin.DEFAULT_MAX_THREADS = AvifImagePlugin.DEFAULT_MAX_THREADS or 1
    return AvifImagePlugin.AvifImageFile(stream)


def _open_heif(stream: io.BytesIO) -> ImageFile.ImageFile:
    import pillow_heif  # 90 ms: loads libheif and an encoder, which few processes need

    pillow_heif.options.DECODE_THREADS = 1  # four by default; as for AVIF
    opened: ImageFile.ImageFile = pillow_heif.HeifImageFile(stream)
    return opened


def _iso_brands(data: bytes) -> frozenset[bytes]:
    """Major and compatible brands of an ISO base media file; empty for anything else."""
    if data[4:8] != b"ftyp":
        return frozenset()
    end = min(int.from_bytes(data[:4], "big"), len(data), 256)
    return frozenset([data[8:12], *(data[i : i + 4] for i in range(16, end - 3, 4))])


def _looks_like(data: bytes) -> str:
    start = data[:256].lstrip().lower()
    if b"<svg" in start:
        return "it is an SVG drawing, which has no pixels"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a text document"
    return "the format is not recognised"
