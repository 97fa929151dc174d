"""Size, orientation and identity of an encoded image, from its header alone.

JPEG, PNG, WebP and GIF are read here with `struct` in 2-10 µs; opening them with Pillow takes
20 µs to 1 ms, and asking Pillow for the EXIF of a PNG decodes the picture. The other formats,
and anything unusual, are left to Pillow's header parsers.

The caps are here because Pillow has none: its parsers append metadata block by block, which is
quadratic, so a GIF of 100 MB that is one comment would keep it busy for hours.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lazydecode.errors import CorruptMediaError
from lazydecode.media.exif import NO_ROTATION, read_exif, read_xmp_orientation

_MAX_SEGMENTS: Final = 100_000
"""Segments or chunks that a header may have, image data apart."""
_LEAST_CHUNK_BYTES: Final = 512
"""Mean size of a PNG's data chunks, beyond the first `_MAX_SEGMENTS`; usual are 8 KB and more."""
_MAX_GIF_BLOCKS: Final = 4_000_000
_USUAL_SEGMENTS: Final = 64
"""Segments of a usual JPEG before its scan: a dozen, and one per 64 KB of colour profile."""
_USUAL_CHUNKS: Final = 256
"""Chunks of a usual PNG of half a megabyte: one per 8 KB, and some for metadata."""
_USUAL_METADATA_BYTES: Final = 64 * 1024
"""EXIF or XMP of a usual file. A camera's with its thumbnail fits into one segment of a JPEG."""
_MAX_JUNK_BYTES: Final = 1024 * 1024
"""Bytes between the segments of a JPEG: Pillow skips them one by one."""
_MAX_EXIF_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What the header of an encoded image says, before orientation."""

    width: int
    """Width in pixels as stored."""
    height: int
    """Height in pixels as stored."""
    mode: str
    """Pillow's mode of the stored pixels."""
    format: str
    """Pillow's name of the container."""
    num_frames: int | None = 1
    """Frames that the file states; None if counting them takes a pass over the file."""
    orientation: int = NO_ROTATION
    """EXIF orientation that is still to be applied, 1 to 8."""
    image_id: bytes | None = None
    """The 16 bytes of a UUID in EXIF ImageID."""

    @property
    def oriented_size(self) -> tuple[int, int]:
        """(width, height) after orientation."""
        if 5 <= self.orientation <= 8:
            return self.height, self.width
        return self.width, self.height


class _UnusualError(Exception):
    """The file has something that only Pillow's parser knows how to read."""


def parse_image_header(data: bytes) -> ImageFacts | None:
    """Read the header of a JPEG, PNG, WebP or GIF; None for any other format or an unusual file.

    Raises:
        CorruptMediaError: If the header is so long that reading it would be an attack.
    """
    parser = _parser_for(data)
    if parser is None:
        return None
    try:
        return parser(data)
    except (_UnusualError, struct.error, IndexError):
        return None


def read_usual_header(data: bytes) -> ImageFacts | None:
    """Return what `parse_image_header` does, if that takes no more than some 10 µs.

    None for an unusual file, and for one with so many segments before its pixels, or chunks
    in all, or so much metadata, as only a file has that is made to be slow.
    """
    try:
        if data.startswith(b"\xff\xd8\xff"):
            return _parse_jpeg(data, is_usual=True)
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _parse_png(data) if _is_usual_png(data) else None
        if data.startswith(b"RIFF") and data[12:16] in (b"VP8 ", b"VP8L"):
            return parse_image_header(data)
    except (_UnusualError, CorruptMediaError, struct.error, IndexError):
        pass
    return None


def _is_usual_png(data: bytes) -> bool:
    at = 8
    for _ in range(_USUAL_CHUNKS):
        if at >= len(data):
            return True
        length = int.from_bytes(data[at : at + 4], "big")
        if length > _USUAL_METADATA_BYTES and data[at + 4 : at + 8] in (b"eXIf", b"iTXt"):
            return False
        at += 12 + length
    return False


