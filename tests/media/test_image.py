"""ImageMediaIO: the right pixels from every accepted format, or our error."""

from __future__ import annotations

import io
import re
import struct
import tracemalloc
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pybase64
import pytest
from PIL import AvifImagePlugin, Image, ImageFile, ImageOps, JpegImagePlugin

from lazydecode.errors import CorruptMediaError, MediaTooLargeError, ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media.base import PayloadDigest, derive_media_key
from lazydecode.media.image import IMAGE_DECODER, ImageMediaIO
from tests.builders import (
    GREY,
    QUADRANTS,
    RED,
    corners,
    encode_image,
    join_png,
    make_animation,
    make_exif,
    make_gray16_png,
    make_image,
    make_jpeg,
    make_png,
    make_webp,
    noise,
    png_chunk,
    quadrants,
    split_png,
)

IMAGE_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")
WHITE = (255, 255, 255)


def decode(data: bytes, mode: str | None = "RGB", **options: Any) -> Image.Image:
    return ImageMediaIO(mode, **options).load_bytes_ref(data).decode()


def assert_quadrants(image: Image.Image, tolerance: int = 0, **expected: Any) -> None:
    wanted = {**QUADRANTS, **expected}
    for name, pixel in corners(image).items():
        assert np.abs(np.subtract(pixel, wanted[name])).max() <= tolerance, (name, pixel)


# -- formats

EXACT = ["PNG", "TIFF", "BMP", "WEBP"]
LOSSY = {"JPEG": 12, "GIF": 2, "AVIF": 20, "HEIF": 20}


@pytest.mark.parametrize("format", [*EXACT, *LOSSY])
def test_every_accepted_format_gives_its_pixels(format: str) -> None:
    data = make_webp() if format == "WEBP" else make_image(format)
    image = decode(data)
    assert image.mode == "RGB"
    assert image.size == (64, 48)
    assert_quadrants(image, LOSSY.get(format, 0))


