from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.errors import BlockedURLError, CorruptMediaError
from lazydecode.media.data_urls import decode_data_url, measure, parse_data_url, upper_bound

CASES = Path(__file__).parent.parent / "cases" / "media"
PICTURE = (CASES / "k4_tree" / "allowed" / "ok.png").read_bytes()


def decode(url: str | bytes | memoryview) -> bytes:
    return decode_data_url(parse_data_url(url))


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "charset",
        "wrong_image_type",
        "audio_type",
        "wrapped",
        "percent_padding",
        "not_base64",
    ],
)
def test_case_files_decode_to_the_picture(name: str) -> None:
    text = (CASES / f"k4_dataurl_{name}.txt").read_text()
    assert decode(text) == PICTURE
    assert decode(memoryview(text.encode())) == PICTURE


def test_an_empty_payload_is_an_error() -> None:
    with pytest.raises(CorruptMediaError, match="no data"):
        decode((CASES / "k4_dataurl_empty.txt").read_text())
    with pytest.raises(CorruptMediaError, match="no data"):
        decode("data:,")
    with pytest.raises(CorruptMediaError, match="no data"):
        decode("data:;base64, \n")


@pytest.mark.parametrize(
    ("url", "media_type", "data"),
    [
        ("data:image/png;base64,QUJD", "image/png", b"ABC"),
        ("DATA:IMAGE/PNG;BASE64,QUJD", "image/png", b"ABC"),
        ("data:;base64,QUJD", "text/plain", b"ABC"),
        ("data:image/svg+xml; charset=utf-8 ; base64,QUJD", "image/svg+xml", b"ABC"),
        ("data:audio/x-wav;codecs=1;base64,QUJD", "audio/x-wav", b"ABC"),
        ("data:,A%20B+C", "text/plain", b"A B+C"),
        ("data:text/plain,QUJD", "text/plain", b"QUJD"),
        ("data:a/b;base64, Q U\r\n\tJ D ", "a/b", b"ABC"),
        ("data:a/b;base64,QUI%3D", "a/b", b"AB"),
        ("data:a/b;base64,QUI=", "a/b", b"AB"),
        ("data:a/b;base64,-_-_", "a/b", b"\xfb\xff\xbf"),
        ("data:a/b;base64,%2D%5F-_", "a/b", b"\xfb\xff\xbf"),
        ("data:a/b;base64,-_8", "a/b", b"\xfb\xff"),
        ("data:a/b;base64,+/+/", "a/b", b"\xfb\xff\xbf"),
    ],
)
def test_usual_variants_are_accepted(url: str, media_type: str, data: bytes) -> None:
    assert parse_data_url(url).media_type == media_type
    assert decode(url) == data
    assert decode(url.encode()) == data


@pytest.mark.parametrize(
    "url",
    [
        "data:a/b;base64,QUI",  # no padding, and no URL-safe letter that would explain it
        "data:a/b;base64,QUJD=",
        "data:a/b;base64,Q",
        "data:a/b;base64,Q===",
        "data:a/b;base64,QU=I",
        "data:a/b;base64,QUI=QUI=",
        "data:a/b;base64,+_+_",  # two alphabets
        "data:a/b;base64,QU*D",
        "data:a/b;base64,QUJD#x",
        "data:a/b;base64,QUJ%",
        "data:a/b;base64,QUJ%4",
        "data:,a%zz",
    ],
)
def test_everything_else_is_corrupt(url: str) -> None:
    with pytest.raises(CorruptMediaError):
        decode(url)
    with pytest.raises(CorruptMediaError):
        decode(url.encode())


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:" + "x" * 2000 + ",QUJD",
        "data:base64,QUJD",
        "data:image;base64,QUJD",
        "data:image/png;base64;charset=utf-8,QUJD",
        "data:a/b;base64,QU\u00e9D",
    ],
)
def test_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(BlockedURLError):
        decode(url)


def test_non_ascii_bytes_are_corrupt() -> None:
    for url in (b"data:a/b;base64,QU\xffD", b"data:,\xff"):
        with pytest.raises(CorruptMediaError):
            decode(url)


def test_the_payload_is_a_view_of_the_request() -> None:
    body = b'{"url": "data:image/png;base64,QUJD"}'
    parsed = parse_data_url(memoryview(body)[9:-2])
    assert parsed.payload.obj is body
    assert "QUJD" not in repr(parsed)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 3), st.integers(1, 80))
def test_every_way_of_writing_a_payload_reads_back(data: bytes, form: int, width: int) -> None:
    text = base64.b64encode(data).decode()
    if form == 1:
        text = "\r\n".join(text[i : i + width] for i in range(0, len(text), width))
    elif form == 2:
        text = text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    elif form == 3:
        text = "".join(f"%{byte:02x}" for byte in data)
    marker = "" if form == 3 else ";base64"
    parsed = parse_data_url(f"data:a/b{marker},{text}")
    assert decode_data_url(parsed) == data
    assert upper_bound(parsed) >= measure(parsed) >= len(data)
    slack = 2 if form in (1, 2) else 0  # split or encoded padding is not seen
    assert measure(parsed) <= len(data) + slack


@given(st.binary(max_size=60), st.booleans())
def test_any_payload_is_decoded_or_refused(payload: bytes, is_base64: bool) -> None:
    url = b"data:a/b" + (b";base64," if is_base64 else b",") + payload
    try:
        data = decode_data_url(parse_data_url(url))
    except (BlockedURLError, CorruptMediaError):
        return
    assert data
    assert len(data) <= measure(parse_data_url(url))