def _parser_for(data: bytes) -> Callable[[bytes], ImageFacts] | None:
    if data.startswith(b"\xff\xd8\xff"):
        return _parse_jpeg
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _parse_png
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _parse_webp
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _parse_gif
    return None


def _facts(
    width: int,
    height: int,
    mode: str,
    format: str,
    *,
    num_frames: int | None = 1,
    exif: bytes = b"",
    xmp: bytes = b"",
) -> ImageFacts:
    if width < 1 or height < 1:
        raise _UnusualError
    orientation, image_id = read_exif(exif) if exif else (None, None)
    if orientation is None and xmp:
        orientation = read_xmp_orientation(xmp)
    if orientation is None or not 1 <= orientation <= 8:
        orientation = NO_ROTATION
    return ImageFacts(width, height, mode, format, num_frames, orientation, image_id)


# -- JPEG

_JPEG_MODES: Final = {1: "L", 3: "RGB", 4: "CMYK"}
_START_OF_SCAN: Final = 0xDA
_NO_LENGTH: Final = frozenset([0x00, 0x01, *range(0xD0, 0xD9)])
_UNUSUAL_MARKERS: Final = _NO_LENGTH | {0xD9, 0xFF}
_START_OF_FRAME: Final = frozenset([*range(0xC0, 0xD0)]) - {0xC4, 0xC8, 0xCC}
_IGNORED: Final = frozenset((0xC4, 0xDB, 0xE0))
"""What most segments are: tables, and the picture's density."""
_SEGMENT: Final = struct.Struct(">BBH")
"""What a segment begins with: 0xFF, its marker, its length from there on."""
_XMP_NAMESPACE: Final = b"http://ns.adobe.com/xap/1.0/\0"


def _parse_jpeg(data: bytes, *, is_usual: bool = False) -> ImageFacts:
    """Read the segments before the pixels.

    Args:
        data: The file.
        is_usual: Whether it is given up as soon as it has something that few files have.
    """
    width = height = components = 0
    exif: list[bytes] = []
    xmp = b""
    num_frames = 1
    junk = 0
    position, end = 2, len(data)
    for _ in range(_USUAL_SEGMENTS if is_usual else _MAX_SEGMENTS):
        if is_usual:
            prefix, marker, length = _SEGMENT.unpack_from(data, position)
            if prefix != 0xFF or marker in _UNUSUAL_MARKERS:
                raise _UnusualError
            position += 2
        else:
            # Between segments, decoders skip to the next marker, whatever stands there.
            marked = data.find(b"\xff", position)
            junk += (end if marked < 0 else marked) - position
            if marked < 0 or junk > _MAX_JUNK_BYTES:
                raise CorruptMediaError("the JPEG header has no end")
            position = marked
            while data[position] == 0xFF:
                position += 1
            marker = data[position]
            position += 1
            if marker in _NO_LENGTH:
                continue
            if marker == 0xD9:
                break
            (length,) = struct.unpack_from(">H", data, position)
        if length < 2 or position + length > end:
            raise _UnusualError
        if marker == _START_OF_SCAN:
            break
        if marker in _IGNORED:
            position += length
            continue
        body = position + 2
        if marker in _START_OF_FRAME and not components:
            height, width, components = struct.unpack_from(">HHB", data, body + 1)
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", body):
            exif.append(data[body + 6 : position + length])  # over 64 KB: several segments
            if is_usual and len(exif) > 1:
                raise _UnusualError
            if len(exif) * 65_536 > _MAX_EXIF_BYTES:
                raise CorruptMediaError("the JPEG has too much EXIF metadata")
        elif marker == 0xE1 and data.startswith(_XMP_NAMESPACE, body):
            xmp = data[body + len(_XMP_NAMESPACE) : position + length]
        elif marker == 0xE2 and data.startswith(b"MPF\0", body):
            num_frames = max(1, _count_mpf(data[body + 4 : position + length]))
        position += length
    else:
        raise CorruptMediaError(f"the JPEG header has more than {_MAX_SEGMENTS} segments")
    if components not in _JPEG_MODES:
        raise _UnusualError
    format = "MPO" if num_frames > 1 else "JPEG"
    return _facts(
        width,
        height,
        _JPEG_MODES[components],
        format,
        num_frames=num_frames,
        exif=b"".join(exif),
        xmp=xmp,
    )