@pytest.mark.parametrize("subtype", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"])
def test_compressed_tiff(subtype: str) -> None:
    assert_quadrants(
        decode(make_image("TIFF", compression=subtype)), 14 if subtype == "jpeg" else 0
    )


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_the_first_frame_of_an_animation_counts(format: str) -> None:
    image = decode(make_animation(format))
    assert image.size == (32, 32)
    assert_quadrants(image, 6, tl=RED, tr=RED, bl=RED, br=RED)


def test_a_jpeg_with_a_second_picture_is_one_picture() -> None:
    data = make_image("MPO", quality=95, save_all=True, append_images=[Image.new("RGB", (64, 48))])
    assert_quadrants(decode(data), 12)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"),
        ("PDF", b"%PDF-1.4\n"),
        ("WMF", b"\xd7\xcd\xc6\x9a\0\0" + bytes(40)),
        ("EMF", b"\x01\0\0\0" + bytes(36) + b" EMF"),
        ("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        ("FITS", b"SIMPLE  =                    T" + b" " * 50),
        ("GRIB", b"GRIB\0\0\0\1" + bytes(20)),
        ("BUFR", b"BUFR" + bytes(20)),
        ("HDF5", b"\x89HDF\r\n\x1a\n" + bytes(20)),
        ("MPEG", b"\0\0\1\xb3" + bytes(20)),
        ("XPM", b'/* XPM */\nstatic char *x[] = {"1 1 1 1", "a c #000000", "a"};'),
        ("XBM", b"#define x_width 1\n#define x_height 1\nstatic char x_bits[] = {0};"),
        ("IM", b"Image type: L\r\nImage size (x*y): 1*1\r\n" + b"\0" * 500),
        ("ICO", encode_image(quadrants((16, 16)), "ICO")),
        ("ICNS", encode_image(quadrants((16, 16)), "ICNS")),
        ("PPM", encode_image(quadrants(), "PPM")),
        ("TGA", encode_image(quadrants(), "TGA")),
        ("PCX", encode_image(quadrants(), "PCX")),
        ("SGI", encode_image(quadrants(), "SGI")),
        ("DDS", encode_image(quadrants(), "DDS")),
        ("JPEG2000", encode_image(quadrants(), "JPEG2000")),
        ("text", b"hello"),
        ("html", b"<!DOCTYPE html><html></html>"),
        ("nothing", b""),
        ("zeros", bytes(1000)),
    ],
)
def test_anything_else_is_refused_and_told_what_is_accepted(
    name: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Pillow was asked to find a format")

    monkeypatch.setattr(Image, "open", refuse)
    ref = ImageMediaIO().load_bytes_ref(data)
    assert ref.header is None
    with pytest.raises(CorruptMediaError, match=r"Failed to load image: .*JPEG, PNG"):
        ref.decode()


def test_a_plugin_registered_by_another_package_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a foreign plugin was used")

    monkeypatch.setitem(Image.OPEN, "PNG", (refuse, lambda prefix: True))
    monkeypatch.setitem(Image.OPEN, "EVIL", (refuse, lambda prefix: True))
    assert_quadrants(decode(make_png()))


# -- orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation_is_applied_once_as_pillow_does(format: str, orientation: int) -> None:
    options: dict[str, Any] = {"lossless": True} if format == "WEBP" else {}
    data = make_image(format, orientation=orientation, **options)
    image = decode(data)
    theirs = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert image.size == theirs.size
    assert image.tobytes() == theirs.tobytes()
    # Whoever turns what is decoded (the parse layer, a processor) finds nothing to turn.
    assert ImageOps.exif_transpose(image).tobytes() == image.tobytes()
    assert image.info == {}


@pytest.mark.parametrize("orientation", [0, 9, 255, 65_535])
def test_an_orientation_that_does_not_exist_is_ignored(orientation: int) -> None:
    assert_quadrants(decode(make_jpeg(orientation=orientation)), 12)


def test_broken_exif_is_ignored() -> None:
    exif = bytearray(make_exif(orientation=6).tobytes())
    exif[6:8] = b"XX"
    assert_quadrants(decode(make_jpeg(exif=bytes(exif))), 12)


# -- transparency


def clear_quadrant(mode: str) -> Image.Image:
    """The quadrant picture whose bottom right quarter is clear, and black underneath."""
    image = quadrants().convert("RGBA")
    image.paste((0, 0, 0, 0), (32, 24, 64, 48))
    return image.convert(mode)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_show_the_background(format: str) -> None:
    options: dict[str, Any] = {"lossless": True} if format == "WEBP" else {}
    data = make_image(format, image=clear_quadrant("RGBA"), **options)
    assert_quadrants(decode(data), br=WHITE)
    assert_quadrants(decode(data, rgba_background_color=[1, 2, 3]), br=(1, 2, 3))
    assert decode(data, "RGBA").getpixel((60, 40))[3] == 0  # type: ignore[index]


def test_half_transparent_pixels_are_mixed() -> None:
    image = Image.new("RGBA", (4, 4), (200, 100, 0, 128))
    pixel = np.array(decode(make_png(image=image)).getpixel((0, 0)))
    assert np.abs(pixel - (227, 177, 127)).max() <= 1


def test_grey_with_alpha() -> None:
    image = decode(make_png(image=clear_quadrant("LA")))
    assert corners(image)["br"] == WHITE
    assert corners(image)["tl"] == (87, 87, 87)


def test_a_palette_with_clear_entries() -> None:
    image = clear_quadrant("RGBA").quantize(8)
    assert_quadrants(decode(make_png(image=image)), 4, br=WHITE)


def test_a_palette_with_one_clear_entry() -> None:
    image = quadrants().quantize(4)
    clear = image.getpixel((60, 40))
    data = make_png(image=image, transparency=clear)
    assert_quadrants(decode(data), 4, br=WHITE)
    gif = make_image("GIF", image=image, transparency=clear)
    assert_quadrants(decode(gif), 4, br=WHITE)


def test_a_clear_key_colour() -> None:
    assert_quadrants(decode(make_png(transparency=GREY)), br=WHITE)
    assert_quadrants(
        decode(make_png(transparency=GREY), rgba_background_color=(0, 0, 9)), br=(0, 0, 9)
    )
    grey = make_png(image=Image.new("L", (4, 4), 7), transparency=7)
    assert decode(grey).getpixel((0, 0)) == WHITE
    bits = make_png(image=Image.new("1", (4, 4), 0), transparency=0)
    assert decode(bits).getpixel((0, 0)) == WHITE


def test_a_clear_key_colour_of_16_bits() -> None:
    row = struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0xFFFF, 0, 0)
    data = join_png(
        [
            (b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)),
            (b"tRNS", struct.pack(">3H", 0x1234, 0x5678, 0x9ABC)),
            (b"IDAT", zlib.compress(b"\0" + row)),
            (b"IEND", b""),
        ]
    )
    image = decode(data)
    assert [image.getpixel((x, 0)) for x in (0, 1)] == [WHITE, (255, 0, 0)]


