"""WAV: every sample format, and headers that are wrong about the length."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from lazydecode.errors import CorruptMediaError, LazyDecodeError, MediaTooLargeError
from lazydecode.limits import DecodeLimits
from lazydecode.media.audio import AudioMediaIO
from lazydecode.media.audio_decode import MonoSink, decode_soundfile
from lazydecode.media.wav import parse_wav, read_wav
from tests.builders import make_wav, tone

SUBTYPES = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ALAW", "ULAW"]


def fmt_chunk(encoding: int, channels: int, rate: int, sample_bytes: int, *extra: bytes) -> bytes:
    block = channels * sample_bytes
    body = struct.pack("<HHIIHH", encoding, channels, rate, rate * block, block, 8 * sample_bytes)
    return body + b"".join(extra)


def riff(*chunks: tuple[bytes, bytes], kind: bytes = b"RIFF") -> bytes:
    body = b"WAVE"
    for name, content in chunks:
        body += name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
    return kind + struct.pack("<I", len(body)) + body


def with_data_size(data: bytes, size: int) -> bytes:
    position = data.index(b"data") + 4
    return data[:position] + struct.pack("<I", size) + data[position + 4 :]


def decode(data: bytes, **options: Any) -> tuple[np.ndarray[Any, Any], int]:
    return AudioMediaIO(**options).load_bytes_ref(data).decode()


@pytest.mark.parametrize("subtype", SUBTYPES)
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_every_sample_format_is_what_libsndfile_reads(subtype: str, channels: int) -> None:
    source = tone([200.0 * (n + 1) for n in range(channels)], rate=8000, seconds=0.2)
    data = make_wav(source, rate=8000, subtype=subtype)
    layout = parse_wav(data)
    assert layout is not None
    assert (layout.rate_hz, layout.channels, layout.num_samples) == (8000, channels, 1600)
    ours = np.concatenate(list(read_wav(data, layout)))
    theirs, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert ours.dtype == np.float32
    assert np.array_equal(ours, theirs)
    samples, rate = decode(data)
    assert rate == 8000
    assert samples.shape == (1600,)
    assert np.abs(samples - source.mean(axis=1)).max() < (
        0.02 if subtype in ("ALAW", "ULAW", "PCM_U8") else 0.001
    )


@pytest.mark.parametrize("subtype", ["IMA_ADPCM", "MS_ADPCM", "GSM610"])
def test_other_encodings_are_left_to_libsndfile(subtype: str) -> None:
    data = make_wav(rate=8000, subtype=subtype)
    assert parse_wav(data) is None
    samples, rate = decode(data)
    assert (rate, samples.dtype) == (8000, np.float32)
    assert abs(np.abs(samples[1000:3000]).max() - 0.5) < 0.08


@pytest.mark.parametrize("encoding", ["ALAW", "ULAW"])
def test_every_code_of_companded_audio(encoding: str) -> None:
    tag = {"ALAW": 6, "ULAW": 7}[encoding]
    data = riff((b"fmt ", fmt_chunk(tag, 1, 8000, 1)), (b"data", bytes(range(256))))
    theirs, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    assert np.array_equal(decode(data)[0], theirs)


@pytest.mark.parametrize("size", [0, 0x7FFFFFFF, 0xFFFFFFFF, 10**9])
def test_a_placeholder_length_means_to_the_end(size: int) -> None:
    data = make_wav()
    samples, _ = decode(with_data_size(data, size))
    assert np.array_equal(samples, decode(data)[0])
    header = AudioMediaIO().probe_header(with_data_size(data, size))
    assert header is not None
    assert header.num_samples == len(samples)


def test_a_length_of_zero_before_another_chunk_is_zero() -> None:
    data = riff((b"fmt ", fmt_chunk(1, 1, 8000, 2)), (b"data", b""), (b"LIST", b"INFO" * 100))
    with pytest.raises(CorruptMediaError, match="no samples"):
        decode(data)


def test_chunks_around_the_samples_are_skipped() -> None:
    fmt, samples = fmt_chunk(1, 1, 8000, 2), struct.pack("<4h", 0, 16384, -16384, 32767)
    data = riff(
        (b"JUNK", b"j" * 33),
        (b"LIST", bytes(100_001)),
        (b"fmt ", fmt),
        (b"fact", bytes(4)),
        (b"data", samples),
        (b"LIST", b"INFO"),
    )
    assert decode(data)[0].tolist() == [0.0, 0.5, -0.5, 32767 / 32768]


def test_extensible_headers_name_their_encoding() -> None:
    guid = bytes.fromhex("000000001000800000aa00389b71")
    for tag, sample_bytes, raw in (
        (1, 2, struct.pack("<h", 8192)),
        (3, 4, struct.pack("<f", 0.25)),
    ):
        extra = struct.pack("<HHIH", 22, 8 * sample_bytes, 4, tag) + guid
        data = riff((b"fmt ", fmt_chunk(0xFFFE, 1, 48000, sample_bytes, extra)), (b"data", raw))
        assert decode(data) == (pytest.approx([0.25]), 48000)


def test_24_valid_bits_in_4_bytes() -> None:
    guid = bytes.fromhex("000000001000800000aa00389b71")
    extra = struct.pack("<HHIH", 22, 24, 4, 1) + guid
    fmt = struct.pack("<HHIIHH", 0xFFFE, 1, 8000, 32000, 4, 24) + extra
    data = riff((b"fmt ", fmt), (b"data", struct.pack("<i", 1 << 29)))
    assert decode(data)[0].tolist() == [0.25]


def test_rf64_takes_the_length_of_the_file() -> None:
    data = riff(
        (b"ds64", bytes(28)),
        (b"fmt ", fmt_chunk(1, 1, 8000, 2)),
        (b"data", struct.pack("<2h", 1, 2)),
        kind=b"RF64",
    )
    assert len(decode(with_data_size(data, 0xFFFFFFFF))[0]) == 2


def test_a_part_of_a_sample_at_the_end_is_dropped() -> None:
    data = riff((b"fmt ", fmt_chunk(1, 2, 8000, 2)), (b"data", bytes(11)))
    assert len(decode(data)[0]) == 2


@pytest.mark.parametrize(
    "fmt",
    [
        b"",
        fmt_chunk(1, 0, 8000, 2),
        fmt_chunk(1, 1, 0, 2),
        fmt_chunk(1, 1, 8000, 0),
        fmt_chunk(1, 1, 8000, 9),
        fmt_chunk(0x55AA, 1, 8000, 2),
    ],
)
def test_an_impossible_format_is_refused(fmt: bytes) -> None:
    with pytest.raises(CorruptMediaError):
        decode(riff((b"fmt ", fmt), (b"data", bytes(64))))


def test_samples_that_are_not_finite_are_refused() -> None:
    for value in (np.nan, np.inf):
        samples = np.array([[0.0], [value]])
        with pytest.raises(CorruptMediaError, match="not finite"):
            decode(make_wav(samples, subtype="FLOAT"))


def test_floats_beyond_one_are_kept() -> None:
    samples, _ = decode(make_wav(np.array([[2.5], [-3.0]]), subtype="FLOAT"))
    assert samples.tolist() == [2.5, -3.0]


def test_the_mean_of_all_channels_is_what_counts() -> None:
    samples = np.array([[0.5, -0.5, 0.25, 0.75]])
    assert decode(make_wav(samples, subtype="FLOAT"))[0].tolist() == [0.25]


def test_blocks_join_seamlessly() -> None:
    source = tone([440.0, 441.0], rate=48000, seconds=12)
    data = make_wav(source, rate=48000)
    ours, rate = decode(data)
    theirs, _ = decode_soundfile(data, DecodeLimits())
    assert rate == 48000
    assert np.array_equal(ours, theirs)


def test_a_limit_is_checked_before_anything_is_decoded() -> None:
    data = make_wav(rate=8000, seconds=3)
    with pytest.raises(MediaTooLargeError, match=r"duration of 3\.0 s .* limit of 2 s"):
        decode(data, limits=DecodeLimits(max_audio_duration_s=2))
    with pytest.raises(MediaTooLargeError, match="decoded size"):
        decode(data, limits=DecodeLimits(max_audio_decoded_bytes=8000 * 3 * 4 - 1))


@given(st.binary(max_size=200))
def test_any_bytes_behind_the_magic_are_read_or_refused(body: bytes) -> None:
    data = b"RIFF\0\0\0\0WAVE" + body
    AudioMediaIO().probe_header(data)
    try:
        decode(data)
    except LazyDecodeError as exc:
        assert "0x" not in str(exc)


def test_samples_whose_power_is_infinite_are_refused() -> None:
    sink = MonoSink(16_000, 1, DecodeLimits())
    sink.write(np.full((8, 1), 2.0**31, np.float32))
    for sample in (3e38, -3e38):
        with pytest.raises(CorruptMediaError, match="samples beyond 1e"):
            sink.write(np.full((8, 1), sample, np.float32))