def _count_mpf(tiff: bytes) -> int:
    """Number of pictures in a Multi-Picture Format block (CIPA DC-007, tag 0xB001)."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, length, value = struct.unpack_from(order + "HHII", tiff, entry)
            if tag == 0xB001 and kind == 4 and length == 1:
                return min(int(value), 65_535)
    except struct.error:
        pass  # a broken index of further pictures: the first one stands alone
    return 1


# -- PNG

_PNG_MODES: Final = {
    (1, 0): "1",
    **{(depth, 0): "L" for depth in (2, 4, 8)},
    (16, 0): "I;16",
    (8, 2): "RGB",
    (16, 2): "RGB",
    **{(depth, 3): "P" for depth in (1, 2, 4, 8)},
    (8, 4): "LA",
    (16, 4): "RGBA",
    (8, 6): "RGBA",
    (16, 6): "RGBA",
}
"""(bit depth, colour type) -> the mode in which Pillow opens it."""


def _parse_png(data: bytes) -> ImageFacts:
    length, kind = struct.unpack_from(">I4s", data, 8)
    if kind != b"IHDR" or length != 13:
        raise _UnusualError
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    mode = _PNG_MODES.get((depth, colour))
    if mode is None:
        raise _UnusualError
    exif = xmp = b""
    num_frames, others, images = 1, 0, 0
    unusual = False
    position, end = 33, len(data)
    most_images = _MAX_SEGMENTS + end // _LEAST_CHUNK_BYTES
    unpack = struct.Struct(">I4s").unpack_from
    while position + 8 <= end:
        length, kind = unpack(data, position)
        position += 8
        if kind == b"IDAT" or kind == b"fdAT":
            images += 1
            if images > most_images:
                raise CorruptMediaError("the PNG's data is in too many too small chunks")
        elif kind == b"IEND":
            break
        else:
            others += 1
            if others > _MAX_SEGMENTS:
                raise CorruptMediaError(f"the PNG has more than {_MAX_SEGMENTS} chunks")
            if kind == b"eXIf":
                exif = data[position : position + length]
            elif kind == b"acTL" and not images:
                (num_frames,) = struct.unpack_from(">I", data, position)
            elif kind == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0", position):
                xmp = _itxt_text(data[position + 18 : position + length])
                unusual = unusual or data[position + 18 : position + 19] == b"\1"  # compressed
            elif kind == b"zTXt" or kind == b"tEXt":
                # ImageMagick's old form of EXIF.
                unusual = unusual or data.startswith(b"Raw profile type exif\0", position)
        position += length + 4
    if unusual:
        raise _UnusualError
    return _facts(width, height, mode, "PNG", num_frames=max(1, num_frames), exif=exif, xmp=xmp)


def _itxt_text(body: bytes) -> bytes:
    """The text of an uncompressed iTXt chunk behind its keyword (flags, language, translation)."""
    parts = body[2:].split(b"\0", 2)
    return parts[2] if len(parts) == 3 else b""


# -- WebP


def _parse_webp(data: bytes) -> ImageFacts:
    first = data[12:16]
    if first == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise _UnusualError
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
        return _facts(width, height, "RGB", "WEBP")
    if first == b"VP8L":
        if data[20] != 0x2F:
            raise _UnusualError
        (bits,) = struct.unpack_from("<I", data, 21)
        mode = "RGBA" if bits & 0x10000000 else "RGB"
        return _facts((bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1, mode, "WEBP")
    if first != b"VP8X":
        raise _UnusualError
    flags = data[20]
    width = int.from_bytes(data[24:27], "little") + 1
    height = int.from_bytes(data[27:30], "little") + 1
    exif, xmp, num_frames = _walk_riff(data)
    mode = "RGBA" if flags & 0x10 else "RGB"
    return _facts(width, height, mode, "WEBP", num_frames=max(1, num_frames), exif=exif, xmp=xmp)


def _walk_riff(data: bytes) -> tuple[bytes, bytes, int]:
    exif = xmp = b""
    num_frames = 0
    position, end = 30, len(data)
    for _ in range(_MAX_SEGMENTS):
        if position + 8 > end:
            return exif, xmp, num_frames
        kind, length = struct.unpack_from("<4sI", data, position)
        position += 8
        if kind == b"ANMF":
            num_frames += 1
        elif kind == b"EXIF" and not exif:
            exif = data[position : position + length]
        elif kind == b"XMP " and not xmp:
            xmp = data[position : position + length]
        position += length + (length & 1)
    raise CorruptMediaError(f"the WebP has more than {_MAX_SEGMENTS} chunks")


# -- GIF


def _parse_gif(data: bytes) -> ImageFacts:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    num_blocks = 0
    while data[position] == 0x21:  # an extension, of blocks with a length byte each
        position, passed = _skip_gif_blocks(data, position + 2, _MAX_SEGMENTS - num_blocks)
        num_blocks += passed
        if num_blocks >= _MAX_SEGMENTS:
            raise CorruptMediaError("the GIF has too much metadata before its first frame")
    if data[position] == 0x2C:  # a first frame beyond the canvas makes that larger
        left, top, frame_width, frame_height = struct.unpack_from("<4H", data, position + 1)
        width, height = max(width, left + frame_width), max(height, top + frame_height)
    return _facts(width, height, "P", "GIF", num_frames=None)


def _skip_gif_blocks(data: bytes, position: int, max_blocks: int) -> tuple[int, int]:
    """Return the position behind a row of blocks, and how many there were (a last empty one too).

    Stops early after `max_blocks`.
    """
    for num_blocks in range(max_blocks):
        length = data[position]
        position += length + 1
        if not length:
            return position, num_blocks + 1
    return position, max_blocks


def count_gif_frames(data: bytes) -> int:
    """Count the frames of a GIF by walking its blocks; a cut file counts as far as it goes."""
    num_frames = 0
    budget = _MAX_GIF_BLOCKS
    try:
        (flags,) = struct.unpack_from("<B", data, 10)
        position = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
        while budget > 0 and (kind := data[position]) != 0x3B:
            if kind == 0x21:
                position, passed = _skip_gif_blocks(data, position + 2, budget)
            elif kind == 0x2C:
                flags = data[position + 9]
                palette = 3 << ((flags & 7) + 1) if flags & 0x80 else 0
                position, passed = _skip_gif_blocks(data, position + 11 + palette, budget)
                num_frames += 1
            else:
                break
            budget -= passed
    except (IndexError, struct.error):
        pass
    return max(1, num_frames)


# -- TIFF


def count_tiff_pages(data: bytes) -> int:
    """Count the pages of a TIFF or BigTIFF by following its directories; at most 65,535."""
    order = "<" if data[:2] == b"II" else ">"
    num_pages = 0
    seen: set[int] = set()
    try:
        (version,) = struct.unpack_from(order + "H", data, 2)
        big = version == 43
        (position,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
        while position and position not in seen and num_pages < 65_535:
            seen.add(position)
            (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, position)
            position += 8 + 20 * count if big else 2 + 12 * count
            (position,) = struct.unpack_from(order + ("Q" if big else "I"), data, position)
            num_pages += 1
    except (struct.error, OverflowError):
        pass
    return max(1, num_pages)