def test_a_palette_tiff_with_alpha() -> None:
    image = clear_quadrant("LA")
    assert corners(decode(make_image("TIFF", image=image)))["br"] == WHITE


# -- modes


def test_16_bit_grey_is_scaled() -> None:
    values = np.linspace(0, 65_535, 256).astype(np.uint16)[None].repeat(4, axis=0)
    image = decode(make_gray16_png(values))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image)[..., 0], values >> 8)
    assert decode(make_gray16_png(values), "L").getpixel((255, 0)) == 255


def test_16_bit_grey_with_a_clear_level() -> None:
    values = np.array([[1000, 1001, 60_000]], np.uint16)
    image = decode(make_gray16_png(values, transparent=1000))
    assert [image.getpixel((x, 0)) for x in range(3)] == [WHITE, (3, 3, 3), (234, 234, 234)]


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_16_bit_grey_tiff(mode: str) -> None:
    values = np.linspace(0, 65_535, 64).astype("<u2" if mode == "I;16" else ">u2")[None]
    image = Image.frombytes(mode, (64, 1), values.tobytes())
    data = encode_image(image, "TIFF")
    assert np.array_equal(np.asarray(decode(data))[0, :, 1], values[0].astype(int) >> 8)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 128, 255]], np.int32), [0, 128, 255]),
        (np.array([[0, 32_768, 65_535]], np.int32), [0, 127, 255]),
        (np.array([[-5, 0, 2**30]], np.int32), [0, 0, 255]),
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 127, 255]),
        (np.array([[0.0, 100.0, 200.0]], np.float32), [0, 100, 200]),
        (np.array([[np.nan, np.inf, 1.0]], np.float32), [0, 0, 255]),
    ],
)
def test_wide_grey_without_a_stated_range(values: Any, expected: list[int]) -> None:
    image = decode(encode_image(Image.fromarray(values), "TIFF"))
    assert np.asarray(image)[0, :, 0].tolist() == expected


def test_cmyk_with_inverted_inks() -> None:
    assert_quadrants(decode(make_jpeg(mode="CMYK")), 20)
    assert_quadrants(decode(make_image("TIFF", mode="CMYK")), 2)


@pytest.mark.parametrize("mode", ["1", "L", "P", "YCbCr", "LAB"])
def test_other_stored_modes(mode: str) -> None:
    source = quadrants(mode=mode) if mode != "LAB" else lab()
    image = decode(encode_image(source, "TIFF"))
    assert image.mode == "RGB"
    expected = source.convert("RGB") if mode != "LAB" else quadrants()
    # LAB holds fewer colours than sRGB.
    assert np.abs(np.subtract(image, expected, dtype=int)).max() <= (10 if mode == "LAB" else 0)


