"""Headers without pixels: our parser agrees with the decoder, and no file can keep it busy."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import uuid
import warnings
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from lazydecode.errors import CorruptMediaError, LazyDecodeError
from lazydecode.media.exif import (
    get_image_id_bytes,
    get_orientation,
    parse_image_id,
    read_exif,
    read_xmp_orientation,
)
from lazydecode.media.image import ImageMediaIO
from lazydecode.media.image_header import (
    count_gif_frames,
    count_tiff_pages,
    parse_image_header,
    read_usual_header,
)
from lazydecode.media.image_open import read_image_facts
from tests.builders import (
    join_png,
    make_animation,
    make_exif,
    make_image,
    make_jpeg,
    make_png,
    make_webp,
    png_chunk,
    quadrants,
    split_png,
)

IMAGE_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


VARIANTS: dict[str, bytes] = {
    **{f"jpeg-{mode}": make_jpeg((37, 21), mode=mode) for mode in ("L", "RGB", "CMYK")},
    "jpeg-progressive": make_jpeg((37, 21), progressive=True),
    "jpeg-444": make_jpeg((37, 21), subsampling=0),
    "jpeg-icc-comment": make_jpeg((37, 21), icc_profile=b"p" * 100_000, comment=b"hello"),
    **{
        f"png-{mode}": make_png((37, 21), mode=mode)
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA")
    },
    "png-2-bit": make_png((37, 21), image=quadrants((37, 21)).quantize(4), bits=2),
    "webp-lossy": make_webp((37, 21), lossless=False),
    "webp-lossless": make_webp((37, 21)),
    "webp-alpha": make_webp((37, 21), mode="RGBA", image=Image.new("RGBA", (37, 21), (1, 2, 3, 4))),
    "webp-lossy-alpha": make_webp(
        (37, 21), image=Image.new("RGBA", (37, 21), (1, 2, 3, 4)), lossless=False
    ),
    "gif": make_image("GIF", (37, 21)),
    "tiff": make_image("TIFF", (37, 21)),
    "tiff-lzw": make_image("TIFF", (37, 21), compression="tiff_lzw"),
    "bmp": make_image("BMP", (37, 21)),
    "avif": make_image("AVIF", (37, 21)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_header_agrees_with_the_decoder(name: str) -> None:
    data = VARIANTS[name]
    header = ImageMediaIO().probe_header(data)
    decoded = ImageMediaIO(None).load_bytes(data)
    assert header is not None
    assert (header.width, header.height) == decoded.size == (37, 21)
    assert header.mode == opened(data).mode
    assert header.format == opened(data).format
    assert header.num_frames == 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF"])
def test_sizes_are_upright(format: str, orientation: int) -> None:
    options: dict[str, Any] = {"lossless": True} if format == "WEBP" else {}
    if format == "HEIF":
        options["exif"] = make_exif(orientation=orientation).tobytes()
        data = make_image(format, (64, 48), **options)
    else:
        data = make_image(format, (64, 48), orientation=orientation, **options)
    header = ImageMediaIO().probe_header(data)
    decoded = ImageMediaIO().load_bytes(data)
    assert header is not None
    assert (header.width, header.height) == decoded.size
    assert decoded.size == ((48, 64) if orientation >= 5 else (64, 48))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_frames_are_counted(format: str) -> None:
    header = ImageMediaIO().probe_header(make_animation(format))
    assert header is not None
    assert header.num_frames == 3
    assert (header.width, header.height) == (32, 32)


def test_a_second_picture_behind_a_jpeg_is_counted() -> None:
    first, second = quadrants((48, 32)), Image.new("RGB", (48, 32))
    data = make_image("MPO", image=first, save_all=True, append_images=[second])
    header = ImageMediaIO().probe_header(data)
    assert header is not None
    assert (header.format, header.num_frames, header.width) == ("MPO", 2, 48)


@pytest.mark.parametrize("canvas", [(0, 0), (10, 10), (64, 10), (100, 90)])
def test_a_gif_frame_beyond_the_canvas_makes_that_larger(canvas: tuple[int, int]) -> None:
    data = bytearray(make_image("GIF", (64, 48)))
    struct.pack_into("<2H", data, 6, *canvas)
    header = ImageMediaIO().probe_header(bytes(data))
    size = max(canvas[0], 64), max(canvas[1], 48)
    assert header is not None
    assert (header.width, header.height) == ImageMediaIO().load_bytes(bytes(data)).size == size


def test_a_header_never_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.Image.Image.load", refuse)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", refuse)
    for name, data in VARIANTS.items():
        assert ImageMediaIO().load_bytes_ref(data).header is not None, name


# -- EXIF and XMP


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_orientation_and_image_id_are_read(format: str) -> None:
    facts = read_image_facts(make_image(format, orientation=6, image_id=IMAGE_ID))
    assert facts.orientation == 6
    assert facts.image_id == IMAGE_ID.bytes
    assert facts.oriented_size == (48, 64)


def test_exif_behind_the_pixels_of_a_png_is_found_without_decoding() -> None:
    chunks = split_png(make_png(orientation=8, image_id=IMAGE_ID))
    exif = [chunk for chunk in chunks if chunk[0] == b"eXIf"]
    rest = [chunk for chunk in chunks if chunk[0] not in (b"eXIf", b"IEND")]
    data = join_png([*rest, *exif, (b"IEND", b"")])
    facts = parse_image_header(data)
    assert facts is not None
    assert (facts.orientation, facts.image_id) == (8, IMAGE_ID.bytes)
    upright = ImageMediaIO().load_bytes(data)
    assert upright.size == (48, 64)
    assert upright.tobytes() == ImageOps.exif_transpose(opened(data)).convert("RGB").tobytes()


@pytest.mark.parametrize("compressed", [False, True])
def test_exif_in_a_text_chunk_is_left_to_pillow(compressed: bool) -> None:
    block = make_exif(orientation=6).tobytes()
    text = f"\nexif\n{len(block):8}\n{block.hex()}\n".encode()
    keyword = b"Raw profile type exif\0"
    chunk = (
        (b"zTXt", keyword + b"\0" + zlib.compress(text))
        if compressed
        else (b"tEXt", keyword + text)
    )
    chunks = split_png(make_png())
    data = join_png([chunks[0], chunk, *chunks[1:]])
    assert parse_image_header(data) is None
    header = ImageMediaIO().probe_header(data)
    assert header is not None
    assert (header.width, header.height) == ImageMediaIO().load_bytes(data).size == (48, 64)


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("packet", [XMP, XMP.replace(b'="6"/', b">6<"), b"\xff\xfe" + XMP])
@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_xmp_orientation_counts_where_exif_has_none(format: str, packet: bytes) -> None:
    data = make_image(format, xmp=packet)
    facts = parse_image_header(data)
    assert facts is not None
    assert facts.orientation == 6
    assert ImageMediaIO().load_bytes(data).size == (48, 64)
    both = make_image(format, xmp=packet, orientation=3)
    facts = parse_image_header(both)
    assert facts is not None
    assert facts.orientation == 3


@pytest.mark.parametrize("compressed", [False, True])
def test_xmp_orientation_of_a_png(compressed: bool) -> None:
    body = b"XML:com.adobe.xmp\0" + (
        b"\1\0\0\0" + zlib.compress(XMP) if compressed else b"\0\0\0\0" + XMP
    )
    chunks = split_png(make_png())
    data = join_png([chunks[0], (b"iTXt", body), *chunks[1:]])
    header = ImageMediaIO().probe_header(data)
    assert header is not None
    assert (header.width, header.height) == (48, 64) == ImageMediaIO().load_bytes(data).size


def test_xmp_without_orientation_says_nothing() -> None:
    assert read_xmp_orientation(b"<x/>") is None
    assert read_xmp_orientation(b"") is None


@given(
    st.sampled_from("<>"),
    st.sampled_from(["H", "I", "B", "h", "i", "b"]),
    st.integers(-128, 127),
    st.booleans(),
)
def test_orientation_of_any_integer_type(order: str, kind: str, value: int, prefix: bool) -> None:
    if kind in "HIB":
        value = abs(value)
    code = {"B": 1, "H": 3, "I": 4, "b": 6, "h": 8, "i": 9}[kind]
    tiff = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 1)
    tiff += struct.pack(order + "HHI", 0x0112, code, 1) + struct.pack(order + kind, value).ljust(
        4, b"\0"
    )
    assert read_exif(b"Exif\0\0" * prefix + tiff) == (value, None)


@given(st.binary(max_size=80))
def test_any_bytes_as_exif_are_read_or_ignored(block: bytes) -> None:
    read_exif(block)
    read_exif(b"II*\0\x08\0\0\0" + block)
    read_exif(b"Exif\0\0MM\0*\0\0\0\x08" + block)


@given(st.data())
def test_damaged_exif_agrees_with_pillow_or_is_ignored(data: st.DataObject) -> None:
    block = bytearray(make_exif(orientation=6, image_id=IMAGE_ID).tobytes()[6:])
    position = data.draw(st.integers(8, len(block) - 1))
    block[position] = data.draw(st.integers(0, 255))
    orientation, image_id = read_exif(bytes(block))
    exif = Image.Exif()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exif.load(bytes(block))
            theirs = exif.get(ExifTags.Base.Orientation)
        except Exception:
            return
    if orientation is not None and isinstance(theirs, int):
        assert orientation == theirs
    assert image_id is None or len(image_id) == 16


@pytest.mark.parametrize(
    "text",
    [
        str(IMAGE_ID),
        f"{IMAGE_ID}\0",
        str(IMAGE_ID).upper(),
        IMAGE_ID.hex,
        f" {{{IMAGE_ID}}} ",
        IMAGE_ID,
    ],
)
def test_an_image_id_is_a_uuid_or_its_text(text: object) -> None:
    assert parse_image_id(text) == IMAGE_ID.bytes


@pytest.mark.parametrize("value", ["", "no uuid", str(IMAGE_ID)[:-1], 7, None, b"\xff" * 16, 1.5])
def test_anything_else_is_no_image_id(value: object) -> None:
    assert parse_image_id(value) is None


def test_image_id_of_a_pillow_image() -> None:
    image = quadrants()
    assert get_image_id_bytes(image) is None
    image.getexif()[ExifTags.Base.ImageID] = IMAGE_ID  # type: ignore[assignment]
    assert get_image_id_bytes(image) == IMAGE_ID.bytes
    assert get_image_id_bytes(opened(make_jpeg(image_id=IMAGE_ID))) == IMAGE_ID.bytes
    assert get_orientation(opened(make_jpeg(orientation=7))) == 7


def test_image_id_of_a_png_is_not_looked_for_behind_the_pixels() -> None:
    image = opened(make_png())
    assert get_image_id_bytes(image) is None
    assert get_orientation(image) == 1
    assert image.tile, "the picture was decoded"  # type: ignore[attr-defined]


def test_broken_exif_of_a_pillow_image_is_no_identity() -> None:
    image = quadrants()
    image.info["exif"] = b"Exif\0\0II*\0\xff\xff\xff\xff"
    assert get_image_id_bytes(image) is None
    image = quadrants()
    image.info["exif"] = b"Exif\0\0nonsense"
    assert get_orientation(image) == 1


# -- damage and attacks


@pytest.mark.parametrize("name", VARIANTS)
def test_every_cut_of_a_header_is_read_or_refused(name: str) -> None:
    data = VARIANTS[name]
    for length in {*range(0, min(len(data), 400)), *range(400, len(data), 997)}:
        cut = data[:length]
        with contextlib.suppress(CorruptMediaError):
            parse_image_header(cut)
        ImageMediaIO().probe_header(cut)


@given(st.data())
def test_damaged_headers_raise_only_our_errors(data: st.DataObject) -> None:
    source = bytearray(VARIANTS[data.draw(st.sampled_from(sorted(VARIANTS)))])
    for _ in range(data.draw(st.integers(1, 4))):
        source[data.draw(st.integers(0, min(len(source), 200) - 1))] = data.draw(
            st.integers(0, 255)
        )
    damaged = bytes(source)
    io_ = ImageMediaIO()
    io_.probe_header(damaged)
    try:
        io_.load_bytes_ref(damaged).decode()
    except LazyDecodeError as exc:
        assert "0x" not in str(exc)


def attack(kind: str) -> bytes:
    if kind == "jpeg-segments":
        return b"\xff\xd8" + b"\xff\xe5\x00\x02" * 2_000_000
    if kind == "jpeg-exif":
        return b"\xff\xd8" + (b"\xff\xe1\xff\xffExif\0\0" + b"x" * 65_527) * 300
    if kind == "jpeg-junk":
        return b"\xff\xd8\xff\xe0\x00\x02" + b"\0" * 8_000_000
    if kind == "png-chunks":
        return make_png()[:33] + png_chunk(b"tEXt", b"") * 500_000
    if kind == "png-empty-data":
        return make_png()[:33] + png_chunk(b"IDAT", b"") * 500_000
    if kind == "gif-comment":
        return b"GIF89a\x10\0\x10\0\0\0\0\x21\xfe" + (b"\xff" + b"c" * 255) * 200_000
    if kind == "gif-tiny-blocks":
        return b"GIF89a\x10\0\x10\0\0\0\0\x21\xfe" + b"\x01c" * 4_000_000
    return b"RIFF\xff\xff\xff\xffWEBPVP8X" + bytes(14) + b"ABCD\0\0\0\0" * 500_000


@pytest.mark.parametrize(
    "kind",
    [
        "jpeg-segments",
        "jpeg-exif",
        "jpeg-junk",
        "png-chunks",
        "png-empty-data",
        "gif-comment",
        "gif-tiny-blocks",
        "webp-chunks",
    ],
)
def test_a_file_of_nothing_but_header_is_refused_soon(kind: str) -> None:
    data = attack(kind)
    started = time.thread_time()
    with pytest.raises(CorruptMediaError):
        ImageMediaIO().load_bytes(data)
    # Read block by block as Pillow does, the worst of these take minutes.
    assert time.thread_time() - started < 5


def test_frame_counts_end_for_loops_and_cuts() -> None:
    gif, tiff = make_animation("GIF"), make_animation("TIFF")
    assert (count_gif_frames(gif), count_tiff_pages(tiff)) == (3, 3)
    for length in range(0, len(gif), 7):
        assert 1 <= count_gif_frames(gif[:length]) <= 3
    for length in range(0, len(tiff), 97):
        assert 1 <= count_tiff_pages(tiff[:length]) <= 3
    looping = bytearray(struct.pack("<2sHIH", b"II", 42, 8, 0) + struct.pack("<I", 8))
    assert count_tiff_pages(bytes(looping)) == 1


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_usual_header_is_read_as_any_other(format: str) -> None:
    data = make_image(format)
    assert read_usual_header(data) == parse_image_header(data)
    assert read_usual_header(data) is not None


def test_a_header_that_takes_long_or_is_unusual_is_known_as_such() -> None:
    jpeg, png = make_jpeg(), make_png()
    segment, chunk = b"\xff\xe4\x00\x04ab", png[8:33].replace(b"IHDR", b"zzZZ")
    facts = parse_image_header(jpeg)
    assert facts is not None
    assert read_usual_header(jpeg[:2] + 40 * segment + jpeg[2:]) == facts
    for odd in (80 * segment, b"\xff", b"\xff\xd0", b"\xff\x01"):
        data = jpeg[:2] + odd + jpeg[2:]
        assert read_usual_header(data) is None
        assert parse_image_header(data) == facts
    assert read_usual_header(jpeg[:20] + b"junk" + jpeg[20:]) is None
    assert parse_image_header(jpeg[:20] + b"junk" + jpeg[20:]) == facts
    assert read_usual_header(png[:33] + 100 * chunk + png[33:]) == parse_image_header(png)
    assert read_usual_header(png[:33] + 300 * chunk + png[33:]) is None
    for data in (jpeg[:20], png[:20], make_image("GIF"), b"", jpeg[:2], jpeg[:2] + b"\xff\xd9"):
        assert read_usual_header(data) is None


def test_much_metadata_is_not_read_at_once() -> None:
    jpeg, png = make_jpeg(), make_png()
    tiff = b"II*\0\x08\0\0\0\0\0"
    segment = b"\xff\xe1" + (8 + len(tiff)).to_bytes(2, "big") + b"Exif\0\0" + tiff
    assert read_usual_header(jpeg[:2] + segment + jpeg[2:]) == parse_image_header(jpeg)
    assert read_usual_header(jpeg[:2] + 2 * segment + jpeg[2:]) is None
    for kind, body in ((b"eXIf", tiff), (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0")):
        small, large = (png[:33] + png_chunk(kind, body + bytes(n)) + png[33:] for n in (9, 70_000))
        assert read_usual_header(small) == parse_image_header(small) == parse_image_header(png)
        assert read_usual_header(large) is None
        assert parse_image_header(large) == parse_image_header(png)
