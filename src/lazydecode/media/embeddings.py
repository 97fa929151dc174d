"""Embeddings as media: `.npy`, safetensors and torch files become arrays, and nothing in them runs.

Only plain numbers are accepted. What a file states about shape and type is checked against the
bytes that are there before anything is allocated; object arrays and `.npz` are refused, and of
what `torch.save` writes only plain tensors are read. Values that are not finite are refused: one
of them in the prompt turns every later token into noise, for all requests of a batch.
"""

from __future__ import annotations

import io
import json
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from lazydecode.errors import CorruptMediaError, ValidationError
from lazydecode.limits import DecodeLimits
from lazydecode.media.base import DecodeSpec, MediaIO, decode_base64
from lazydecode.media.faults import corrupt_on_failure
from lazydecode.media.torch_file import load_torch

__all__ = ["EMBEDDING_DECODER", "EmbeddingMediaIO", "Embeddings", "load_npy", "load_safetensors"]

EMBEDDING_DECODER: Final = "embeddings/1"
"""What decodes, and the version of what it gives: part of every key, so a change of our output
changes the keys."""

Embeddings: TypeAlias = NDArray[Any] | dict[str, NDArray[Any]]
"""One array, or the named arrays of a safetensors or torch file."""

_FAILED: Final = "Failed to load embeddings"
_MAX_DIMENSIONS: Final = 8
_MAX_HEADER_BYTES: Final = 1024 * 1024
_MAX_ARRAYS: Final = 1024

_SAFETENSORS_TYPES: Final = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}
"""Type name in the file -> numpy type of its bytes."""


class EmbeddingMediaIO(MediaIO[Embeddings]):
    """Loads embeddings; the format goes by the bytes alone.

    Args:
        limits: What one decode may produce: only a sparse tensor can grow.
        kwargs: No option is known; all are part of the key.

    Raises:
        ValidationError: If an option is not a JSON value.
    """

    def __init__(
        self,
        *,
        limits: DecodeLimits = DecodeLimits(),  # noqa: B008  # frozen
        **kwargs: Any,
    ) -> None:
        self._limits = limits
        try:
            self._spec = DecodeSpec({**kwargs, "decoder": EMBEDDING_DECODER})
        except (TypeError, ValueError) as exc:
            raise ValidationError(f"embedding options: {exc}", parameter="media_io_kwargs") from exc

    def get_decode_spec(self) -> DecodeSpec:
        """All options."""
        return self._spec

    def load_bytes(self, data: bytes) -> Embeddings:
        """Return the arrays in `data`: writable copies in native byte order.

        Raises:
            CorruptMediaError: If it is neither `.npy` nor safetensors nor of `torch.save`, holds
                anything but finite plain numbers, or its size is not what it states.
        """
        with corrupt_on_failure(_FAILED):
            if data.startswith(npy_format.MAGIC_PREFIX):
                return load_npy(data)
            if data[8:9] == b"{":
                return load_safetensors(data)
            if data.startswith(b"PK"):
                return self._load_torch(data)
            raise CorruptMediaError(
                f"{_FAILED}: the format is not recognised; accepted are .npy, safetensors and "
                "tensors of torch.save"
            )

    def _load_torch(self, data: bytes) -> Embeddings:
        loaded = load_torch(data, max_dense_bytes=self._limits.max_embedding_bytes)
        if not isinstance(loaded, dict):
            return _checked_copy(loaded)
        return {name: _checked_copy(array) for name, array in loaded.items()}

    def load_base64(self, media_type: str, data: str) -> Embeddings:
        """Load from base64 text; the media type is not looked at."""
        return self.load_bytes(decode_base64(data))

    def load_file(self, filepath: Path) -> Embeddings:
        """Load a file."""
        return self.load_bytes(filepath.read_bytes())