def lab() -> Image.Image:
    from PIL import ImageCms

    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    converted = ImageCms.profileToProfile(quadrants(), *profiles, outputMode="LAB")
    assert converted is not None
    return converted


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "YCbCr", "HSV", "1", "P", "LA", "I", "F"])
def test_asked_modes(mode: str) -> None:
    assert decode(make_png(), mode).mode == mode


def test_no_mode_leaves_the_stored_one() -> None:
    assert decode(make_png(mode="P"), None).mode == "P"
    assert_quadrants(decode(make_png(image=quadrants().quantize(4)), None), 2)
    values = np.array([[1, 60_000]], np.uint16)
    assert np.array_equal(np.asarray(decode(make_gray16_png(values), None)), values)
    keyed = decode(make_png(transparency=GREY), None)
    assert keyed.info == {"transparency": GREY}
    assert keyed.convert("RGBA").getpixel((60, 40)) == (*GREY, 0)


def test_the_result_holds_no_file_and_no_metadata() -> None:
    data = make_jpeg(image_id=IMAGE_ID, icc_profile=b"p" * 1000, comment=b"c")
    image = decode(data)
    assert type(image) is Image.Image
    assert image.info == {}
    assert not hasattr(image, "fp")


# -- truncation and damage


def truncation_samples() -> dict[str, bytes]:
    picture = noise((120, 90))
    return {
        "jpeg": make_jpeg(image=picture),
        "jpeg-progressive": make_jpeg(image=picture, progressive=True),
        "jpeg-444": make_jpeg(image=picture, subsampling=0, optimize=True),
        "jpeg-grey": make_jpeg(image=picture.convert("L")),
        "jpeg-restart": make_jpeg(image=picture, restart_marker_rows=1),
        "jpeg-cmyk": make_jpeg(image=picture.convert("CMYK")),
        "png": make_png(image=picture),
        "png-palette": make_png(image=picture.quantize(64)),
        "webp": make_webp(image=picture, lossless=False),
        "webp-lossless": make_webp(image=picture),
        "gif": make_image("GIF", image=picture),
        "tiff": make_image("TIFF", image=picture),
        "tiff-lzw": make_image("TIFF", image=picture, compression="tiff_lzw"),
        "bmp": make_image("BMP", image=picture),
        "avif": make_image("AVIF", image=picture),
        "heif": make_image("HEIF", image=picture),
    }


@pytest.mark.parametrize("name", truncation_samples())
def test_a_cut_file_raises_or_is_whole(name: str) -> None:
    data = truncation_samples()[name]
    whole = decode(data).tobytes()
    step = max(1, len(data) // 60)
    raised = 0
    for length in [*range(0, len(data) - 40, step), *range(len(data) - 40, len(data))]:
        try:
            pixels = decode(data[:length]).tobytes()
        except CorruptMediaError:
            raised += 1
        else:
            # What is missing is only a trailer: every pixel is there.
            assert pixels == whole, length
    assert raised >= 55


JPEG_KINDS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "grey": {"image": noise((160, 120)).convert("L")},
    "444": {"subsampling": 0},
    "cmyk": {"image": noise((160, 120)).convert("CMYK")},
    "restart": {"restart_marker_rows": 1},
    "upright": {"orientation": 6},
}


@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("part", [0.2, 0.5, 0.8, 0.95])
def test_a_jpeg_cut_and_closed_or_filled_again_is_not_half_grey(kind: str, part: float) -> None:
    data = make_jpeg(**{"image": noise((160, 120)), **JPEG_KINDS[kind]})
    cut = data[: int(len(data) * part)]
    missing = len(data) - len(cut)
    for name, shape in {
        "stops": cut,
        "closed": cut + b"\xff\xd9",
        "filled": cut + bytes(missing),
        "filled further": cut + bytes(10 * missing),
        "another behind": cut + make_jpeg(),
    }.items():
        with pytest.raises(CorruptMediaError):
            decode(shape)
            pytest.fail(name)


