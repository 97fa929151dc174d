"""RIFF WAVE: where the samples are, whatever the header claims, and what they are worth.

Recorders that stream write a data size of 0 or 2^32 - 1 and never come back to correct it, and
libsndfile then sees no samples. PCM, float, A-law and µ-law are decoded here with numpy, with
the scales of libsndfile; other encodings are left to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MAX_CHUNKS: Final = 10_000
_STREAMED_SIZES: Final = frozenset([0, 0x7FFFFFFF, 0xFFFFFFFF])
"""Data sizes that stand for: to the end of the file."""
_KNOWN_CHUNKS: Final = frozenset(
    [b"LIST", b"fact", b"id3 ", b"ID3 ", b"bext", b"cue ", b"JUNK", b"junk", b"smpl", b"PEAK"]
)

_PCM, _FLOAT, _ALAW, _MULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_BLOCK_SAMPLES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class WavLayout:
    """Where the samples of a WAV are and how they are stored."""

    encoding: int
    """Format tag: 1 PCM, 3 float, 6 A-law, 7 µ-law."""
    rate_hz: int
    channels: int
    sample_bytes: int
    """Bytes of one sample of one channel."""
    offset: int
    """Where the first sample is in the file."""
    num_samples: int
    """Whole samples per channel that are in the file."""


def parse_wav(data: bytes) -> WavLayout | None:
    """Read the header of a WAV; None if it is none, or of an encoding not decoded here."""
    if data[:4] not in (b"RIFF", b"RF64", b"BW64") or data[8:12] != b"WAVE":
        return None
    position, end = 12, len(data)
    fmt = b""
    for _ in range(_MAX_CHUNKS):
        if position + 8 > end:
            return None
        kind, size = struct.unpack_from("<4sI", data, position)
        position += 8
        if kind == b"data":
            after = data[position + size : position + size + 4]
            if size in _STREAMED_SIZES and not (size == 0 and after in _KNOWN_CHUNKS):
                size = end - position
            return _layout(fmt, position, min(size, end - position))
        if kind == b"fmt ":
            fmt = data[position : position + size]
        position += size + (size & 1)
    return None


def _layout(fmt: bytes, offset: int, num_bytes: int) -> WavLayout | None:
    if len(fmt) < 16:
        return None
    encoding, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", fmt)
    if encoding == _EXTENSIBLE and len(fmt) >= 26:
        (encoding,) = struct.unpack_from("<H", fmt, 24)  # first field of the sub-format
    if not channels or not rate:
        return None
    # The container decides: 24 valid bits may stand in 4 bytes.
    sample_bytes = block // channels if block and block % channels == 0 else (bits + 7) // 8
    if sample_bytes not in _SAMPLE_BYTES.get(encoding, ()):
        return None
    num_samples = num_bytes // (sample_bytes * channels)
    return WavLayout(encoding, rate, channels, sample_bytes, offset, num_samples)


_SAMPLE_BYTES: Final = {_PCM: (1, 2, 3, 4), _FLOAT: (4, 8), _ALAW: (1,), _MULAW: (1,)}


def read_wav(data: bytes, layout: WavLayout) -> Iterator[NDArray[np.float32]]:
    """Yield the samples in blocks of shape (samples, channels), float32; PCM is in [-1, 1)."""
    stride = layout.sample_bytes * layout.channels
    step = max(1, _BLOCK_SAMPLES // layout.channels)
    for first in range(0, layout.num_samples, step):
        count = min(step, layout.num_samples - first)
        raw = np.frombuffer(
            data, np.uint8, count=count * stride, offset=layout.offset + first * stride
        )
        yield _to_float(raw, layout).reshape(count, layout.channels)


def _to_float(raw: NDArray[np.uint8], layout: WavLayout) -> NDArray[np.float32]:
    if layout.encoding == _FLOAT:
        return raw.view(f"<f{layout.sample_bytes}").astype(np.float32)
    if layout.encoding == _ALAW:
        return _alaw_table()[raw]
    if layout.encoding == _MULAW:
        return _mulaw_table()[raw]
    if layout.sample_bytes == 1:  # 8 bits are unsigned: silence is 128
        return (raw.astype(np.float32) - np.float32(128)) / np.float32(128)
    if layout.sample_bytes == 2:
        return raw.view("<i2").astype(np.float32) / np.float32(2**15)
    if layout.sample_bytes == 3:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = raw.reshape(-1, 3)
        raw = wide.reshape(-1)
    samples: NDArray[Any] = raw.view("<i4")
    return samples.astype(np.float32) / np.float32(2**31)


@cache
def _alaw_table() -> NDArray[np.float32]:
    """ITU-T G.711 A-law: byte -> sample."""
    code = np.arange(256) ^ 0x55
    exponent, mantissa = (code >> 4) & 7, code & 15
    linear = np.where(
        exponent == 0, (mantissa << 4) + 8, ((mantissa << 4) + 0x108) << np.maximum(exponent - 1, 0)
    )
    signed = np.where(code & 0x80, linear, -linear)
    return (signed / 32768).astype(np.float32)


@cache
def _mulaw_table() -> NDArray[np.float32]:
    """ITU-T G.711 µ-law: byte -> sample."""
    code = ~np.arange(256) & 0xFF
    exponent, mantissa = (code >> 4) & 7, code & 15
    linear = (((mantissa << 3) + 0x84) << exponent) - 0x84
    signed = np.where(code & 0x80, -linear, linear)
    return (signed / 32768).astype(np.float32)