def load_npy(data: bytes) -> NDArray[Any]:
    """Return the array of a `.npy` file.

    Raises:
        ValueError: If the file is malformed, or holds anything but finite plain numbers.
    """
    stream = io.BytesIO(data)
    formats: Any = npy_format  # numpy does not annotate these
    version = formats.read_magic(stream)
    reader = {
        (1, 0): formats.read_array_header_1_0,
        (2, 0): formats.read_array_header_2_0,
    }.get(version)
    if reader is None:
        raise ValueError(f"version {version} of the .npy format is not accepted")
    # numpy evaluates the header as a literal, and bounds its length (10,000 bytes).
    shape, is_fortran, dtype = reader(stream)
    if dtype.kind not in "fiub":
        raise ValueError(f"arrays of type {dtype.name} are not accepted")
    _check_shape(shape)
    body = data[stream.tell() :]
    if prod(shape) * dtype.itemsize != len(body):
        raise ValueError(f"shape {shape} of {dtype.name} does not fit {len(body)} bytes")
    array = np.frombuffer(body, dtype).reshape(shape, order="F" if is_fortran else "C")
    return _checked_copy(array)


def load_safetensors(data: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays of a safetensors file; bfloat16 becomes float32, exactly.

    Raises:
        ValueError: If the file is malformed (overlaps and gaps included), or holds anything but
            finite plain numbers.
    """
    header_bytes = int.from_bytes(data[:8], "little")
    if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"a header of {header_bytes} bytes is not accepted")
    header = json.loads(data[8 : 8 + header_bytes], object_pairs_hook=_no_duplicates)
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    header.pop("__metadata__", None)
    if not 1 <= len(header) <= _MAX_ARRAYS:
        raise ValueError(f"a file of {len(header)} arrays is not accepted")
    body = memoryview(data)[8 + header_bytes :]
    arrays, spans = {}, []
    for name, entry in header.items():
        array, span = _read_entry(name, entry, body)
        arrays[name] = array
        spans.append(span)
    position = 0
    for start, end in sorted(spans):
        if start != position:
            raise ValueError("the arrays overlap or leave gaps")
        position = end
    if position != len(body):
        raise ValueError("there are bytes behind the last array")
    return {name: _checked_copy(array) for name, array in arrays.items()}


def _read_entry(name: str, entry: Any, body: memoryview) -> tuple[NDArray[Any], tuple[int, int]]:
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of {name!r} is not an object")
    kind, shape = entry.get("dtype"), entry.get("shape")
    numpy_type = _SAFETENSORS_TYPES.get(kind) if isinstance(kind, str) else None
    if numpy_type is None:
        raise ValueError(f"arrays of type {kind!r} are not accepted")
    if not isinstance(shape, list):
        raise ValueError(f"the shape of {name!r} is not a list")
    _check_shape(tuple(shape))
    match entry.get("data_offsets"):
        case [int(start), int(end)] if 0 <= start <= end <= len(body):
            pass
        case offsets:
            raise ValueError(f"the offsets {offsets} of {name!r} are not in the file")
    dtype = np.dtype(numpy_type)
    if prod(shape) * dtype.itemsize != end - start:
        raise ValueError(f"shape {shape} of {kind} does not fit {end - start} bytes")
    array: NDArray[Any] = np.frombuffer(body[start:end], dtype).reshape(shape)
    if kind == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array, (start, end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = {key for key, _ in pairs}
    if len(keys) != len(pairs):
        raise ValueError("the header names something twice")
    return dict(pairs)


def _check_shape(shape: tuple[Any, ...]) -> None:
    if not 1 <= len(shape) <= _MAX_DIMENSIONS:
        raise ValueError(f"an array of {len(shape)} dimensions is not accepted")
    for side in shape:
        if not isinstance(side, int) or isinstance(side, bool) or side < 0:
            raise ValueError(f"shape {shape} is not of whole numbers")


def _checked_copy(array: NDArray[Any]) -> NDArray[Any]:
    """A writable copy in native byte order that does not hold the payload."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("there are values that are not finite")
    if array.dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise ValueError("there are booleans that are neither 0 nor 1")
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