def test_a_progressive_jpeg_that_stops_or_is_filled_is_refused() -> None:
    data = make_jpeg(image=noise((160, 120)), progressive=True)
    for part in (0.2, 0.5, 0.8, 0.95):
        cut = data[: int(len(data) * part)]
        for shape in (cut, cut + bytes(len(data)), cut + make_jpeg()):
            with pytest.raises(CorruptMediaError):
                decode(shape)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_a_picture_that_is_grey_is_whole(mode: str, options: dict[str, Any]) -> None:
    for level in (126, 127, 128, 129):
        image = Image.new("L", (120, 90), level).convert(mode)
        decoded = decode(make_jpeg(image=image, **options), "L")
        assert np.abs(np.asarray(decoded).astype(int) - level).max() <= 3


def test_a_header_that_states_another_size_than_the_picture_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for format in ("JPEG", "PNG", "TIFF"):
        ref = ImageMediaIO().load_bytes_ref(make_image(format))
        with monkeypatch.context() as patch:
            patch.setattr("lazydecode.media.image.open_image", lambda _: Image.new("RGB", (65, 48)))
            with pytest.raises(CorruptMediaError, match=r"states \(64, 48\).*\(65, 48\) pixels"):
                ref.decode()


def test_text_of_a_damaged_file_names_no_address_object_or_path() -> None:
    for data in (
        make_jpeg()[:-60],
        b"\xff\xd8\xff\xe0" + bytes(16),
        make_png()[:50],
        b"\xff\xd8\xff",
    ):
        with pytest.raises(CorruptMediaError) as caught:
            decode(data)
        text = str(caught.value)
        assert "0x" not in text and "object at" not in text and "/" not in text
        assert text.startswith("Failed to load image: ")
        assert caught.value.__cause__ is not None


FOREIGN = [
    OSError("read failed"),
    SyntaxError("broken PNG file"),
    struct.error("unpack requires a buffer of 4 bytes"),
    ValueError("bad value"),
    EOFError(),
    zlib.error("Error -3"),
    IndexError("index out of range"),
    KeyError("key"),
    TypeError("not a number"),
    AttributeError("no attribute"),
    OverflowError("too large"),
    ZeroDivisionError(),
    RuntimeError("could not create decoder object"),
    RecursionError(),
    NotImplementedError(),
    AssertionError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    Image.UnidentifiedImageError(
        "cannot identify image file <_io.BytesIO object at 0x7f0123456789>"
    ),
    BufferError(),
    UserWarning("metadata warning"),
]


@pytest.mark.parametrize("error", FOREIGN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stage", ["open", "load"])
def test_whatever_a_decoder_raises_becomes_our_error(
    stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    name = {"open": "_open", "load": "load"}[stage]
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, name, fail)
    ref = ImageMediaIO().load_bytes_ref(make_jpeg())
    with pytest.raises(CorruptMediaError, match=r"^Failed to load image: ") as caught:
        ref.decode()
    assert not re.search("0x[0-9a-f]{6,}", str(caught.value))
    assert not ref.is_decoded


@pytest.mark.parametrize(
    "error",
    [Image.DecompressionBombError("bomb"), Image.DecompressionBombWarning("bomb"), MemoryError()],
)
@pytest.mark.parametrize("stage", ["open", "load"])
def test_a_decoder_that_finds_it_too_large_is_a_size_error(
    stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    name = {"open": "_open", "load": "load"}[stage]
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, name, fail)
    with pytest.raises(MediaTooLargeError):
        decode(make_jpeg())


def test_an_interrupt_is_not_an_error_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", fail)
    with pytest.raises(KeyboardInterrupt):
        decode(make_jpeg())


# -- limits


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "HEIF"])
def test_too_many_pixels_are_refused_from_the_header(format: str) -> None:
    data = make_image(format, (64, 48))
    limits = DecodeLimits(max_image_pixels=64 * 48 - 1)
    with pytest.raises(MediaTooLargeError, match=r"64 x 48 pixels exceed the limit of 3071"):
        ImageMediaIO(limits=limits).load_bytes_ref(data)
    with pytest.raises(MediaTooLargeError):
        ImageMediaIO(limits=limits).load_bytes(data)
    assert decode(data, limits=DecodeLimits(max_image_pixels=64 * 48)).size == (64, 48)


def bomb() -> bytes:
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    return (
        make_png()[:8]
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", b"x")
        + png_chunk(b"IEND", b"")
    )


def test_a_bomb_costs_no_memory() -> None:
    data = bomb()
    tracemalloc.start()
    with pytest.raises(MediaTooLargeError, match="exceed"):
        ImageMediaIO().load_bytes_ref(data)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_zero_turns_the_pixel_limit_off() -> None:
    ref = ImageMediaIO(limits=DecodeLimits(max_image_pixels=0)).load_bytes_ref(bomb())
    assert ref.header is not None
    with pytest.raises(CorruptMediaError):
        ref.decode()


def test_our_limit_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for format in ("JPEG", "PNG", "BMP", "AVIF"):
        assert decode(make_image(format)).size == (64, 48)


# -- identity and options


def test_key_is_digest_of_bytes_and_spec() -> None:
    data = make_png()
    io_ = ImageMediaIO()
    expected = derive_media_key(data, io_.get_decode_spec())
    assert io_.load_bytes_ref(data).key == expected
    assert io_.load_bytes_ref(data, digest=PayloadDigest(data)).key == expected
    assert io_.load_bytes_ref(data).spec == io_.get_decode_spec()
    assert io_.load_bytes_ref(data).key_covers_spec
    assert ImageMediaIO("L").load_bytes_ref(data).key != expected


def test_spec_holds_every_option_as_it_is_used() -> None:
    spec = ImageMediaIO("L", rgba_background_color=(1, 2, 3), extra={"x": [1]}).get_decode_spec()
    assert spec.settings == {
        "decoder": IMAGE_DECODER,
        "image_mode": "L",
        "rgba_background_color": [1, 2, 3],
        "extra": {"x": [1]},
    }
    assert (
        ImageMediaIO().get_decode_spec()
        == ImageMediaIO(
            "RGB", rgba_background_color=[255, 255, 255], limits=DecodeLimits(max_image_pixels=5)
        ).get_decode_spec()
    )


def test_a_header_failure_is_left_for_the_decode() -> None:
    ref = ImageMediaIO().load_bytes_ref(b"not a picture")
    assert ref.key == derive_media_key(b"not a picture", ref.spec)
    with pytest.raises(CorruptMediaError):
        ref.decode()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_trusted_image_id_is_the_whole_key(format: str) -> None:
    data = make_image(format, image_id=IMAGE_ID)
    for mode in ("RGB", "L"):
        ref = ImageMediaIO(mode).load_bytes_ref(data)
        assert ref.key == IMAGE_ID.bytes
        assert not ref.key_covers_spec
        assert ref.fork().key_covers_spec is False
    untrusting = ImageMediaIO(trust_exif_image_id=False).load_bytes_ref(data)
    assert untrusting.key == derive_media_key(data, untrusting.spec)
    assert untrusting.key_covers_spec
    assert "trust" not in untrusting.spec.canonical_bytes().decode()


def test_encodings_of_one_picture_are_two_items_unless_an_image_id_makes_them_one() -> None:
    io_ = ImageMediaIO()
    for image_id, num_keys in ((None, 2), (IMAGE_ID, 1)):
        refs = [io_.load_bytes_ref(make_image(form, image_id=image_id)) for form in ("PNG", "WEBP")]
        assert len({ref.key for ref in refs}) == num_keys


def test_a_trusted_image_id_costs_no_pass_over_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("hashed")

    monkeypatch.setattr("lazydecode.media.image.PayloadDigest", refuse)
    assert ImageMediaIO().load_bytes_ref(make_jpeg(image_id=IMAGE_ID)).key == IMAGE_ID.bytes


def test_an_image_id_that_is_no_uuid_is_no_identity() -> None:
    data = make_jpeg(image_id="holiday")
    assert ImageMediaIO().load_bytes_ref(data).key_covers_spec


@pytest.mark.parametrize(
    "colour", [(1, 2), (1, 2, 3, 4), (1, 2, 256), (-1, 2, 3), (1.0, 2, 3), "red", 7, None]
)
def test_a_bad_background_is_refused_at_construction(colour: Any) -> None:
    with pytest.raises(ValidationError, match="rgba_background_color") as caught:
        ImageMediaIO(rgba_background_color=colour)
    assert isinstance(caught.value, ValueError)
    assert caught.value.status == 400


@pytest.mark.parametrize("mode", ["XYZ", "", "rgb", "I;16"])
def test_a_mode_that_does_not_exist_is_refused_at_construction(mode: str) -> None:
    with pytest.raises(ValidationError, match="image_mode"):
        ImageMediaIO(mode)


@pytest.mark.parametrize("value", [float("nan"), b"x", {1: 2}, object()])
def test_an_option_that_is_not_json_is_refused_at_construction(value: Any) -> None:
    with pytest.raises(ValidationError, match="image options"):
        ImageMediaIO(extra=value)


# -- the other ways in


def test_all_ways_in_give_the_same(tmp_path: Path) -> None:
    data = make_png()
    path = tmp_path / "picture.bin"
    path.write_bytes(data)
    text = pybase64.b64encode(data).decode()
    io_ = ImageMediaIO()
    ways: list[Callable[[], Image.Image]] = [
        lambda: io_.load_bytes(data),
        lambda: io_.load_base64("image/jpeg", text),
        lambda: io_.load_file(path),
        lambda: io_.load_base64_ref("", text).decode(),
        lambda: io_.load_file_ref(path).decode(),
    ]
    assert {way().tobytes() for way in ways} == {quadrants().tobytes()}
    keys = {io_.load_base64_ref("", text).key, io_.load_file_ref(path).key}
    assert keys == {io_.load_bytes_ref(data).key}
    with pytest.raises(CorruptMediaError, match="base64"):
        io_.load_base64_ref("image/png", text[:-1] + "!")


def test_spec_alone_rebuilds_the_decoder() -> None:
    asked = ImageMediaIO("L", rgba_background_color=[1, 2, 3]).load_bytes_ref(make_png())
    rebuilt = ImageMediaIO(**asked.spec.settings).load_bytes_ref(make_png())
    assert (rebuilt.key, rebuilt.spec) == (asked.key, asked.spec)
    assert rebuilt.decode().tobytes() == asked.decode().tobytes()


def test_a_ref_holds_no_second_copy_of_the_payload() -> None:
    data = make_png(image=noise((400, 300)))
    tracemalloc.start()
    ref = ImageMediaIO().load_bytes_ref(data)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ref.data is data
    assert held < 20_000 < len(data)


def test_a_failed_decode_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ref = ImageMediaIO().load_bytes_ref(make_png())
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", lambda _: (_ for _ in ()).throw(OSError("once")))
        with pytest.raises(CorruptMediaError, match="once"):
            ref.decode()
    assert_quadrants(ref.decode())


def test_chunks_after_the_end_do_not_matter() -> None:
    chunks = split_png(make_png())
    assert_quadrants(decode(join_png(chunks) + b"trailing bytes" * 100))
    assert_quadrants(decode(make_jpeg() + bytes(1000)), 12)


def test_threads_decode_every_format_alike() -> None:
    formats = ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "HEIF"]
    payloads = [
        make_image(format, image=noise((200, 150), seed=n)) for n, format in enumerate(formats)
    ]
    alone = [decode(data).tobytes() for data in payloads]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda data: decode(data).tobytes(), payloads * 8))
    assert together == alone * 8


def test_one_avif_picture_is_decoded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's own default is a thread per core for each picture."""
    threads: list[int] = []
    make = AvifImagePlugin._avif.AvifDecoder  # type: ignore[attr-defined]  # untyped

    def counted(data: bytes, codec: str, max_threads: int) -> object:
        threads.append(max_threads)
        return make(data, codec, max_threads)

    data = make_image("AVIF", image=noise((640, 480)))
    alone = decode(data).tobytes()
    monkeypatch.setattr(AvifImagePlugin._avif, "AvifDecoder", counted)  # type: ignore[attr-defined]
    assert decode(data).tobytes() == alone
    assert threads and set(threads) == {1}
    monkeypatch.setattr(AvifImagePlugin, "DEFAULT_MAX_THREADS", 4)  # what an application wants
    assert decode(data).tobytes() == alone
    assert threads[-1] == 4


def test_one_heic_picture_is_decoded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """libheif's own default, as pillow-heif sets it, is four for each picture."""
    threads: list[int] = []
    library = pillow_heif.heif._pillow_heif
    load = library.load_file

    def counted(data: bytes, max_threads: int, *options: object) -> object:
        threads.append(max_threads)
        return load(data, max_threads, *options)

    data = make_image("HEIF", image=noise((640, 480)))
    monkeypatch.setattr(library, "load_file", counted)
    monkeypatch.setattr(pillow_heif.options, "DECODE_THREADS", 4)
    decode(data)
    assert threads and set(threads) == {1}


# -- JPEGs at a part of their size


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_is_decoded_at_a_part_of_its_size(scale: int, orientation: int) -> None:
    data = make_jpeg((333, 217), orientation=orientation)
    ref = ImageMediaIO(jpeg_scale=scale).load_bytes_ref(data)
    width, height = ref.header.width, ref.header.height  # type: ignore[union-attr]
    image, full = ref.decode(), decode(data)
    assert image.size == (width, height)
    assert image.size == tuple(-(-side // scale) for side in full.size)
    # Not the mean of the full picture's pixels, but close to it.
    even = make_jpeg((336, 224), orientation=orientation)
    image, mean = decode(even, jpeg_scale=scale), decode(even).reduce(scale)
    assert np.abs(np.subtract(np.asarray(image, int), np.asarray(mean, int))).mean() < 1


def test_a_scaled_decode_has_another_identity_and_is_off_by_default() -> None:
    data = make_jpeg()
    keys = [ImageMediaIO(**o).load_bytes_ref(data).key for o in ({}, {"jpeg_scale": 1})]
    assert keys[0] == keys[1]
    scaled = [ImageMediaIO(jpeg_scale=n).load_bytes_ref(data).key for n in (2, 4, 8)]
    assert len({keys[0], *scaled}) == 4
    assert decode(data).size == (64, 48)


def test_only_jpegs_are_scaled_and_never_to_nothing() -> None:
    assert decode(make_png((64, 48)), jpeg_scale=8).size == (64, 48)
    assert decode(make_jpeg((64, 3)), jpeg_scale=8).size == (32, 2)
    assert decode(make_jpeg((1, 1)), jpeg_scale=2).size == (1, 1)


def test_a_scaled_decode_notices_a_jpeg_that_was_cut_and_closed() -> None:
    data = make_jpeg((256, 256))
    with pytest.raises(CorruptMediaError):
        decode(data[: len(data) * 2 // 3] + b"\xff\xd9", jpeg_scale=4)


@pytest.mark.parametrize("scale", [0, 3, 16, True, "2", 2.0, None])
def test_other_scales_are_refused(scale: object) -> None:
    with pytest.raises(ValidationError, match="jpeg_scale must be one of"):
        ImageMediaIO(jpeg_scale=scale)
